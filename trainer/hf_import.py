"""``import-hf``: a Hugging Face directory to a checkpoint of weights alone, which ``checkpoint.init_from`` reads."""

import json
from pathlib import Path

from trainer.build import parameter_shapes
from trainer.checkpoint import write_state, write_tensors
from trainer.config_load import Override, load_config
from trainer.config_rules import resolve_config
from trainer.hf_directory import HfWeights, read_architecture
from trainer.manifest import data_files, manifest_of
from trainer.output_folder import new_folder


def import_directory(hf: str, out: Path) -> int:
    """Write the weights of a directory as a checkpoint of step 0, in their stored dtype. Returns their number.

    Tensors are mapped from the files, one at a time in memory of our own. Raises ``UserError``.
    """
    architecture = read_architecture(hf)
    weights, shapes = HfWeights(hf), parameter_shapes(architecture)
    weights.check(shapes, architecture.tie_embeddings)
    config = resolve_config(load_config(None, [Override("model.hf_path", json.dumps(hf))]), 1).full_config("float32")
    tensors = {f"model.{name}": weights.read(name, shape, (0,) * len(shape), shape) for name, shape in shapes.items()}
    with new_folder(out) as partial:
        write_tensors(partial, tensors)
        files = manifest_of(partial, data_files(partial))
        write_state(partial, step=0, skipped_steps=0, config=json.loads(config.model_dump_json()), files=files)
    return architecture.n_params


def import_command(options) -> int:
    n_params = import_directory(options.hf, Path(options.out))
    print(f"wrote {options.out}: {n_params:,} parameters; start from it with --checkpoint.init_from={options.out}")
    return 0
