"""What a run reports, and where to: rank 0 writes each record to metrics.jsonl and the other places."""

import contextlib
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Protocol

from trainer.errors import StoppedRun

# metrics.jsonl key -> tag; a list by pipeline rank or a table by name gets a curve each below the tag.
_TAGS = {
    "loss": "training/loss",
    "grad_norm": "training/grad_norm",
    "grad_norm_by_stage": "training/grad_norm_by_stage",
    "lr": "training/lr",
    "tokens_seen": "training/tokens_seen",
    "tokens_by_source": "training/tokens_by_source",
    "skipped_steps": "training/skipped_steps",
    "validation_loss": "validation/loss",
    "validation_perplexity": "validation/perplexity",
    "validation_loss_by_set": "validation/loss_by_set",
    "tokens_per_s": "throughput/tokens_per_s",
    "tokens_per_s_per_device": "throughput/tokens_per_s_per_device",
    "tflops_per_device": "throughput/tflops_per_device",
    "mfu": "throughput/mfu",
    "step_time_s": "time/step_s",
    "data_time_s": "time/data_s",
    "checkpoint_time_s": "time/checkpoint_s",
    "validation_time_s": "time/validation_s",
    "first_step_time_s": "time/first_step_s",
    "memory_peak_bytes": "memory/peak_bytes",
    "memory_allocated_bytes": "memory/allocated_bytes",
    "memory_reserved_bytes": "memory/reserved_bytes",
    "memory_peak_bytes_by_stage": "memory/peak_bytes_by_stage",
    "memory_allocated_bytes_by_stage": "memory/allocated_bytes_by_stage",
    "memory_reserved_bytes_by_stage": "memory/reserved_bytes_by_stage",
    "bubble_fraction": "pipeline/bubble_fraction",
    "compiled_graphs": "compile/graphs",
    "compile_time_s": "compile/time_s",
}
# Of the first step alone they would only stretch the axis: it compiles, allocates, meets the others.
_RATES = ("throughput/", "time/step_s", "pipeline/")


def curves_of(record: dict) -> dict[str, float]:
    """A record as points of curves: tag -> value."""
    curves: dict[str, float] = {}
    for key, tag in _TAGS.items():
        value = record.get(key)
        if isinstance(value, list):
            value = {f"stage_{index}": entry for index, entry in enumerate(value)}
        curves |= {f"{tag}/{name}": entry for name, entry in value.items()} if isinstance(value, dict) else {tag: value}
    of_first_step = record.get("first_step_time_s") == record["step_time_s"]
    return {
        tag: value
        for tag, value in curves.items()
        if value is not None and not (of_first_step and tag.startswith(_RATES))
    }


class Stopwatch:
    """Time of the steps since the last report, and the part spent waiting for data, in seconds.

    What is not training, such as writing a checkpoint, is off the clock. The first step of a start compiles,
    allocates and meets the others: it counts in no rate but its own.
    """

    def __init__(self):
        self._first_step_s: float | None = None  # until it is reported
        self.restart()

    def restart(self) -> None:
        self.n_steps = 0
        self.data_s = 0.0
        self.off_s = 0.0
        self.checkpoint_s = 0.0
        self._start = time.perf_counter()

    def end_first_step(self, reported: bool) -> None:
        """``reported``: now, by itself."""
        self._first_step_s, self._alone = self.elapsed_s, reported
        if not reported:
            self.restart()

    def times(self) -> dict[str, float]:
        """Of the steps since the last report, as a part of its record."""
        first_step_s, self._first_step_s = self._first_step_s, None
        times = {"step_time_s": self.elapsed_s / self.n_steps, "checkpoint_time_s": self.checkpoint_s}
        if first_step_s is None:
            return times
        return times | {"first_step_time_s": first_step_s} | ({"step_time_s": first_step_s} if self._alone else {})

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start - self.off_s - self.checkpoint_s

    def time_data(self, fetch):
        """The result of ``fetch()``, its time counted as waiting for data."""
        start = time.perf_counter()
        result = fetch()
        self.data_s += time.perf_counter() - start
        return result

    def time_checkpoint(self, save, *arguments) -> None:
        """Run ``save(*arguments)`` off the clock."""
        start = time.perf_counter()
        save(*arguments)
        self.checkpoint_s += time.perf_counter() - start

    def off_the_clock(self, work, *arguments) -> None:
        start = time.perf_counter()
        work(*arguments)
        self.off_s += time.perf_counter() - start


class LossSpikes:
    """Tells a loss that stands out from those of the last logged steps, by more than ``sigmas`` of their spread."""

    def __init__(self, sigmas: float):
        self._sigmas = sigmas
        self._last: deque[float] = deque(maxlen=100)

    def judge(self, loss: float) -> str | None:
        """What to say about it, if anything. A single loss is never typical: 20 are needed."""
        warning = None
        if self._sigmas and isfinite(loss):
            if len(self._last) >= 20:
                mean, spread = statistics.fmean(self._last), statistics.stdev(self._last)
                if loss > mean + self._sigmas * max(spread, 1e-3 * abs(mean)):
                    warning = (
                        f"loss {loss:.4f} stands out from the {len(self._last)} before ({mean:.4f} +- {spread:.4f})"
                    )
            self._last.append(loss)
        return warning


class Place(Protocol):
    """Where records go. Records are flat but for lists by pipeline rank and tables by name; None: not known."""

    def write(self, record: dict) -> None: ...

    def close(self, finished: bool) -> None: ...


class Reporter:
    """Writes each record to every place; without places, on ranks other than 0, nothing.

    The first place is the run's memory: where it cannot be written the run ends. Another place that fails is given up.
    """

    def __init__(self, folder: Path, places: Sequence[Place], loss_spike: float):
        self.folder = folder
        self._places = list(places)
        self._spikes = LossSpikes(loss_spike)

    def write(self, record: dict) -> None:
        """Report one logged step: ``step`` and what was measured."""
        if not self._places:
            return
        record = _finite(record)
        for place in self._places[:]:
            try:
                place.write(record)
            except OSError as error:
                self._give_up(place, record["step"], error)
        if record["loss"] is not None and (warning := self._spikes.judge(record["loss"])):
            print(f"warning: step {record['step']}: {warning}", file=sys.stderr, flush=True)

    def _give_up(self, place: Place, step: int, error: OSError) -> None:
        said = f"the metrics of step {step} cannot be written to {self.folder}: {error}"
        if place is self._places[0]:
            raise StoppedRun(said) from None
        self._places.remove(place)
        print(f"warning: {said}. The run goes on without {type(place).__name__}", file=sys.stderr, flush=True)

    def close(self, finished: bool) -> None:
        for place in reversed(self._places):
            with contextlib.suppress(OSError):  # all is flushed; a full disk was said before
                place.close(finished)


class JsonLines:
    """``metrics.jsonl``: records of steps after ``resume_step``, which a killed run left behind, are dropped, so that each
    step appears once."""

    def __init__(self, path: Path, resume_step: int):
        try:
            self._file = _reopen_jsonl(path, resume_step)
        except OSError as error:
            raise StoppedRun(f"{path} cannot be written: {error}") from None

    def write(self, record: dict) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError("metrics.jsonl has been deleted while the run was writing it")
        self._file.write(json.dumps(record, allow_nan=False) + "\n")  # JSON has no nan
        self._file.flush()

    def close(self, finished: bool) -> None:
        self._file.close()


def _finite(value):
    """JSON has no nan and no inf: None, wherever they are."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def _reopen_jsonl(path: Path, resume_step: int):
    """Keep the complete records up to ``resume_step`` and open the file to append."""
    kept = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # torn by a kill in the middle of a write
                continue
            if isinstance(record, dict) and isinstance(record.get("step"), int) and record["step"] <= resume_step:
                kept.append(line + "\n")
        partial = path.with_suffix(".jsonl.tmp")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, path)
    return path.open("a", encoding="utf-8")
