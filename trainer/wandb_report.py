"""Weights & Biases as one more place for records; the extra ``wandb``."""

import hashlib
import sys
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
    """One run there for one output folder, however often it is started again. ``WANDB_MODE=offline`` needs no network.

    Raises ``UserError`` for what the user can mend, and ``ConnectionError``, after a warning, where nobody answers.
    """

    def __init__(self, project: str, folder: Path, config: dict):
        import wandb

        place = str(folder.resolve())
        try:
            self._run = wandb.init(
                project=project, name=folder.name, dir=str(folder), id=hashlib.sha256(place.encode()).hexdigest()[:16],
                resume="allow", config=config, settings=wandb.Settings(silent=True, init_timeout=30),
            )  # fmt: skip
        except (wandb.errors.AuthenticationError, wandb.errors.UsageError, ValueError) as error:
            raise UserError(f"metrics.wandb_project = {project!r}: {' '.join(str(error).split())}") from None
        except wandb.errors.Error as error:  # an outage there must not keep a run from starting again
            said = str(error).strip().splitlines()[0]
            print(f"warning: no report to Weights & Biases, which does not answer: {said}", file=sys.stderr, flush=True)
            raise ConnectionError(said) from None

    def write(self, record: dict) -> None:
        self._run.log(curves_of(record), step=record["step"])

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0)
