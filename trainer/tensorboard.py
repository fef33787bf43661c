"""The TensorBoard side of a run: curves, charts that group them, the config, and a row in the table of runs."""

import math
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from trainer.metrics import curves_of

# Custom scalars: group -> chart -> regular expressions of tags.
CHARTS = {
    "training": {
        "loss": ["training/loss$", "validation/loss$"],
        "gradient norm": ["training/grad_norm$"],
        "learning rate": ["training/lr$"],
        "validation loss by set": ["validation/loss_by_set/.*"],
    },
    "throughput": {
        "tokens per second": ["throughput/tokens_per_s$"],
        "per device: TFLOP/s": ["throughput/tflops_per_device$"],
        "MFU": ["throughput/mfu$"],
        "where the time goes, seconds": ["time/.*"],
    },
    "memory": {
        "bytes, the fullest rank": ["memory/(peak|allocated|reserved)_bytes$"],
        "peak bytes by pipeline rank": ["memory/peak_bytes_by_stage/.*"],
    },
    "pipeline": {
        "bubble, share of the step": ["pipeline/bubble_fraction$"],
        "gradient norm by pipeline rank": ["training/grad_norm_by_stage/.*"],
    },
}
_FINAL = ("training/loss", "validation/loss", "throughput/tokens_per_s")  # the columns of the table of runs


def charts_without(absent: tuple[str, ...]) -> dict[str, dict[str, list]]:
    """``CHARTS`` as TensorBoard's layout, but for charts all of whose tags begin with one of ``absent``."""
    layout = {
        group: {
            chart: ["Multiline", tags]
            for chart, tags in charts.items()
            if not all(tag.startswith(absent) for tag in tags)
        }
        for group, charts in CHARTS.items()
    }
    return {group: charts for group, charts in layout.items() if charts}


def _leave_to_the_next_write(failed: threading.ExceptHookArgs) -> None:
    """An event file that cannot be written fails in a thread of its own; the next write says so, without a traceback."""
    if not (isinstance(failed.exc_value, OSError) and type(failed.thread).__module__.startswith("tensorboard.")):
        threading.__excepthook__(failed)


def write_row(folder: Path, hyperparameters: Mapping[str, float | bool | str], metrics: Mapping[str, float]) -> None:
    """One finished row of the table of runs, in a folder of its own."""
    writer = SummaryWriter(str(folder))
    for summary in hparams(dict(hyperparameters), dict(metrics)):
        writer.file_writer.add_summary(summary)
    for tag, value in metrics.items():
        writer.add_scalar(tag, value)
    writer.close()


class TensorBoard:
    """Writes to ``folder``/tensorboard, and the run's row in the table of runs to ``folder``/hparams. What a killed run
    left of steps after ``resume_step`` is hidden.

    hyperparameters: what runs are compared by, key -> number, bool or text. config_text: TOML, shown as it is.
    absent: beginnings of the tags that this run will never have.
    """

    def __init__(
        self,
        folder: Path,
        resume_step: int,
        hyperparameters: Mapping[str, float | bool | str],
        config_text: str,
        absent: tuple[str, ...],
    ):
        threading.excepthook = _leave_to_the_next_write
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step + 1)
        self._writer.add_custom_scalars(charts_without(absent))
        indented = "\n".join("    " + line for line in config_text.splitlines())  # Markdown for: leave it alone
        self._writer.add_text("config", indented, resume_step)
        self._writer.flush()
        # TensorBoard keeps the first of a folder: in one of its own, made anew, a resume shows its own keys.
        row = folder / "hparams"
        shutil.rmtree(row, ignore_errors=True)
        self._row = SummaryWriter(str(row))
        experiment, start, self._end = hparams(dict(hyperparameters), dict.fromkeys(_FINAL, math.nan))
        for summary in (experiment, start):
            self._row.file_writer.add_summary(summary)
        self._row.flush()
        self._last: dict[str, tuple[float, int]] = {}  # of the final metrics: value, step

    def write(self, record: dict) -> None:
        curves = curves_of(record)
        for tag, value in curves.items():
            self._writer.add_scalar(tag, value, record["step"])
        self._last |= {tag: (curves[tag], record["step"]) for tag in _FINAL if tag in curves}
        self._writer.flush()

    def close(self, finished: bool) -> None:
        for tag, (value, step) in self._last.items():
            self._row.add_scalar(tag, value, step)
        if finished:
            self._row.file_writer.add_summary(self._end)
        self._row.close()
        self._writer.close()
