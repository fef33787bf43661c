"""What looks on while a step runs, without changing it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.metrics import Stopwatch
from trainer.pipeline_record import PipelineRecord
from trainer.profiler import Profiler


@dataclass
class Instruments:
    pipeline: PipelineRecord
    profiler: Profiler
    stragglers: dict | None = None  # of the last step, if they were looked for

    @contextlib.contextmanager
    def watching(self, step: int, reported: bool, watch: Stopwatch) -> Iterator[None]:
        """Around a step. Starting and reading a profile is off the clock of ``watch``."""
        watch.off_the_clock(self.profiler.begin, step)
        self.pipeline.begin(step, reported)
        yield
        self.pipeline.end(step)
        self.profiler.wait()
        watch.off_the_clock(self._read_profile, step)

    def _read_profile(self, step: int) -> None:
        self.stragglers = self.profiler.end(step)
