"""``import-hf``: a Hugging Face directory to a checkpoint of weights alone, which ``checkpoint.init_from`` reads."""

import json
from pathlib import Path

import torch

from trainer.build import parameter_shapes
from trainer.checkpoint_files import write_tensors
from trainer.checkpoint_folder import write_state
from trainer.config import Config
from trainer.config_load import load_config
from trainer.config_rules import resolve_config
from trainer.data.tokenizer import digest_of
from trainer.hf_directory import HfWeights, read_architecture, read_origin
from trainer.manifest import data_files, manifest_of
from trainer.output_folder import new_folder


def config_of_directory(hf: str, tokenizer: str | None = None) -> Config:
    """The default config with the model of a directory, and its tokenizer if it has one, else "bytes"."""
    config = load_config(None)
    has_tokenizer = (Path(hf) / "tokenizer.json").is_file()
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"hf_path": hf}),
            "data": config.data.model_copy(update={"tokenizer": tokenizer or (hf if has_tokenizer else "bytes")}),
        }
    )


def import_directory(hf: str, out: Path) -> int:
    """Write the weights of a directory as a checkpoint of step 0, in their stored dtype. Returns their number.

    Tensors are mapped from the files, one at a time in memory of our own. Raises ``UserError``.
    """
    architecture = read_architecture(hf)
    weights, shapes = HfWeights(hf), parameter_shapes(architecture)
    weights.check(shapes, architecture.tie_embeddings)
    config = resolve_config(config_of_directory(hf), 1).full_config("float32")
    tensors = {f"model.{name}": weights.read(name, shape, (0,) * len(shape), shape) for name, shape in shapes.items()}
    with new_folder(out) as partial:
        write_tensors(partial, tensors)
        files = manifest_of(partial, data_files(partial))
        write_state(
            partial, step=0, skipped_steps=0, config=json.loads(config.model_dump_json()), files=files,
            tokenizer=digest_of(config.data.tokenizer), origin=read_origin(hf), torch=torch.__version__,
        )  # fmt: skip
    return architecture.n_params


def import_command(options) -> int:
    n_params = import_directory(options.hf, Path(options.out))
    print(f"wrote {options.out}: {n_params:,} parameters; start from it with --checkpoint.init_from={options.out}")
    return 0
