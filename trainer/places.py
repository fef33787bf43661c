"""Where rank 0 reports, by the ``[metrics]`` section."""

import contextlib
import json
from pathlib import Path

from trainer.config import Config
from trainer.config_load import compared_keys, dump_config
from trainer.console import Console
from trainer.errors import UserError
from trainer.metrics import JsonLines, Place


def places_of(config: Config, knows_mfu: bool, done_steps: int) -> list[Place]:
    """metrics.jsonl first. ``done_steps``: what later steps a killed run has left is dropped. Raises ``UserError``."""
    folder = Path(config.job.output_dir)
    places: list[Place] = [JsonLines(folder / "metrics.jsonl", done_steps)]
    if config.metrics.tensorboard:
        places.append(_tensorboard(config, knows_mfu, folder, done_steps))
    if config.metrics.wandb_project is not None:
        from trainer.wandb_report import WeightsAndBiases

        tables = json.loads(config.model_dump_json(exclude_none=True))
        with contextlib.suppress(ConnectionError):  # which it has said
            places.append(WeightsAndBiases(config.metrics.wandb_project, folder, tables))
    return [*places, Console(done_steps, config.training.steps)]


def _tensorboard(config: Config, knows_mfu: bool, folder: Path, done_steps: int) -> Place:
    from trainer.tensorboard import TensorBoard

    of_stages = ("pipeline/", "training/grad_norm_by_stage", "memory/peak_bytes_by_stage")
    absent = {
        "throughput/mfu": not knows_mfu,
        "validation/loss": not config.validation.interval,
        "validation/loss_by_set": not config.validation.sets,
        **dict.fromkeys(of_stages, config.parallel.pp == 1),
    }
    never = tuple(tag for tag, is_absent in absent.items() if is_absent)
    try:
        return TensorBoard(folder, done_steps, compared_keys(config), dump_config(config), never)
    except OSError as error:
        raise UserError(f"{folder / 'tensorboard'} cannot be written: {error}") from None
