"""``export-hf``: a checkpoint of any layout to a Hugging Face directory, on one process, one output file at a time."""

import json
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from models.decoder_config import DecoderConfig
from models.hugging_face import config_json, hugging_face_name
from trainer.build import parameter_shapes
from trainer.checkpoint import complete_checkpoints, read_state, read_tensors, stored_tensors
from trainer.config import Config
from trainer.data.tokenizer import HuggingFaceTokenizer, tokenizer_file
from trainer.errors import UserError
from trainer.hf_directory import INDEX, SINGLE, read_json
from trainer.manifest import differences
from trainer.output_folder import new_folder

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def architecture_in(checkpoint: Path) -> DecoderConfig:
    """The architecture of the model in a checkpoint."""
    model = read_state(checkpoint)["config"]["model"]
    return DecoderConfig(**{key: model[key] for key in DecoderConfig.__dataclass_fields__})


def newest_checkpoint(output_dir: str) -> Path:
    """The newest checkpoint of a run. Raises ``UserError`` if it has none."""
    found = complete_checkpoints(Path(output_dir) / "checkpoints")
    if not found:
        raise UserError(f'job.output_dir = "{output_dir}" holds no checkpoint; name one with --checkpoint')
    return found[-1]


def export(checkpoint: Path, out: Path, dtype: str | None, max_shard_bytes: int = 2_000_000_000) -> None:
    """Write ``checkpoint`` as a Hugging Face directory. ``dtype``: of the files, None for the checkpoint's own.

    Holds the tensors of one output file in memory. ``out`` appears when it is complete. Raises ``UserError``.
    """
    state, architecture = read_state(checkpoint), architecture_in(checkpoint)
    stored = {name.removeprefix("model."): tensor for name, tensor in stored_tensors(checkpoint).items()}
    shapes = parameter_shapes(architecture)
    if missing := sorted(shapes.keys() - stored.keys()):
        raise UserError(f"{checkpoint}: model.{missing[0]} is missing")
    dtypes = {name: DTYPES[dtype] if dtype else stored[name].properties.dtype for name in shapes}
    folder, token_ids = _tokenizer_of(state["config"])
    source = read_json(folder / "config.json") if folder and (folder / "config.json").is_file() else {}
    positions = source.get("max_position_embeddings", state["config"]["training"]["seq_len"])
    ids = {key: source[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in source}
    dtype_name = str(dtypes["tok_embeddings.weight"]).removeprefix("torch.")
    try:
        fields = config_json(architecture, positions, dtype_name, token_ids | ids)
    except ValueError as error:
        raise UserError(f"{checkpoint}: {error}") from None
    with new_folder(out) as partial, ThreadPoolExecutor(1) as pool:
        damage = pool.submit(differences, checkpoint, state["files"], sorted(state["files"]))  # while it is converted
        _write_weights(checkpoint, partial, shapes, dtypes, max_shard_bytes)
        for name in _TOKENIZER_FILES if folder else ():
            if (folder / name).is_file():
                shutil.copyfile(folder / name, partial / name)
        if not (partial / "generation_config.json").is_file():
            _write_json(partial / "generation_config.json", token_ids | ids)
        _write_json(partial / "config.json", fields)
        if damage.result():
            raise UserError(*damage.result())


def _write_weights(
    checkpoint: Path, out: Path, shapes: Mapping[str, tuple], dtypes: Mapping[str, torch.dtype], max_shard_bytes: int
) -> None:
    from safetensors.torch import save_file

    shards = list(_shards(shapes, dtypes, max_shard_bytes))
    file_of, total_bytes = {}, 0
    for number, names in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {f"model.{name}": torch.empty(shapes[name], dtype=dtypes[name]) for name in names}
        read_tensors(checkpoint, tensors)
        renamed = {hugging_face_name(name): tensors[f"model.{name}"] for name in names}
        save_file(renamed, out / file, metadata={"format": "pt"})
        file_of |= dict.fromkeys(renamed, file)
        total_bytes += sum(tensor.nbytes for tensor in renamed.values())
    if len(shards) > 1:
        _write_json(out / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": file_of})


def _shards(
    shapes: Mapping[str, tuple], dtypes: Mapping[str, torch.dtype], max_shard_bytes: int
) -> Iterator[list[str]]:
    """Names of the parameters of each output file, in the order of the model."""
    names, size = [], 0
    for name, shape in shapes.items():
        n_bytes = torch.Size(shape).numel() * dtypes[name].itemsize
        if names and size + n_bytes > max_shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += n_bytes
    yield names


def _tokenizer_of(config: dict) -> tuple[Path | None, dict]:
    """The folder of a run's tokenizer, if it has one and it is still there, and its end-of-text id."""
    try:
        path = tokenizer_file(config["data"]["tokenizer"])
    except UserError:
        print(f"note: the tokenizer {config['data']['tokenizer']!r} is not there any more: the export is without one")
        return None, {}
    return (None, {}) if path is None else (path.parent, {"eos_token_id": HuggingFaceTokenizer(path).eos_id})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export_command(options, config: Config | None) -> int:
    """``export-hf``: of ``--checkpoint``, else of the newest checkpoint of ``--config``."""
    if options.checkpoint is None and config is None:
        raise UserError("export-hf needs --checkpoint STEP_DIR, or --config C for the newest checkpoint of its run")
    checkpoint = Path(options.checkpoint) if options.checkpoint else newest_checkpoint(config.job.output_dir)
    if options.max_shard_gb <= 0:
        raise UserError(f"--max-shard-gb {options.max_shard_gb}: must be above 0")
    export(checkpoint, Path(options.out), options.dtype, int(options.max_shard_gb * 1e9))
    print(f"wrote {options.out} from {checkpoint}")
    return 0
