"""Kineto traces of chosen steps; and from a trace, how long a rank was not communicating."""

import contextlib
import socket
import statistics
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile


class Profiler:
    """Traces ``steps`` into ``folder`` on ``ranks``. And every ``straggler_interval`` steps looks, on every rank, for the
    one that the others wait for.
    """

    def __init__(
        self,
        steps: Collection[int],
        ranks: Collection[int],
        straggler_interval: int,
        folder: Path,
        place: str,
        device: torch.device,
    ):
        self._steps = frozenset(steps)
        self._traces = dist.get_rank() in ranks
        self._straggler_interval = straggler_interval if dist.get_world_size() > 1 else 0
        self._folder, self._place, self._device = folder, place, device
        self._profile: profile | None = None
        self._began = self._step_s = 0.0

    def looks_for_stragglers(self, step: int) -> bool:
        return self._straggler_interval > 0 and step % self._straggler_interval == 0

    def begin(self, step: int) -> None:
        traces = self._traces and step in self._steps
        if traces or self.looks_for_stragglers(step):
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self._device.type == "cuda")
            self._profile = profile(activities=activities, record_shapes=traces)
            self._profile.start()
            self._began = time.perf_counter()

    def wait(self) -> None:
        """Until the device is done with a step that is profiled."""
        if self._profile is not None:
            if self._device.type == "cuda":
                torch.cuda.synchronize()
            self._step_s = time.perf_counter() - self._began

    def end(self, step: int) -> dict | None:
        """Write the step's trace; what its profile says of stragglers, if they were looked for.

        Called by all ranks together, which leave it together: nobody's next step waits for another's trace.
        """
        found, done, self._profile = None, self._profile, None
        if done is not None:
            done.stop()
        if self.looks_for_stragglers(step):
            found = stragglers(self._place, self._step_s, self._step_s - communication_s(done))
        if step in self._steps:
            if self._traces:
                self._write(done, step)
            dist.barrier()
        return found

    def _write(self, done: profile, step: int) -> None:
        """Where a trace cannot be written, the run goes on."""
        path = self._folder / f"step-{step:08d}-rank-{dist.get_rank()}.pt.trace.json.gz"
        try:
            self._folder.mkdir(exist_ok=True)
            done.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            print(f"warning: the trace of step {step} is lost: {error}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                path.unlink()


def communication_s(done: profile) -> float:
    """How long a collective or a message was under way on this rank, in seconds: for a rank that is quick, mostly waiting."""
    spans = []
    for event in done.profiler.kineto_results.events():
        name = event.name()
        if name.startswith("gloo:") or (
            name.startswith("nccl") and event.device_type() == torch.autograd.DeviceType.CUDA
        ):
            spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
    return length_of_union(spans) / 1e9


def length_of_union(spans: Iterable[tuple[int, int]]) -> int:
    total, reached = 0, None
    for start, end in sorted(spans):
        start = start if reached is None else max(start, reached)
        total += max(0, end - start)
        reached = end if reached is None else max(reached, end)
    return total


def stragglers(place: str, step_s: float, alone_s: float) -> dict:
    """Who makes the others wait. ``alone_s``: how long this rank was not communicating, of the ``step_s`` of its step.

    Called by all ranks together; the same on every rank.
    """
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (alone_s, step_s, place, socket.gethostname()))
    ordered = sorted(everyone)
    slowest, median_s = ordered[-1], statistics.median(alone for alone, *_ in ordered)
    return {
        "slowest": slowest[2],
        "host": slowest[3],
        "compute_s": [ordered[0][0], median_s, slowest[0]],  # least, median, most
        "communication_s": [step - alone for alone, step, *_ in everyone],  # by rank
    }
