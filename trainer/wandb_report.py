"""Weights & Biases as one more place for records; the extra ``wandb``."""

import hashlib
from pathlib import Path

from trainer.errors import UserError
from trainer.metrics import curves_of


def check_installed() -> None:
    """Raises ``UserError`` naming the extra."""
    try:
        import wandb  # noqa: F401
    except ImportError:
        raise UserError(
            "metrics.wandb_project needs Weights & Biases: pip install 'meshloom[wandb]', or leave the key out"
        ) from None


class WeightsAndBiases:
    """One run there for one output folder, however often it is started again. ``WANDB_MODE=offline`` needs no network."""

    def __init__(self, project: str, folder: Path, config: dict):
        import wandb

        place = str(folder.resolve())
        try:
            self._run = wandb.init(
                project=project, name=folder.name, dir=str(folder), id=hashlib.sha256(place.encode()).hexdigest()[:16],
                resume="allow", config=config, settings=wandb.Settings(silent=True),
            )  # fmt: skip
        except wandb.errors.Error as error:
            raise UserError(f"metrics.wandb_project = {project!r}: {error}") from None

    def write(self, record: dict) -> None:
        self._run.log(curves_of(record), step=record["step"])

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0)
