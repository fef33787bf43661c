"""Adapters out of a checkpoint: in PEFT's format, or added to the weights that they stand beside."""

import re
from collections.abc import Callable
from pathlib import Path

import torch

from models.decoder_config import DecoderConfig
from models.hugging_face import hugging_face_name
from trainer.adapters import base_of, check_base, with_weights_of
from trainer.build import initial_values
from trainer.checkpoint_files import read_tensors, stored_tensors
from trainer.config import Config
from trainer.config_load import load_config
from trainer.manifest import manifest_of
from trainer.tuning import lora_scale

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


def adapters_in(checkpoint: Path) -> dict[str, torch.Size]:
    """Name -> shape of each A and B."""
    stored = {name: tensor.size for name, tensor in stored_tensors(checkpoint).items()}
    return {name.removeprefix("model."): size for name, size in stored.items() if name.startswith("model.")}


def merged_reader(checkpoint: Path, state: dict, architecture: DecoderConfig) -> Callable:
    """(names, shapes) -> the tensors of the whole model, adapters added, by name; fp32. Raises ``UserError``."""
    config = config_of_adapters(checkpoint)
    check_base(checkpoint, state, base_of(config, manifest_of))
    adapters, scale = adapters_in(checkpoint), lora_scale(config.lora)
    base = None if config.checkpoint.init_from else initial_values(config, architecture)
    precision = state["config"]["precision"]
    kept = getattr(torch, precision["frozen"] or precision["param"])  # the adapters learnt beside values so rounded

    def read(names: list[str], shapes: dict) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(shapes[name]) for name in names}
        if base is None:
            by_name = {f"model.{name}": tensor for name, tensor in tensors.items()}
            read_tensors(Path(config.checkpoint.init_from), by_name)
        modules = [name.rpartition(".")[0] for name in names]
        wanted = [f"{module}.{kind}" for module in modules for kind in ("lora_a", "lora_b")]
        parts = {f"model.{name}": torch.empty(adapters[name]) for name in wanted if name in adapters}
        read_tensors(checkpoint, parts)
        for name, module in zip(names, modules):
            shape = tuple(shapes[name])
            if base is not None:
                tensors[name].copy_(base(name, shape, (0,) * len(shape), shape))
            tensors[name] = tensors[name].to(kept).float()
            if name.endswith(".weight") and f"model.{module}.lora_a" in parts:
                tensors[name] += scale * (parts[f"model.{module}.lora_b"] @ parts[f"model.{module}.lora_a"])
        return tensors

    return read


def config_of_adapters(checkpoint: Path) -> Config:
    """A config with the model, the base and the adapters of a checkpoint."""
    return with_weights_of(load_config(None), str(checkpoint))


def write_adapters(checkpoint: Path, out: Path, dtype: torch.dtype | None) -> dict:
    """Write ``ADAPTER_WEIGHTS`` into ``out``. Returns the content of ``ADAPTER_CONFIG``."""
    from safetensors.torch import save_file

    config, adapters = config_of_adapters(checkpoint), adapters_in(checkpoint)
    stored = stored_tensors(checkpoint)
    tensors = {
        f"model.{name}": torch.empty(size, dtype=dtype or stored[f"model.{name}"].properties.dtype)
        for name, size in adapters.items()
    }
    read_tensors(checkpoint, tensors)
    renamed = {_peft_name(name): tensors[f"model.{name}"] for name in adapters}
    save_file(renamed, out / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    modules = sorted({name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in renamed})
    lora = config.lora
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.model.hf_path or config.checkpoint.init_from,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.rslora,
        "lora_dropout": 0.0,
        "target_modules": _targets(modules, config.model.n_layers),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def _peft_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    theirs = hugging_face_name(f"{module}.weight").removesuffix(".weight")
    return f"base_model.model.{theirs}.{'lora_A' if kind == 'lora_a' else 'lora_B'}.weight"


def _targets(modules: list[str], n_layers: int) -> list[str]:
    """Short names where all layers have them ("q_proj"), else every module by its own."""
    kinds = {re.sub(r"\.\d+\.", ".*.", name) for name in modules}
    if len(kinds) * n_layers == len(modules):
        return sorted(kind.rpartition(".")[2] for kind in kinds)
    return modules
