"""What a run reports: metrics.jsonl, TensorBoard, and a line on the console. Rank 0 alone writes."""

import contextlib
import json
import os
import statistics
import sys
import time
from collections import deque
from math import inf, isfinite
from pathlib import Path

from tqdm import tqdm

from trainer.errors import StoppedRun

# metrics.jsonl key -> TensorBoard tag, where the run's charts should show it.
_TAGS = {
    "loss": "training/loss",
    "validation_loss": "validation/loss",
    "validation_time_s": "time/validation_s",
    "grad_norm": "training/grad_norm",
    "lr": "training/lr",
    "tokens_seen": "training/tokens_seen",
    "tokens_per_s": "throughput/tokens_per_s",
    "tokens_per_s_per_device": "throughput/tokens_per_s_per_device",
    "tflops_per_device": "throughput/tflops_per_device",
    "mfu": "throughput/mfu",
    "step_time_s": "time/step_s",
    "data_time_s": "time/data_s",
    "checkpoint_time_s": "time/checkpoint_s",
    "memory_peak_bytes": "memory/peak_bytes",
    "skipped_steps": "training/skipped_steps",
}


class Stopwatch:
    """Time of the steps since the last report, and the part spent waiting for data, in seconds.

    ``off_the_clock`` leaves out what is not training, such as writing a checkpoint.
    """

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        self.n_steps = 0
        self.data_s = 0.0
        self.paused_s = 0.0
        self._start = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start - self.paused_s

    def time_data(self, fetch):
        """The result of ``fetch()``, its time counted as waiting for data."""
        start = time.perf_counter()
        result = fetch()
        self.data_s += time.perf_counter() - start
        return result

    def off_the_clock(self, work, *arguments) -> None:
        """Run ``work(*arguments)`` off the clock."""
        start = time.perf_counter()
        work(*arguments)
        self.paused_s += time.perf_counter() - start


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


class Reporter:
    """Writes each record to every place; does nothing on ranks other than 0.

    ``resume_step``: records of later steps, which a killed run left behind, are dropped, so that each
    step appears once.
    """

    def __init__(
        self, folder: Path, *, is_main: bool, resume_step: int, last_step: int, tensorboard: bool, loss_spike: float
    ):
        self.folder = folder
        self._spikes = LossSpikes(loss_spike)
        self._file = self._writer = self._bar = None
        if not is_main:
            return
        try:
            self._file = _reopen_jsonl(folder / "metrics.jsonl", resume_step)
        except OSError as error:
            raise StoppedRun(f"{folder / 'metrics.jsonl'} cannot be written: {error}") from None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)
        self._first_step, self._last_step, self._start = resume_step + 1, last_step, time.perf_counter()
        if sys.stdout.isatty():
            self._bar = tqdm(total=last_step, initial=resume_step, unit="step", file=sys.stdout, dynamic_ncols=True)

    def write(self, record: dict) -> None:
        """Report one logged step: a dict with the keys of ``_TAGS`` and ``step``."""
        if self._file is None:
            return
        try:
            self._write(record)
        except OSError as error:
            raise StoppedRun(
                f"the metrics of step {record['step']} cannot be written to {self.folder}: {error}"
            ) from None
        self._print(record)
        if warning := self._spikes.judge(record["loss"]):
            print(f"warning: step {record['step']}: {warning}", file=sys.stderr, flush=True)

    def _write(self, record: dict) -> None:
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError("metrics.jsonl has been deleted while the run was writing it")
        finite = {key: None if value != value or value in (inf, -inf) else value for key, value in record.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")  # JSON has no nan
        self._file.flush()
        if self._writer is not None:
            for key, tag in _TAGS.items():
                if record.get(key) is not None:
                    self._writer.add_scalar(tag, record[key], record["step"])
            self._writer.flush()

    def _print(self, record: dict) -> None:
        mean_s = (time.perf_counter() - self._start) / (record["step"] - self._first_step + 1)
        left_s = (self._last_step - record["step"]) * mean_s  # checkpoints included, unlike step_time_s
        mfu = "" if record["mfu"] is None else f"  mfu {record['mfu']:.1%}"
        validated = "" if "validation_loss" not in record else f"  validation loss {record['validation_loss']:.6f}"
        line = (
            f"step {record['step']:>{len(str(self._last_step))}}/{self._last_step}  loss {record['loss']:.6f}"
            f"  lr {record['lr']:.3e}  grad norm {record['grad_norm']:.4f}"
            f"  {record['tokens_per_s']:,.0f} tokens/s{mfu}{validated}  left {_clock(left_s)}"
        )
        if self._bar is None:
            print(line, flush=True)
        else:
            self._bar.write(line, file=sys.stdout)
            self._bar.update(record["step"] - self._bar.n)

    def close(self) -> None:
        for place in (self._bar, self._writer, self._file):
            if place is not None:
                with contextlib.suppress(OSError):  # all is flushed; a full disk was said before
                    place.close()


def _reopen_jsonl(path: Path, resume_step: int):
    """Keep the complete records up to ``resume_step`` and open the file to append."""
    kept = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # torn by a kill in the middle of a write
                continue
            if record["step"] <= resume_step:
                kept.append(line + "\n")
        partial = path.with_suffix(".jsonl.tmp")
        partial.write_text("".join(kept), encoding="utf-8")
        os.replace(partial, path)
    return path.open("a", encoding="utf-8")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
