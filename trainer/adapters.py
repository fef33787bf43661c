"""Checkpoints of adapters alone: what they stand beside, and a config that puts both together again. Loads no torch."""

import json
from pathlib import Path

from trainer.checkpoint_folder import holds_adapters, read_state
from trainer.config import Config, Model
from trainer.config_training import Lora
from trainer.errors import UserError
from trainer.hf_directory import HfWeights
from trainer.tuning import is_lora


def base_of(config: Config, manifest_of) -> dict:
    """Where the frozen weights come from: path, and sizes and checksums of its files; of drawn ones, the seed.

    ``manifest_of``: (folder, files) -> ``Manifest``. Raises ``UserError``.
    """
    if config.model.hf_path is not None:
        folder = Path(config.model.hf_path)
        try:
            files = sorted(set(HfWeights(str(folder)).file_of.values()))
            return {"path": str(folder), "files": manifest_of(folder, files)}
        except OSError as error:
            raise UserError(f'model.hf_path = "{folder}" cannot be read: {error}') from None
    if config.checkpoint.init_from is not None:
        return {"path": config.checkpoint.init_from, "files": read_state(Path(config.checkpoint.init_from))["files"]}
    return {"path": None, "files": {}, "seed": config.job.seed}


def check_base(checkpoint: Path, state: dict, base: dict) -> None:
    """Raise ``UserError`` unless ``base`` is what the adapters in ``checkpoint`` were trained beside; it may have moved."""
    then = state["base"]
    differing = sorted(
        name for name in then["files"].keys() | base["files"] if then["files"].get(name) != base["files"].get(name)
    )
    if differing or then.get("seed") != base.get("seed"):
        where, what = base["path"] or "weights drawn from job.seed", f", file {differing[0]}" if differing else ""
        raise UserError(
            f"{checkpoint} holds adapters beside {then['path'] or 'weights drawn from job.seed'}, and {where} is not the same{what}: "
            "name that base (model.hf_path or checkpoint.init_from), unchanged"
        )


def with_weights_of(config: Config, checkpoint: str) -> Config:
    """The config with the weights of a checkpoint for its initial ones; with adapters, beside what they were trained beside."""
    state = read_state(Path(checkpoint))
    if not holds_adapters(state):
        section = config.checkpoint.model_copy(update={"init_from": checkpoint})
        return config.model_copy(
            update={"checkpoint": section, "model": config.model.model_copy(update={"hf_path": None})}
        )
    saved = state["config"]
    base = {"hf_path": config.model.hf_path or saved["model"]["hf_path"]}
    model = Model.model_validate_json(json.dumps(saved["model"])).model_copy(update=base)
    init_from = None if base["hf_path"] else config.checkpoint.init_from or saved["checkpoint"]["init_from"]
    return config.model_copy(
        update={
            "job": config.job.model_copy(update={"seed": saved["job"]["seed"]}),
            "model": model,
            # What was frozen of the adapters is in no checkpoint.
            "training": config.training.model_copy(
                update={"method": "lora", "freeze": tuple(saved["training"]["freeze"])}
            ),
            "lora": Lora.model_validate_json(json.dumps(saved["lora"])),
            "checkpoint": config.checkpoint.model_copy(update={"init_from": init_from, "resume": checkpoint}),
        }
    )


def weights_of(config: Config) -> list[Path]:
    """The checkpoints whose weights the config starts from, the base before the adapters."""
    found = [config.checkpoint.init_from] if config.checkpoint.init_from else []
    if is_lora(config) and config.checkpoint.resume not in ("auto", "never"):
        found.append(config.checkpoint.resume)
    return [Path(folder) for folder in found]
