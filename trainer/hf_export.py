"""``export-hf``: a checkpoint of any layout to a Hugging Face directory, on one process, output file by output file."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from models.hugging_face import config_json, hugging_face_name
from trainer.build import parameter_shapes
from trainer.checkpoint_files import read_tensors, stored_tensors
from trainer.checkpoint_folder import EXPORT_MARKER, architecture_in, holds_adapters, newest_checkpoint, read_state
from trainer.config import Config
from trainer.data.tokenizer import HuggingFaceTokenizer, tokenizer_file
from trainer.errors import UserError
from trainer.hf_directory import INDEX, SINGLE, read_json
from trainer.lora_export import ADAPTER_CONFIG, merged_reader, write_adapters
from trainer.manifest import differences
from trainer.output_folder import new_folder
from trainer.tuning import is_lora

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def export(
    checkpoint: Path,
    out: Path,
    dtype: str | None,
    max_shard_bytes: int = 2_000_000_000,
    marker: dict | None = None,
    merge: bool = False,
) -> None:
    """Write ``checkpoint`` as a Hugging Face directory. ``dtype``: of the files, None for the checkpoint's own.
    ``marker``: what to leave in ``EXPORT_MARKER``. Adapters are written as PEFT has them, or with ``merge`` added to the
    weights that they stand beside, as a whole model.

    Holds the tensors of two output files in memory: one is read while the other is written.
    ``out`` appears when it is complete. Raises ``UserError``.
    """
    state, architecture = read_state(checkpoint), architecture_in(checkpoint)
    shapes, adapts = parameter_shapes(architecture), holds_adapters(state)
    if merge and not adapts:
        raise UserError(f"--merge: {checkpoint} holds no adapters, but the whole model: leave it out")
    if adapts and not merge:
        _export_adapters(checkpoint, state, out, dtype)
        return
    if adapts:
        precision = state["config"]["precision"]
        read_whole = merged_reader(checkpoint, state, architecture)
        dtypes = dict.fromkeys(shapes, DTYPES[dtype or precision["frozen"] or precision["param"]])
    else:
        read_whole = None
        dtypes = _stored_dtypes(checkpoint, shapes, dtype)
    folder, fields_beside, generation = _beside_the_weights(state)
    dtype_name = str(dtypes["tok_embeddings.weight"]).removeprefix("torch.")
    try:
        fields = config_json(architecture, dtype_name, fields_beside)
    except ValueError as error:
        raise UserError(f"{checkpoint}: {error}") from None
    with new_folder(out) as partial, ThreadPoolExecutor(1) as pool:
        damage = pool.submit(differences, checkpoint, state["files"], sorted(state["files"]))  # while it is converted
        _write_weights(checkpoint, partial, shapes, dtypes, max_shard_bytes, read_whole)
        _copy_tokenizer(folder, partial)
        _write_json(partial / "generation_config.json", generation)
        _write_json(partial / "config.json", fields)
        if marker is not None:
            _write_json(partial / EXPORT_MARKER, marker)
        if damage.result():
            raise UserError(*damage.result())


def _stored_dtypes(checkpoint: Path, shapes: Mapping[str, tuple], dtype: str | None) -> dict[str, torch.dtype]:
    """Of each parameter in the files: ``dtype``, else as stored. Raises ``UserError`` if one is not."""
    stored = {name.removeprefix("model."): tensor for name, tensor in stored_tensors(checkpoint).items()}
    if missing := sorted(shapes.keys() - stored.keys()):
        raise UserError(f"{checkpoint}: model.{missing[0]} is missing")
    return {name: DTYPES[dtype] if dtype else stored[name].properties.dtype for name in shapes}


def _export_adapters(checkpoint: Path, state: dict, out: Path, dtype: str | None) -> None:
    folder, _, _ = _beside_the_weights(state)
    with new_folder(out) as partial:
        if damage := differences(checkpoint, state["files"], sorted(state["files"])):
            raise UserError(*damage)
        _write_json(partial / ADAPTER_CONFIG, write_adapters(checkpoint, partial, DTYPES[dtype] if dtype else None))
        _copy_tokenizer(folder, partial)


def _copy_tokenizer(folder: Path | None, out: Path) -> None:
    for name in _TOKENIZER_FILES if folder else ():
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def _write_weights(
    checkpoint: Path,
    out: Path,
    shapes: Mapping[str, tuple],
    dtypes: Mapping[str, torch.dtype],
    max_shard_bytes: int,
    read_whole: Callable | None,
) -> None:
    """``read_whole``: (names, shapes) -> tensors by name, in place of those in the checkpoint."""
    from safetensors.torch import save_file

    shards = list(_shards(shapes, dtypes, max_shard_bytes))
    file_of, total_bytes = {}, 0

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        if read_whole is not None:
            return {hugging_face_name(name): t.to(dtypes[name]) for name, t in read_whole(names, shapes).items()}
        tensors = {f"model.{name}": torch.empty(shapes[name], dtype=dtypes[name]) for name in names}
        read_tensors(checkpoint, tensors)
        return {hugging_face_name(name): tensors[f"model.{name}"] for name in names}

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(read, shards[0])
        for number in range(1, len(shards) + 1):
            file = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = following.result()
            if number < len(shards):
                following = pool.submit(read, shards[number])  # while this one is written
            save_file(tensors, out / file, metadata={"format": "pt"})
            file_of |= dict.fromkeys(tensors, file)
            total_bytes += sum(tensor.nbytes for tensor in tensors.values())
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


def _beside_the_weights(state: dict) -> tuple[Path | None, dict, dict]:
    """The folder of the run's tokenizer if it has one, fields of config.json beside the architecture, and the content
    of generation_config.json: what the original directory said, else what the tokenizer and the run say."""
    config, origin = state["config"], state["origin"]
    folder, ids = None, {}
    try:
        path = tokenizer_file(config["data"]["tokenizer"])
        if path is not None:
            folder, ids = path.parent, {"eos_token_id": HuggingFaceTokenizer(path).eos_id}
    except UserError:
        print(f"note: the tokenizer {config['data']['tokenizer']!r} is not there: the export is without one")
    fields = {"max_position_embeddings": config["training"]["seq_len"], **ids} | origin.get("config", {})
    if origin and config["data"]["tokenizer"] not in (origin["path"], "bytes"):
        fields |= ids  # a tokenizer of the run's own choice
    generation = origin.get("generation_config") or {key: value for key, value in fields.items() if "token_id" in key}
    return folder, fields, generation


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def export_run(config: Config) -> None:
    """Export the newest checkpoint of a finished run into its ``checkpoint.export_dir``, unless it is there already."""
    out, checkpoint = Path(config.checkpoint.export_dir), newest_checkpoint(config.job.output_dir)
    source = {"output_dir": str(Path(config.job.output_dir).resolve()), "step": read_state(checkpoint)["step"]}
    source["dtype"] = config.checkpoint.export_dtype
    marker = out / EXPORT_MARKER
    if marker.is_file() and read_json(marker) == source:
        print(f"exported    {out} (before)")
        return
    if marker.is_file():  # an earlier step of the same run: the config check has seen to that
        shutil.rmtree(out)
    export(checkpoint, out, config.checkpoint.export_dtype, marker=source, merge=is_lora(config))
    print(f"exported    {out}", flush=True)


def export_command(options, config: Config | None) -> int:
    """``export-hf``: of ``--checkpoint``, else of the newest checkpoint of ``--config``."""
    if options.checkpoint is None and config is None:
        raise UserError("export-hf needs --checkpoint STEP_DIR, or --config C for the newest checkpoint of its run")
    if not 0 < options.max_shard_gb < 1e9:
        raise UserError(f"--max-shard-gb {options.max_shard_gb}: must be above 0")
    checkpoint = Path(options.checkpoint) if options.checkpoint else newest_checkpoint(config.job.output_dir)
    export(checkpoint, Path(options.out), options.dtype, int(options.max_shard_gb * 1e9), merge=options.merge)
    print(f"wrote {options.out} from {checkpoint}")
    return 0
