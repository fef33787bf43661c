"""From a path in the config to a stream of tokens, whatever lies there.

Token files are memory-mapped as they are. Text is tokenized: up to 8 MiB of it in memory, more of it once, into prepared
shards in a cache folder that every later start and every other rank maps. Loads no torch.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trainer.config import Config
from trainer.data.chat_template import Template, find_template
from trainer.data.conversations import FORMS, form_of
from trainer.data.documents import (
    BUNDLED_TEXT,
    BadLines,
    Part,
    documents_in,
    expand,
    is_dataset,
    read_documents,
    size_of,
    state_of,
)
from trainer.data.encode import Reader, reader_of
from trainer.data.indexed import IndexedTokens
from trainer.data.prepare import MANIFEST, prepare, read_manifest
from trainer.data.remote import expand_remote, fetch, is_remote, is_remote_folder
from trainer.data.stream import BareTokens, MemoryTokens, Piece, TokenStream
from trainer.data.tokenizer import Tokenizer, digest_of
from trainer.errors import UserError

_RECORDS = ("jsonl", "parquet", "hf")  # what can hold conversations
IN_MEMORY_BYTES = 8 << 20  # of text files, packed or not


@dataclass(frozen=True)
class Place:
    """Where data lies and how it is to be read. ``key``: what the user wrote it under, for messages.

    ``method``: the run's, which says whether records are conversations. ``template``: ``data.chat_template``.
    """

    path: str | None  # None: the bundled text
    kind: str = "auto"
    method: str = "pretrain"
    template: str | None = None
    text_field: str = "text"
    skip_bad_lines: bool = False
    cache_dir: str | None = None  # None: the user's own
    key: str = "data.path"


def places_of(config: Config) -> dict[str, Place]:
    """Each source of the ``[data]`` section by name; "" for the only one."""
    data = config.data
    common = {
        "text_field": data.text_field, "skip_bad_lines": data.bad_lines == "skip", "cache_dir": data.cache_dir,
        "method": config.training.method, "template": data.chat_template,
    }  # fmt: skip
    if not data.sources:
        return {"": Place(data.path, data.source, **common)}
    return {
        name: Place(source.path, source.source, key=f"data.sources.{name}", **common)
        for name, source in data.sources.items()
    }


def validation_places(config: Config) -> dict[str, Place]:
    """Each validation set by name: the training data itself, where the config names none."""
    places = places_of(config)
    if not config.validation.sets:
        return places
    common = next(iter(places.values()))
    return {
        name: replace(common, path=path, kind="auto", key=f"validation.sets.{name}")
        for name, path in config.validation.sets.items()
    }


def check_places(config: Config) -> list[str]:
    """What is wrong with the places that the config names, as far as can be told without reading them."""
    problems = []
    for place in dict.fromkeys([*places_of(config).values(), *validation_places(config).values()]):
        try:
            check_place(place)
        except UserError as error:
            problems += error.problems
    return problems


def kind_of(place: Place) -> str:
    """ "bundled", "prepared", "megatron", "nanogpt", "text", "jsonl" or "parquet"."""
    path = place.path
    if place.kind not in ("auto", "chat"):
        return place.kind
    if path is None:
        return "bundled"
    if is_dataset(path):
        return "hf"
    if is_remote_folder(path) if is_remote(path) else Path(path).is_dir():
        return "prepared"
    if path.endswith(".idx") or (Path(f"{path}.idx").is_file() and not Path(path).exists()):
        return "megatron"  # which names the pair by what both have in common
    kinds = {_kind_of_file(file): file for file in expand(path, place.key)}
    if len(kinds) > 1 and not kinds.keys().isdisjoint(("megatron", "nanogpt")):
        found = " and ".join(f"{file} ({kind})" for kind, file in kinds.items())
        raise UserError(
            f"{place.key} = {path!r} stands for files of more than one kind, {found}: make each a source, or name one kind"
        )
    return next(iter(kinds))


def _kind_of_file(file: str) -> str:
    if not file.endswith((".bin", ".idx")):
        return documents_in(file)
    index = _index_of(file)
    return "megatron" if (bool(expand_remote(index)) if is_remote(file) else Path(index).is_file()) else "nanogpt"


def holds_chat(place: Place) -> bool:
    """Whether conversations are read there: where the config or the method says so, and with lora where the first record has no
    text field. Raises ``UserError`` where there can be none."""
    if place.kind != "chat" and place.method == "pretrain":
        return False
    kind = kind_of(place)
    if kind in _RECORDS:
        return place.kind == "chat" or place.method == "sft" or _first_is_chat(place, kind)
    if place.kind == "chat" or place.method == "sft":
        named = f"{place.key} = {place.path!r} is {kind}" if place.path else f"without {place.key} a novel is read"
        raise UserError(
            f"{named}, which holds no conversations, but {_asks_for_chat(place)}: name JSONL of {FORMS}; or use "
            'training.method = "pretrain"'
        )
    return False


def _asks_for_chat(place: Place) -> str:
    return 'source = "chat"' if place.kind == "chat" else f'training.method = "{place.method}"'


def _first_is_chat(place: Place, kind: str) -> bool:
    """Whether the first record has messages and no text. What cannot be read is told of later."""

    def found(record) -> bool:
        is_record = isinstance(record, dict)
        return is_record and place.text_field not in record and form_of(record) is not None

    path = place.path if kind == "hf" else _files(place)[0]
    documents = read_documents(Part(path, kind), BadLines(skip=True), convert=lambda record: (found(record),))
    return next((answer for (answer,), _ in documents), False)


def check_place(place: Place) -> None:
    """Raise ``UserError`` unless there is something to read, as far as can be told without reading it."""
    kind = kind_of(place)
    if place.kind == "chat" or place.method == "sft":
        holds_chat(place)
    if kind == "prepared":
        if not is_remote(place.path):
            _check_folder(Path(place.path), place.key)
    elif kind == "megatron":
        _prefixes(place)
    elif kind != "hf":
        for path in _files(place):
            if not is_remote(path) and not Path(path).is_file():
                raise UserError(f"{place.key} = {path!r}: is not a file")
            if size_of(path) == 0:
                raise UserError(f"{place.key} = {path!r}: the file is empty")


def open_stream(place: Place, tokenizer_name: str, tokenizer: Tokenizer, n_ids: int) -> tuple[TokenStream, list[str]]:
    """The tokens of a place, and warnings about it. ``n_ids``: of the model. Raises ``UserError``."""
    check_place(place)
    kind, warnings = kind_of(place), []
    if kind == "prepared":
        pieces, warnings = _prepared(_local_folder(place), tokenizer_name, place.key)
    elif kind == "megatron":
        pieces = [IndexedTokens(prefix) for prefix in _prefixes(place)]
    elif kind == "nanogpt":
        pieces = [BareTokens(path, tokenizer.eos_id) for path in _local(_files(place), place)]
    else:
        pieces, warnings = _tokenized(place, kind, tokenizer_name, tokenizer)
    stream = TokenStream(pieces, n_ids, place.key, masked=holds_chat(place))
    if not len(stream):
        raise UserError(f"{place.key} = {place.path!r}: the file is empty")
    stream.check_sample()
    return stream, warnings


def cache_folder(place: Place) -> Path:
    if place.cache_dir is not None:
        return Path(place.cache_dir)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshloom"


def _files(place: Place) -> list[str]:
    return [str(BUNDLED_TEXT)] if place.path is None else expand(place.path, place.key)


def _local(paths: Sequence[str], place: Place) -> list[Path]:
    """Files that can be memory-mapped."""
    return [fetch([path], cache_folder(place))[0] if is_remote(path) else Path(path) for path in paths]


def _index_of(path: str) -> str:
    return path.removesuffix(".bin").removesuffix(".idx") + ".idx"


def _prefixes(place: Place) -> list[Path]:
    """The pairs that a path or pattern names, by what ``.bin`` and ``.idx`` have in common."""
    path = place.path.removesuffix(".idx") + ".bin" if place.path.endswith(".idx") else place.path
    path = path if path.endswith(".bin") else f"{path}.bin"
    found = []
    for name in expand(path, place.key):
        if is_remote(name):
            bin_file = fetch([name, _index_of(name)], cache_folder(place))[0]
        else:
            bin_file = Path(name)
            if not Path(_index_of(name)).is_file():
                raise UserError(f"{place.key} = {name!r}: no {_index_of(name)} beside it")
        found.append(bin_file.with_suffix(""))
    return found


def _check_folder(folder: Path, key: str) -> None:
    if not folder.is_dir():
        raise UserError(f"{key} = {str(folder)!r}: {'is not a folder' if folder.exists() else 'no such folder'}")
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"{key} = {str(folder)!r}: no {MANIFEST} in it: `python -m trainer prepare` makes such a folder, and writes that file "
            "last; for other files, name them: DIR/*.jsonl"
        )


def _local_folder(place: Place) -> Path:
    if not is_remote(place.path):
        return Path(place.path)
    files = expand_remote(f"{place.path.rstrip('/')}/*")
    return fetch(files, cache_folder(place))[0].parent


def _prepared(folder: Path, tokenizer_name: str, key: str) -> tuple[list[Piece], list[str]]:
    _check_folder(folder, key)
    manifest = read_manifest(folder)
    own = manifest["tokenizer"]
    if own["digest"] != digest_of(tokenizer_name):
        raise UserError(
            f"{key} = {str(folder)!r} was prepared with the tokenizer {own['name']!r}, which is not data.tokenizer = {tokenizer_name!r}: "
            "name that one"
        )
    pieces = []
    for shard in manifest["shards"]:
        piece = IndexedTokens(folder / shard["name"])
        if len(piece.tokens) != shard["tokens"] or piece.n_documents != shard["documents"]:
            raise UserError(
                f"{piece.name} holds {len(piece.tokens):,} tokens of {piece.n_documents:,} documents, but {folder / MANIFEST} says "
                f"{shard['tokens']:,} of {shard['documents']:,}: prepare it again"
            )
        pieces.append(piece)
    return pieces, _skipped(manifest["skipped_lines"], manifest["skipped_examples"], key)


def _tokenized(place: Place, kind: str, tokenizer_name: str, tokenizer: Tokenizer) -> tuple[list[Piece], list[str]]:
    paths = [place.path] if kind == "hf" else _files(place)
    of_documents = kind if kind != "bundled" else "text"
    if place.kind in ("auto", "chat"):
        of_documents = None  # each by its name
    template = find_template(tokenizer_name, place.template) if holds_chat(place) else None
    if kind != "hf" and sum(size_of(path) for path in paths) <= IN_MEMORY_BYTES:
        bad = BadLines(place.skip_bad_lines)
        reader = reader_of(tokenizer, place.text_field, template)
        pieces = [_in_memory(path, of_documents or documents_in(path), bad, reader) for path in paths]
        return pieces, _skipped(bad.n_skipped, bad.examples, place.key)
    return _cached(paths, of_documents, tokenizer_name, place, template)


def _in_memory(path: str, kind: str, bad: BadLines, reader: Reader) -> MemoryTokens:
    pieces, ends, n_tokens = [np.zeros(0, reader.dtype)], [0], 0
    for of_document, is_last in reader.encode(reader.read(Part(path, kind), bad)):
        pieces += [piece.astype(reader.dtype) for piece in of_document]
        n_tokens += sum(map(len, of_document))
        if is_last:
            ends.append(n_tokens)
    return MemoryTokens(np.concatenate(pieces), np.array(ends[:-1]), path)


def _cached(
    paths: list[str], kind: str | None, tokenizer_name: str, place: Place, template: Template | None
) -> tuple[list[Piece], list[str]]:
    """Prepared shards of these files, made by whoever comes first; the others wait."""
    paths = [path if is_remote(path) else str(Path(path).resolve()) for path in paths]
    key = [[path, state_of(path)] for path in paths] + [
        digest_of(tokenizer_name),
        place.text_field,
        place.skip_bad_lines,
        kind,
        template and [template.source, template.tokens],
    ]
    folder = cache_folder(place) / f"tokens-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
    try:
        n_workers = len(os.sched_getaffinity(0))
        prepare(
            paths, tokenizer_name, folder, n_workers, place.text_field, place.skip_bad_lines, kind, template, wait=True
        )
    except OSError as error:
        raise UserError(f"the tokens of {place.key} cannot be kept in {folder}: {error}: set data.cache_dir") from None
    return _prepared(folder, tokenizer_name, place.key)


def _skipped(n: int, examples: list[str], key: str) -> list[str]:
    return [f"{key}: {n:,} bad line{'s' * (n > 1)} skipped, such as {examples[0]}"] if n else []
