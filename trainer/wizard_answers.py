"""What each answer of the wizard means. A function takes the text of an answer and raises ``UserError`` for a wrong one."""

import gzip
import json
import math
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import tomli

from models import FAMILIES
from models.decoder_config import DecoderConfig
from parallelize.planner.hardware import Cluster, cluster_of
from trainer.config_load import CONFIG_DIR, key_schemas
from trainer.data.conversations import form_of
from trainer.data.documents import expand, size_of
from trainer.data.remote import is_remote
from trainer.data.sources import Place, check_place, kind_of
from trainer.errors import UserError
from trainer.hardware import GIB, machine_memory_bytes
from trainer.hf_directory import read_architecture
from trainer.launch import count_gpus

_WORDS = {
    "text": "plain text", "jsonl": "JSON lines", "parquet": "parquet", "prepared": "prepared shards of tokens",
    "megatron": "Megatron's indexed tokens", "nanogpt": "nanoGPT's tokens", "hf": "a Hugging Face data set",
    "bundled": "the bundled novel",
}  # fmt: skip
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_LONG = GIB  # text that takes a while to tokenize at each new start


@dataclass(frozen=True)
class ModelAnswer:
    """keys: of [model], dotted. tables: of a shipped config of this model, {} if there is none. tokenizer: its own, if known."""

    name: str
    keys: dict
    architecture: DecoderConfig
    tables: dict
    tokenizer: str | None


@dataclass(frozen=True)
class DataAnswer:
    """keys: of [data], dotted. text: what was found. is_chat: its records are conversations."""

    keys: dict
    text: str
    is_chat: bool


@dataclass(frozen=True)
class Hardware:
    """is_here: this machine can run it."""

    cluster: Cluster
    is_here: bool

    @property
    def shown(self) -> str:
        return f"{self.cluster.n_nodes} x {self.cluster.gpus_per_node} {self.cluster.gpu.name}"


@dataclass(frozen=True)
class Goal:
    """One of the two."""

    steps: int | None = None
    tokens: int | None = None

    def steps_of(self, tokens_per_step: int) -> int:
        return self.steps or max(1, math.ceil(self.tokens / tokens_per_step))


def read_model(text: str) -> ModelAnswer:
    """ "llama 3-8B", "smollm2-135M", or a Hugging Face directory."""
    if Path(text).is_dir():
        architecture = read_architecture(text)
        path = str(Path(text).resolve())
        own = path if (Path(path) / "tokenizer.json").is_file() else None
        return ModelAnswer(Path(path).name, {"model.hf_path": path}, architecture, {}, own)
    named = {(family, size) for family, sizes in FAMILIES.items() for size in sizes}
    words = [word for word in re.split(r"[\s/:]+", text.strip(), maxsplit=1) if word]
    found = [
        (family, size)
        for family, size in sorted(named)
        if [word.lower() for word in words] in ([size.lower()], [family, size.lower()])
    ]
    if len(found) > 1:
        raise UserError(f"{text!r} is a size of several families: say {' or '.join(' '.join(pair) for pair in found)}")
    if not found:
        shown = "; ".join(f"{family}: {', '.join(sizes)}" for family, sizes in FAMILIES.items())
        raise UserError(f"{text!r} is neither a directory nor a known size. {shown}")
    family, size = found[0]
    tables = _shipped(family, size)
    tokenizer = tables.get("data", {}).get("tokenizer")
    keys = {"model.family": family, "model.size": size}
    return ModelAnswer(f"{family}-{size}", keys, FAMILIES[family][size], tables, tokenizer)


def _shipped(family: str, size: str) -> dict:
    """The tables of the shipped config that pre-trains this model, {} if there is none."""
    for path in sorted(CONFIG_DIR.glob("*.toml")):
        tables = tomli.loads(path.read_text(encoding="utf-8"))
        model, method = tables.get("model", {}), tables.get("training", {}).get("method", "pretrain")
        if (model.get("family"), model.get("size"), method) == (family, size, "pretrain") and "matrix" not in tables:
            return tables
    return {}


def read_data(text: str) -> DataAnswer:
    """ "bundled", a path, a pattern, a folder that prepare made, hf://NAME or a URL."""
    if text == "bundled":
        return DataAnswer({"data.source": "bundled"}, _WORDS["bundled"], False)
    is_local = not is_remote(text) and "://" not in text
    path = os.path.abspath(text) if is_local else text
    place = Place(path, key="the data")
    kind = kind_of(place)
    check_place(place)
    shown, keys, is_chat = _WORDS[kind], {"data.path": path}, False
    if kind in ("text", "jsonl", "parquet") and is_local:
        files = expand(path, "the data")
        n_bytes = sum(map(size_of, files))
        shown = f"{len(files)} file{'s' * (len(files) > 1)} of {shown}, {_size(n_bytes)}"
        if n_bytes > _LONG:
            shown += "; this much is best tokenized once, on all cores: python -m trainer prepare --help"
        if kind != "text" and (fields := _first_record(files[0], kind)):
            shown += f"; its fields: {', '.join(fields)}"
            is_chat = form_of(fields) is not None
            if not is_chat and "text" not in fields:
                keys["data.text_field"] = _longest_text(fields, path)
                shown += f"; the text is read from {keys['data.text_field']!r}"
    return DataAnswer(keys, shown + ("; conversations" if is_chat else ""), is_chat)


def _first_record(file: str, kind: str) -> dict | None:
    """The first record's fields; None where they cannot be had in a moment."""
    if kind == "parquet":
        import pyarrow.parquet

        batch = next(pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=1), None)
        return batch.to_pylist()[0] if batch is not None and batch.num_rows else None
    if file.endswith(".zst"):
        return None
    with gzip.open(file, "rb") if file.endswith(".gz") else open(file, "rb") as lines:
        line = lines.readline(1 << 26)
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{file}: line 1 is no JSON ({error}): one JSON object a line is expected") from None
    if not isinstance(record, dict):
        raise UserError(f'{file}: line 1 is no JSON object, such as {{"text": "..."}}')
    return record


def _longest_text(fields: dict, path: str) -> str:
    texts = {name: len(value) for name, value in fields.items() if isinstance(value, str)}
    if not texts:
        raise UserError(f"{path}: its records have no text, only {', '.join(fields)}")
    return max(texts, key=texts.get)


def methods() -> list[str]:
    """What training.method takes."""
    return key_schemas()["training.method"]["enum"]


def read_method(text: str, data: DataAnswer) -> str:
    if text not in methods():
        raise UserError(f"{text!r} is no method: {' or '.join(methods())}")
    if text == "pretrain" and data.is_chat:
        raise UserError("pretrain reads text, and the data are conversations: sft or lora")
    if text == "sft" and not data.is_chat:
        raise UserError("sft learns from conversations, and the data are text: pretrain, or lora")
    return text


def read_hardware(text: str) -> Hardware:
    """ "here", or NODES x GPUS KIND such as "4x8 h100", "8 h100", "2 cpu"."""
    n_gpus = count_gpus()
    if text == "here":
        return _here(n_gpus)
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\d+)(?:\s*[x*]\s*|\s+)(\S+)", text.strip())
    if match is None:
        raise UserError(f'{text!r} is not NODES x GPUS KIND, such as "4x8 h100", "8 a100" or "here"')
    n_nodes, n, kind = int(match[1] or 1), int(match[2]), match[3]
    try:
        cluster = cluster_of(kind if kind.endswith(".toml") else kind.lower(), n_nodes, n)
    except ValueError as error:
        raise UserError(str(error)) from None
    on_cpu = cluster.gpu.name == "cpu"
    if on_cpu and not n_gpus:
        cluster = _with_memory(cluster, machine_memory_bytes() / n)
    return Hardware(cluster, n_nodes == 1 and (not n_gpus if on_cpu else n <= n_gpus))


def _here(n_gpus: int) -> Hardware:
    if not n_gpus:
        return Hardware(_with_memory(cluster_of("cpu", 1, 1), machine_memory_bytes()), True)
    import torch

    from trainer.auto_layout import known_gpu

    name = torch.cuda.get_device_name(0)
    if (known := known_gpu(name)) is None:
        raise UserError(
            f"the planner knows no {name}: say NODES x GPUS FILE.toml, from python -m trainer plan --measure FILE.toml"
        )
    return Hardware(_with_memory(cluster_of(known, 1, n_gpus), torch.cuda.mem_get_info(0)[1]), True)


def _with_memory(cluster: Cluster, memory_bytes: float) -> Cluster:
    return replace(cluster, gpu=replace(cluster.gpu, memory_bytes=memory_bytes))


def read_goal(text: str) -> Goal:
    """ "1000 steps", "20B tokens"; a bare number is steps."""
    match = re.fullmatch(r"(\d[\d,_]*(?:\.\d+)?)\s*([kmbt]?)\s*(steps?|tokens?|)", text.strip().lower())
    if match is None:
        raise UserError(f'{text!r} is no goal: say "1000 steps" or "20B tokens"')
    number = float(re.sub("[,_]", "", match[1])) * _UNITS[match[2]]
    if number < 1 or number != int(number) or number >= 2**62:
        raise UserError(f"{text!r} is no goal: a whole number of steps or tokens, at least 1")
    if match[2] and not match[3]:
        raise UserError(f'{text!r}: of what? say "{text} tokens" or "{text} steps"')
    return Goal(tokens=int(number)) if match[3].startswith("token") else Goal(steps=int(number))


def read_file(text: str) -> Path:
    """A .toml file that is not there yet, in a folder that is."""
    path = Path(text).resolve()
    if path.suffix != ".toml":
        raise UserError(f"{text}: give a name that ends in .toml")
    for file in (path, path.with_suffix(".sh")):
        if file.exists():
            raise UserError(f"{file} is there already: give another name, or move it away")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise UserError(f"{path} cannot be written: give a name in a folder that exists and is yours")
    return path


def read_yes(text: str) -> bool:
    if text.lower() not in ("y", "yes", "n", "no"):
        raise UserError(f"{text!r}: say yes or no")
    return text.lower().startswith("y")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:,.1f} GiB" if n_bytes >= GIB else f"{n_bytes / 2**20:,.1f} MiB"
