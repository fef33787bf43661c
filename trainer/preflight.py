"""Before a run: do the machines agree, and do their links work? A wrong answer costs seconds now, not a night."""

import hashlib
import os
import platform
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from parallelize.layout import AXES, Layout
from parallelize.mesh import Mesh
from trainer.config import Config
from trainer.errors import UserError

_PACKAGES = ("models", "parallelize", "trainer")
_CLOCKS_APART_S = 5.0
_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}  # enough to fill a link, little enough to take no time


def check_machines(config: Config, layout: Layout) -> None:
    """Raise ``UserError`` where ranks run other code, torch, Python or config than rank 0, or tp groups span machines.

    Warns where the clocks are apart. Called by all ranks together.
    """
    dist.barrier()  # so that the clocks are read at one moment
    mine = {
        "machine": f"{socket.gethostname()}#{os.environ.get('GROUP_RANK', '0')}",  # torchrun's number of it
        "clock": time.time(),
        "the config": hashlib.sha256(config.model_dump_json().encode()).hexdigest(),
        "the code of Meshloom": _code_digest(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
    ranks: list = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    problems = [
        f"{what} differs between machines: rank {rank} ({seen['machine'].split('#')[0]}) has {seen[what][:12]}, rank 0 "
        f"{ranks[0][what][:12]}: start the same on every one"
        for what in ("the config", "the code of Meshloom", "torch", "Python")
        for rank, seen in _first_other(ranks, what)
    ]
    machines = [seen["machine"] for seen in ranks]
    for first in range(0, len(ranks), layout.tp):
        if len(set(machines[first : first + layout.tp])) > 1 and not config.parallel.tp_across_nodes:
            problems.append(
                f"parallel.tp = {layout.tp}, but ranks {first} to {first + layout.tp - 1} are on several machines, of "
                f"{machines.count(machines[first])} processes: choose a divisor of that, or set parallel.tp_across_nodes = true"
            )
            break
    if problems:
        raise UserError(*problems)
    apart_s = max(seen["clock"] for seen in ranks) - min(seen["clock"] for seen in ranks)
    if apart_s > _CLOCKS_APART_S and dist.get_rank() == 0:
        print(f"warning: the machines' clocks are {apart_s:.0f} s apart: logs will not line up", file=sys.stderr)


def _first_other(ranks: list[dict], what: str) -> list[tuple[int, dict]]:
    return [(rank, seen) for rank, seen in enumerate(ranks) if seen[what] != ranks[0][what]][:1]


def _code_digest() -> str:
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parents[1]
    for path in sorted(path for package in _PACKAGES for path in (root / package).rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def measure_links(mesh: Mesh, device: torch.device) -> str:
    """One all-reduce over each axis of the mesh, as "tp 2: 1.3 GB/s, dp_shard 4: ...", of the slowest group.

    Bus bandwidth as in nccl-tests: 2 (n - 1) / n times the bytes, by the time. Called by all ranks together.
    """
    buffer = torch.ones(_BYTES[device.type] // 4, device=device)
    shown = []
    for axis in AXES:
        n, axis_mesh = getattr(mesh.layout, axis), mesh.axis(axis)
        if n == 1 or axis_mesh is None:
            continue
        seconds = torch.tensor(min(all_reduce_s(buffer, axis_mesh.get_group()) for _ in range(3)), device=device)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        shown.append(f"{axis} {n}: {2 * (n - 1) / n * buffer.nbytes / seconds.item() / 1e9:.2g} GB/s")
    return ", ".join(shown)


def all_reduce_s(buffer: torch.Tensor, group: dist.ProcessGroup) -> float:
    """Seconds of one all-reduce of ones, fp32, whose sum is checked. Called by all ranks of the group together."""
    buffer.fill_(1)
    dist.barrier(group)
    start = time.perf_counter()
    dist.all_reduce(buffer, group=group)
    total = buffer[-1].item()  # waits for the device
    seconds = time.perf_counter() - start
    assert total == group.size(), f"an all-reduce of ones over {group.size()} ranks gave {total}"
    return seconds
