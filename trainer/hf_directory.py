"""Reading a Hugging Face directory: config.json, and slices of tensors out of safetensors files."""

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from models.decoder_config import DecoderConfig
from models.hugging_face import architecture_from, hugging_face_name
from trainer.errors import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")
# Tables that old exports carry along; they follow from config.json.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def read_json(path: Path) -> dict:
    """A JSON object. Raises ``UserError`` naming the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object")
    return content


@cache
def read_architecture(folder: str) -> DecoderConfig:
    """The architecture that config.json describes. Raises ``UserError``."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise UserError(f"{folder} has no config.json in it: give a Hugging Face model directory")
    fields = read_json(path)
    try:
        return architecture_from(fields)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def read_origin(folder: str) -> dict:
    """What a directory says beside the architecture, for the day that the model is exported again."""
    fields = read_json(Path(folder) / "config.json")
    kept = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    generation = Path(folder) / "generation_config.json"
    return {
        "path": folder,
        "config": {key: fields[key] for key in kept if fields.get(key) is not None},
        "generation_config": read_json(generation) if generation.is_file() else None,
    }


class HfWeights:
    """The tensors of a directory, read slice by slice: nobody ever holds more of them than it asks for."""

    def __init__(self, folder: str):
        self.folder = Path(folder)
        self._open: dict[str, object] = {}
        self.file_of = self._locate()

    def _locate(self) -> dict[str, str]:
        """Tensor name -> file name. Raises ``UserError``."""
        index = self.folder / INDEX
        if not index.is_file():
            if not (self.folder / SINGLE).is_file():
                raise UserError(f"{self.folder} has neither {SINGLE} nor {INDEX} (weights in .bin files are not read)")
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        file_of = read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(file, str) for file in file_of.values()):
            raise UserError(f"{index}: its weight_map does not map tensors to files")
        return file_of

    def _file(self, file: str):
        """An open safetensors file. Tensors are read when they are asked for."""
        import safetensors

        if file not in self._open:
            try:
                handle = safetensors.safe_open(self.folder / file, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise UserError(
                    f"{self.folder / file} cannot be read: {error} (truncated or not a safetensors file?)"
                ) from None
            self._open[file] = handle
        return self._open[file]

    def check(self, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> None:
        """Raise ``UserError`` unless the files hold exactly the parameters in ``shapes`` (by our names).

        With ``tied`` embeddings a stored lm_head is not read, as everywhere in this ecosystem.
        """
        expected = {hugging_face_name(name): shape for name, shape in shapes.items()}
        files = sorted(set(self.file_of.values()))
        problems = [
            f"{self.folder / INDEX} names {f}, which is not there" for f in files if not (self.folder / f).is_file()
        ]
        if problems:
            raise UserError(*problems)
        kept = {file: set(self._file(file).keys()) for file in files}
        problems = [
            f"{self.folder / INDEX}: {name} should be in {file}, which does not have it"
            for name, file in self.file_of.items()
            if name not in kept[file]
        ]
        if problems:
            raise UserError(*problems[:20])
        for name, shape in expected.items():
            if name not in self.file_of:
                problems.append(f"{self.folder}: {name} is missing")
                continue
            path = self.folder / self.file_of[name]
            stored = self._file(self.file_of[name]).get_slice(name)
            if tuple(stored.get_shape()) != tuple(shape):
                problems.append(
                    f"{path}: {name} has shape {list(stored.get_shape())}, the model {list(shape)} by config.json and overrides"
                )
            elif stored.get_dtype() not in _FLOATS:
                problems.append(f"{path}: {name} is stored as {stored.get_dtype()}; {', '.join(_FLOATS)} are read")
        for name in self.file_of.keys() - expected.keys():
            if not _DERIVED.fullmatch(name) and not (tied and name == "lm_head.weight"):
                problems.append(f"{self.folder / self.file_of[name]}: {name} has no place in the model")
        if problems:
            shown = sorted(problems)
            raise UserError(*shown[:20], *([f"... and {len(shown) - 20} more"] if len(shown) > 20 else []))

    def read(self, name: str, shape: tuple[int, ...], start: tuple[int, ...], stop: tuple[int, ...]):
        """The slice ``[start, stop)`` of our parameter ``name``: a CPU tensor in the stored dtype."""
        import torch

        if any(lo >= hi for lo, hi in zip(start, stop)):
            return torch.empty(tuple(hi - lo for lo, hi in zip(start, stop)))
        stored = hugging_face_name(name)
        entry = self._file(self.file_of[stored]).get_slice(stored)
        return entry[tuple(slice(lo, hi) for lo, hi in zip(start, stop))]
