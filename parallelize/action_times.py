"""When the actions of this rank's pipeline stages begin and end."""

import contextlib
import time
from collections.abc import Iterator

import torch


class ActionTimes:
    """Times actions on the device's own clock, without waiting for it until they are read."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            torch.cuda.synchronize(device)
        self.started_at = time.time()  # seconds since 1970
        self._start = self._mark()
        self._marks: list[tuple] = []

    @contextlib.contextmanager
    def of(self, stage: int, kind: str, micro_batch: int) -> Iterator[None]:
        """Time what runs inside. kind: F forward, B whole backward, I and W its halves for inputs and for weights."""
        start = self._mark()
        yield
        self._marks.append((stage, kind, micro_batch, start, self._mark()))

    def read(self) -> list[tuple[int, str, int, float, float]]:
        """(stage, kind, micro-batch, start, end) in the order they ran; start and end in seconds since 1970."""
        if self._on_gpu:
            torch.cuda.synchronize()
        return [(*action, self._seconds(start), self._seconds(end)) for *action, start, end in self._marks]

    def _mark(self):
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, mark) -> float:
        return self.started_at + (self._start.elapsed_time(mark) / 1e3 if self._on_gpu else mark - self._start)
