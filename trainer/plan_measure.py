"""What this machine reaches, written as a hardware file for ``plan --gpu``; and how long planned layouts really take."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import tomli_w
import torch
import torch.distributed as dist

from parallelize.planner.hardware import cluster_of
from parallelize.planner.op_time import HALF_HEAD_DIM
from parallelize.planner.operations import Attention
from trainer.config import Checkpoint, Config, Debug, Metrics, Validation
from trainer.config_load import dump_config
from trainer.errors import UserError
from trainer.launch import rendezvous_flags
from trainer.output_folder import write_whole
from trainer.rank import run_rank
from trainer.torchrun import run_ranks

_MATMULS = {"cpu": (128, 1024), "cuda": (512, 8192)}  # a small and a large square one
_SEQUENCES = {"cpu": (64, 512), "cuda": (512, 8192)}  # tokens of a short and a long one
_COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes
_MESSAGES = {"cpu": (1 << 16, 1 << 24), "cuda": (1 << 16, 1 << 28)}  # bytes of a small and a large collective
_STEPS = 5  # of a measured layout; the first compiles, connects and fills caches


def measure_machine(path: Path, base: str, nproc: int) -> int:
    """Measure this machine with ``nproc`` ranks and write what ``--gpu PATH`` reads. Returns the exit code.

    Matmuls and attention (fp32 on a CPU, bf16 on a GPU), a copy, launches; with two ranks or more, collectives between
    them; and with NNODES machines in the environment, which all run this, collectives between machines. The first one
    writes. Raises ``UserError``.
    """
    rendezvous, n_nodes = rendezvous_flags(max_restarts=0)
    is_first = n_nodes == 1 or os.environ.get("NODE_RANK") == "0"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(max(1, torch.get_num_threads() // nproc))  # a rank's share of a CPU
    tables = {"base": base, **_measure_device(device, cluster_of(base, 1, 1).gpu.peak_flops)}
    if nproc * n_nodes > 1:
        with tempfile.TemporaryDirectory(prefix="meshloom-measure-") as folder:
            answer = Path(folder) / "links.json"
            if run_ranks(nproc, ["-m", "trainer.plan_measure", str(answer)], rendezvous):
                raise UserError(f"--measure: the {nproc * n_nodes} ranks that measure the links failed")
            links = json.loads(answer.read_text()) if is_first else {}
        for name, link in links.items():
            tables[name] = link
            tables["calibration"][f"{name}_efficiency"] = 1.0  # measured as it is
    if is_first:
        write_whole(path, tomli_w.dumps(tables))
        print(f"written: {path}; use it with --gpu {path}")
    return 0


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
        peak_flops = gpu["peak_flops"] = reached
        calibration["matmul_efficiency"] = 1.0
    calibration |= _measure_attention(device, dtype, peak_flops)
    return {"gpu": gpu, "calibration": calibration}


def _measure_attention(device: torch.device, dtype: torch.dtype, peak_flops: float) -> dict:
    """Constants of causal attention, from a short and a long sequence forward, and the long one backward."""
    rates = []
    for seq_len in _SEQUENCES[device.type]:
        work = Attention(1, 8, 8, seq_len, head_dim=128)
        query, key, value = (
            torch.randn(1, 8, seq_len, 128, device=device, dtype=dtype, requires_grad=True) for _ in range(3)
        )
        attention = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True)
        rates.append(work.flops / _seconds(attention, device))
    output = attention()
    gradient = torch.ones_like(output)
    backward_s = _seconds(partial(output.backward, gradient, retain_graph=True), device)
    half = half_length(*_SEQUENCES[device.type], *rates)
    long = _SEQUENCES[device.type][1]
    reached = rates[1] * (long + half) / long * (128 + HALF_HEAD_DIM) / 128
    return {
        "attention_efficiency": min(1.0, reached / peak_flops),
        "attention_half_seq": half,
        "attention_backward": min(1.0, replace(work, backward=True).flops / backward_s / rates[1]),
    }


def half_length(short: int, long: int, short_rate: float, long_rate: float) -> float:
    """The h of rate(s) = peak s / (s + h); 0 where the short is no slower."""
    ratio = short_rate / long_rate
    return max(0.0, short * long * (1 - ratio) / max(ratio * long - short, 1e-9 * long))


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


def _links(device: torch.device) -> dict:
    """Of the ranks on each machine, and of ranks one on each machine, all such groups at once. On every rank."""
    n_local = int(os.environ["LOCAL_WORLD_SIZE"])
    ranks = torch.arange(dist.get_world_size()).view(-1, n_local)
    links = {}
    for name, groups in (("node_link", ranks), ("network_link", ranks.T)):
        if groups.shape[1] > 1:
            group, _ = dist.new_subgroups_by_enumeration(groups.tolist())
            links[name] = _link(group, device)
    return links


def _link(group: dist.ProcessGroup, device: torch.device) -> dict:
    """Bytes per second and latency of a ring over a group, from a small and a large all-reduce of two rounds each; of
    the slowest group."""
    n = group.size()
    seconds = []
    for size in _MESSAGES[device.type]:
        buffer = torch.zeros(size // 4, device=device)
        dist.barrier()
        mine = _seconds(partial(dist.all_reduce, buffer, group=group), device)
        slowest = torch.tensor(mine, dtype=torch.float64, device=device)
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
            "checkpoint": Checkpoint(interval=0, init_from=config.checkpoint.init_from),
            "metrics": Metrics(tensorboard=False),
            "validation": Validation(),
            "debug": Debug(),
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
        links = _links(device)
        if dist.get_rank() == 0:
            answer.write_text(json.dumps(links), encoding="utf-8")
        return 0

    return run_rank(work)


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1])))
