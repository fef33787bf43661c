"""The TensorBoard side of a run: curves, charts that group them, the config, and a row in the table of runs."""

import math
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


class TensorBoard:
    """Writes below ``folder``. What a killed run left of steps after ``resume_step`` is hidden.

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
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)
        self._writer.add_custom_scalars(charts_without(absent))
        indented = "\n".join("    " + line for line in config_text.splitlines())  # Markdown for: leave it alone
        self._writer.add_text("config", indented, resume_step)
        experiment, start, self._end = hparams(dict(hyperparameters), dict.fromkeys(_FINAL, math.nan))
        for summary in (experiment, start):
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def write(self, record: dict) -> None:
        for tag, value in curves_of(record).items():
            self._writer.add_scalar(tag, value, record["step"])
        self._writer.flush()

    def close(self, finished: bool) -> None:
        if finished:
            self._writer.file_writer.add_summary(self._end)
        self._writer.close()
