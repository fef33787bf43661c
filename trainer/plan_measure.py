"""What this machine reaches, written as a hardware file for ``plan --gpu``; and how long planned layouts really take."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tomli_w
import torch
import torch.distributed as dist

from parallelize.planner.hardware import cluster_of
from trainer.config import Config
from trainer.config_load import dump_config
from trainer.errors import UserError
from trainer.launch import run_ranks
from trainer.output_folder import write_whole
from trainer.rank import run_rank

_MATMULS = {"cpu": (128, 1024), "cuda": (512, 8192)}  # a small and a large square one
_COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes
_MESSAGES = {"cpu": (1 << 16, 1 << 24), "cuda": (1 << 16, 1 << 28)}  # bytes of a small and a large collective
_STEPS = 5  # of a measured layout; the first compiles, connects and fills caches


def measure_machine(path: Path, base: str, nproc: int) -> None:
    """Measure this machine with ``nproc`` ranks and write what ``--gpu PATH`` reads. Raises ``UserError``.

    Matmuls (fp32 on a CPU, bf16 on a GPU), a copy, launches; and with two ranks or more, collectives between them.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(max(1, torch.get_num_threads() // nproc))  # a rank's share of a CPU
    tables = {"base": base, **_measure_device(device, cluster_of(base, 1, 1).gpu.peak_flops)}
    if nproc > 1:
        with tempfile.TemporaryDirectory(prefix="meshloom-measure-") as folder:
            answer = Path(folder) / "link.json"
            if run_ranks(nproc, ["-m", "trainer.plan_measure", str(answer)]):
                raise UserError(f"--measure: the {nproc} ranks that measure the links failed")
            tables["node_link"] = json.loads(answer.read_text())
        tables["calibration"]["node_link_efficiency"] = 1.0  # measured as it is
    write_whole(path, tomli_w.dumps(tables))


def _measure_device(device: torch.device, peak_flops: float) -> dict:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rates = []
    for size in _MATMULS[device.type]:
        square = torch.randn(size, size, device=device, dtype=dtype)
        rates.append(2 * size**3 / _seconds(partial(torch.matmul, square, square), device))
    half = half_size(*_MATMULS[device.type], *rates)
    large = _MATMULS[device.type][1]
    reached = rates[1] * ((large + half) / large) ** 3  # of a matmul without end
    source = torch.empty(_COPIED[device.type] // 4, device=device)
    target = torch.empty_like(source)
    one = torch.ones(1, device=device)
    gpu = {"memory_bytes_per_s": 2 * source.nbytes / _seconds(lambda: target.copy_(source), device)}
    calibration = {
        "label": f"measured here ({device.type})",
        "matmul_half_size": half,
        "memory_efficiency": 1.0,
        "launch_s": _seconds(lambda: [one.add_(1) for _ in range(100)], device) / 100,
    }
    if device.type == "cuda":  # against the data sheet, as MFU is
        calibration["matmul_efficiency"] = min(1.0, reached / peak_flops)
    else:
        gpu["peak_flops"], calibration["matmul_efficiency"] = reached, 1.0
    return {"gpu": gpu, "calibration": calibration}


def half_size(small: int, large: int, small_rate: float, large_rate: float) -> float:
    """The h of rate(s) = peak (s / (s + h))^3 from the rates of two square matmuls; 0 where the small is no slower."""
    root = (small_rate / large_rate) ** (1 / 3)
    if root >= 1:
        return 0.0
    return small * large * (1 - root) / max(root * large - small, 1e-9 * large)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """Of one call, the fastest of several: whatever disturbs makes it slower."""
    best = float("inf")
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _link(device: torch.device) -> dict:
    """Bytes per second and latency of a ring over all ranks, from a small and a large all-reduce of two rounds each."""
    n = dist.get_world_size()
    seconds = []
    for size in _MESSAGES[device.type]:
        buffer = torch.zeros(size // 4, device=device)
        dist.barrier()
        slowest = torch.tensor(_seconds(partial(dist.all_reduce, buffer), device), dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        seconds.append(slowest.item())
    small, large = _MESSAGES[device.type]
    passed_on = 2 * (large - small) * (n - 1) / n
    return {
        "bytes_per_s": passed_on / max(seconds[1] - seconds[0], 1e-9),
        "latency_s": seconds[0] / (2 * (n - 1)),
    }


def measured_step_s(config: Config, nproc: int) -> float:
    """Seconds of a step of ``config`` on ``nproc`` processes of this machine. Raises ``UserError``."""
    with tempfile.TemporaryDirectory(prefix="meshloom-plan-") as folder:
        run = Path(folder) / "run"
        short = {
            "job": config.job.model_copy(update={"output_dir": str(run)}),
            "training": config.training.model_copy(update={"steps": _STEPS}),
            "checkpoint": config.checkpoint.model_copy(update={"interval": 0, "export_dir": None, "resume": "auto"}),
            "metrics": config.metrics.model_copy(update={"log_interval": 1, "tensorboard": False}),
            "validation": config.validation.model_copy(update={"interval": 0}),
            "lr_schedule": config.lr_schedule.model_copy(update={"total_steps": None, "warmup_steps": 0}),
        }
        written = Path(folder) / "config.toml"
        written.write_text(dump_config(config.model_copy(update=short)), encoding="utf-8")
        command = [sys.executable, "-m", "trainer.launch", "--config", str(written), "--nproc", str(nproc)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[0]
            raise UserError(f"--measure-top: a planned layout did not run: {reason}")
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return statistics.median(json.loads(line)["step_time_s"] for line in lines[1:])


def _rank_main(answer: Path) -> int:
    def work(device: torch.device, _) -> int:
        link = _link(device)
        if dist.get_rank() == 0:
            answer.write_text(json.dumps(link), encoding="utf-8")
        return 0

    return run_rank(work)


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1])))
