"""Out of memory: who holds it. (What would help: explain.py.)"""

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from parallelize.grad_norm import local_tensor
from trainer.hardware import GIB, memory_bytes

_SHOWN = 8  # largest tensors


def start_history() -> None:
    """From now on note on a GPU where memory is allocated: a few microseconds each."""
    torch.cuda.memory._record_memory_history(max_entries=100_000)


def memory_report(
    named: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, device: torch.device, doing: str
) -> str:
    """Lines that say what this rank's memory is full of. ``doing``: where it ran out, for the reader."""
    shares: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer state": 0}
    holders: list[tuple[int, str]] = []
    for name, parameter in named.items():
        state = optimizer.state.get(parameter, {})
        for kind, key, tensor in (
            ("parameters", name, parameter),
            ("gradients", f"the gradient of {name}", parameter.grad),
            *(("optimizer state", f"{part} of {name}", value) for part, value in state.items()),
        ):
            if isinstance(tensor, torch.Tensor):
                n_bytes = local_tensor(tensor).untyped_storage().nbytes()
                shares[kind] += n_bytes
                holders.append((n_bytes, key))
    allocated, reserved, peak = memory_bytes(device.type)
    rest = max(0, allocated - sum(shares.values()))
    where = f"allocated ({reserved / GIB:.2f} reserved)" if device.type == "cuda" else "resident"
    shown = ", ".join(f"{kind} {n_bytes / GIB:.2f}" for kind, n_bytes in shares.items())
    largest = ", ".join(f"{name} {n_bytes / GIB:.2f}" for n_bytes, name in sorted(holders, reverse=True)[:_SHOWN])
    return (
        f"out of memory in {doing}: {allocated / GIB:.2f} GiB {where}, {peak / GIB:.2f} at the most: "
        f"{shown}, all else {rest / GIB:.2f} GiB (activations, logits, gathered parameters, buffers)\n"
        f"largest by name, in GiB: {largest}"
    )


def write_snapshot(path: Path) -> None:
    """What ``start_history`` has noted, for https://docs.pytorch.org/memory_viz. Says where it is, or why it is not."""
    try:
        path.parent.mkdir(exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
        print(f"memory snapshot: {path} (open it in docs.pytorch.org/memory_viz)", file=sys.stderr, flush=True)
    except (OSError, RuntimeError) as error:
        print(f"warning: no memory snapshot: {error}", file=sys.stderr, flush=True)
