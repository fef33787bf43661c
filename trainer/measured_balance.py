"""``parallel.balance = "measured"``: layers over pipeline stages by the seconds that this machine's devices need."""

import contextlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from parallelize.balance import balance_costs
from parallelize.mesh import Mesh
from trainer.build import allocate_units, build_units
from trainer.config_rules import Resolved
from trainer.output_folder import write_whole
from trainer.rank import on_main_rank
from trainer.traced_units import UNITS, run_unit, with_one_block

_FILE = "unit_times.json"
_REPEATS = 5  # after one that compiles and allocates


def with_measured_balance(resolved: Resolved, mesh: Mesh, device: torch.device, folder: Path) -> Resolved:
    """``resolved`` with the list of layers that the measured seconds of its units make. Called by all ranks together.

    Measured once a run: a later start of the same job finds them in ``folder``, and has the same stages.
    """
    measured_for = _measured_for(resolved, device)
    seconds = on_main_rank(_read, folder / _FILE, measured_for)
    when = "at an earlier start"
    if seconds is None:
        when = "now"
        seconds = measure_units(resolved, mesh, device)
        if dist.get_rank() == 0:
            write_whole(folder / _FILE, json.dumps({"measured_for": measured_for, "seconds": seconds}, indent=1))
    layers = balance_costs(
        (seconds["block"],) * resolved.architecture.n_layers, len(resolved.layers_per_stage),
        first=seconds["embedding"], last=seconds["head"],
    )  # fmt: skip
    if dist.get_rank() == 0:
        shown = ", ".join(f"{unit} {1e3 * seconds[unit]:.3g} ms" for unit in UNITS)
        print(f"measured    {when}, one micro-batch: {shown}", flush=True)
    parallel = resolved.config.parallel.model_copy(update={"balance": layers})
    return replace(resolved, config=resolved.config.model_copy(update={"parallel": parallel}), layers_per_stage=layers)


def measure_units(resolved: Resolved, mesh: Mesh, device: torch.device) -> dict[str, float]:
    """Unit -> seconds of its forward and backward of one micro-batch, on the slowest rank.

    Each rank runs the real units, tensor parallel and recomputed as configured, with any weights; FSDP2 and the pipeline are left out.
    """
    small = with_one_block(resolved)
    part = build_units(small, mesh, device.type)
    allocate_units(part, device)
    with torch.device(device):
        seconds = [run_unit(_seconds, unit, contextlib.nullcontext(), part, small, mesh) for unit in UNITS]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(UNITS, slowest.tolist()))


def _seconds(_, unit: nn.Module, run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> float:
    """The fastest of several: whatever disturbs makes it slower."""
    best = float("inf")
    for _ in range(_REPEATS + 1):
        unit.zero_grad()
        _synchronize(inputs[0].device)
        start = time.perf_counter()
        output = run()
        output.backward(torch.ones_like(output))
        _synchronize(inputs[0].device)
        best = min(best, time.perf_counter() - start)
    unit.zero_grad()
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _measured_for(resolved: Resolved, device: torch.device) -> dict:
    """What the seconds depend on. Where it is another, they are measured anew."""
    config = resolved.config
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {
        "model": config.model.model_dump(exclude={"n_layers"}),
        "micro_batch": [config.training.micro_batch_size, config.training.seq_len],
        "tp": resolved.layout.tp,
        "parallel": config.parallel.model_dump(include={"sequence_parallel", "loss_parallel", "replicate_kv_heads"}),
        "recompute": config.activation_checkpoint.mode,
        "compute": config.precision.compute,
        "compile": config.compile.model_dump(),
        "trained": [config.training.method, list(config.training.freeze), config.lora.model_dump(mode="json")],
        "device": name,
    }


def _read(path: Path, measured_for: dict) -> dict[str, float] | None:
    """What an earlier start of the same job has left; None if there is nothing of use."""
    try:
        left = json.loads(path.read_text(encoding="utf-8"))
        seconds = {unit: float(left["seconds"][unit]) for unit in UNITS}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    usable = left.get("measured_for") == measured_for and all(0 < value < math.inf for value in seconds.values())
    return seconds if usable else None
