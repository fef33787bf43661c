"""What looks on while a step runs, without changing it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.pipeline_record import PipelineRecord
from trainer.profiler import Profiler


@dataclass
class Instruments:
    pipeline: PipelineRecord
    profiler: Profiler
    stragglers: dict | None = None  # of the last step, if they were looked for

    @contextlib.contextmanager
    def watching(self, step: int, reported: bool) -> Iterator[None]:
        self.profiler.begin(step)
        self.pipeline.begin(step, reported)
        yield
        self.pipeline.end(step)
        self.stragglers = self.profiler.end(step)
