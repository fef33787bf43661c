"""``prepare``: text into memory-mapped shards of tokens, once, on all cores. Loads no torch.

The work is cut into parts that depend on the files alone: a plain JSONL file into stretches of lines, any other file is one
part. Each part becomes a shard, written under a temporary name; a small ``.json`` says that it is complete, so that a
killed preparation goes on with the parts that are left. ``manifest.json``, written last, makes the folder a data set.
"""

import concurrent.futures
import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from trainer.data.chat_template import ChatTemplate, Rendered, Template
from trainer.data.conversations import conversation_of
from trainer.data.documents import BadLines, Part, Piece, documents_in, read_documents, size_of, state_of
from trainer.data.indexed import IndexedWriter, dtype_for
from trainer.data.tokenizer import Tokenizer, digest_of, load_tokenizer
from trainer.errors import UserError

MANIFEST = "manifest.json"
_PLAN = "plan.json"
_ASKED = ("sources", "text_field", "bad_lines")  # by which a manifest tells that it is what is asked for
_LEAST_PART_BYTES, _MOST_PART_BYTES, _PARTS = 4 << 20, 256 << 20, 256
_BATCH_CHARACTERS = 1 << 20  # handed to the tokenizer at once
_CONVERSATIONS = 256  # likewise


@dataclass(frozen=True)
class Job:
    """What a worker needs to know. ``template``: of conversations."""

    out: str
    tokenizer: str
    text_field: str
    skip_bad_lines: bool
    template: Template | None


@dataclass(frozen=True)
class Reader:
    """read: the documents of a part. encode: each document as the pieces of its ids. dtype: that holds them."""

    read: Callable[[Part, BadLines], Iterator[Piece]]
    encode: Callable[[Iterator[Piece]], Iterator[list[np.ndarray]]]
    dtype: np.dtype


def reader_of(tokenizer: Tokenizer, text_field: str, template: Template | None) -> Reader:
    """``template``: of conversations; None for text."""
    if template is None:
        read = functools.partial(read_documents, text_field=text_field)
        return Reader(read, lambda documents: tokenize(documents, tokenizer), dtype_for(tokenizer.n_ids))
    chat = ChatTemplate(template, tokenizer)

    def convert(record) -> Rendered:
        return chat.render(conversation_of(record))

    def encode(conversations: Iterator[Piece]) -> Iterator[list[np.ndarray]]:
        while some := [rendered for rendered, _ in itertools.islice(conversations, _CONVERSATIONS)]:
            yield from ([ids] for ids in chat.encode(some))

    return Reader(functools.partial(read_documents, convert=convert), encode, np.dtype(np.int32))  # with a sign


def prepare(
    paths: Sequence[str],
    tokenizer: str,
    out: Path,
    n_workers: int,
    text_field: str = "text",
    skip_bad_lines: bool = False,
    kind: str | None = None,
    template: Template | None = None,
) -> dict:
    """Tokenize files into ``out``. Returns the manifest. Raises ``UserError``.

    ``kind``: as from ``documents_in`` (default: by each file's name). ``template``: of conversations, else text is read.
    """
    loaded = load_tokenizer(tokenizer)
    dtype = reader_of(loaded, text_field, template).dtype
    parts = list(_parts(paths, kind))
    plan = {
        "format": 1,
        "sources": [{"path": path, "state": state_of(path)} for path in paths],
        "tokenizer": digest_of(tokenizer),
        "text_field": text_field,
        "bad_lines": "skip" if skip_bad_lines else "error",
        "parts": [asdict(part) for part in parts],
    }
    if manifest := _finished(out, plan):
        return manifest
    out.mkdir(parents=True, exist_ok=True)
    _write_json(out / _PLAN, plan)
    job = Job(str(out), tokenizer, text_field, skip_bad_lines, template)
    left = [number for number in range(len(parts)) if not _report_file(out, number).is_file()]
    _run(job, parts, left, n_workers)
    reports = [json.loads(_report_file(out, number).read_text()) for number in range(len(parts))]
    n_tokens = sum(report["tokens"] for report in reports)
    if not n_tokens:
        raise UserError(f"no text in {', '.join(paths[:3])}{' ...' if len(paths) > 3 else ''}: every document is empty")
    manifest = {
        "format": 1,
        "tokenizer": {
            "name": tokenizer, "digest": plan["tokenizer"], "n_ids": loaded.n_ids,
            "bos_ids": loaded.bos_ids, "eos_id": loaded.eos_id,
        },
        "dtype": dtype.name,
        "documents": sum(report["documents"] for report in reports),
        "tokens": n_tokens,
        "skipped_lines": sum(report["skipped_lines"] for report in reports),
        "skipped_examples": [line for report in reports for line in report["skipped_examples"]][:10],
        **{key: plan[key] for key in _ASKED},
        "shards": [report["shard"] for report in reports if report["documents"]],
    }  # fmt: skip
    _write_json(out / MANIFEST, manifest)
    for path in [out / _PLAN, *(_report_file(out, number) for number in range(len(parts)))]:
        path.unlink()
    return manifest


def tokenize(documents: Iterator[Piece], tokenizer: Tokenizer) -> Iterator[list[np.ndarray]]:
    """Each document's token ids as pieces, BOS and EOS included: texts go to the tokenizer in batches."""
    texts: list[str] = []
    ends: list[bool] = []
    bos, eos = (np.array(ids, dtype=np.int32) for ids in (tokenizer.bos_ids, [tokenizer.eos_id]))
    bos = [bos] if len(bos) else []
    document: list[np.ndarray] = [*bos]

    def flush():
        nonlocal document
        for ids, is_last in zip(tokenizer.encode_batch(texts), ends):
            document.append(ids)
            if is_last:
                yield [*document, eos]
                document = [*bos]
        texts.clear()
        ends.clear()

    n_characters = 0
    for text, is_last in documents:
        texts.append(text)
        ends.append(is_last)
        n_characters += len(text)
        if n_characters >= _BATCH_CHARACTERS:
            yield from flush()
            n_characters = 0
    yield from flush()


def _parts(paths: Sequence[str], kind: str | None) -> Iterator[Part]:
    """The same for any number of workers: a resumed preparation may have another."""
    total = sum(size_of(path) for path in paths)
    part_bytes = min(max(total // _PARTS, _LEAST_PART_BYTES), _MOST_PART_BYTES)
    for path in paths:
        of_path = kind or documents_in(path)
        if of_path == "jsonl" and not path.endswith((".gz", ".zst")):
            size = size_of(path)
            n_parts = max(1, round(size / part_bytes))
            for part in range(n_parts):
                yield Part(path, of_path, size * part // n_parts, size * (part + 1) // n_parts)
        else:
            yield Part(path, of_path)


def _finished(out: Path, plan: dict) -> dict | None:
    """The manifest, if ``out`` holds just what is asked for. Raises ``UserError`` if it holds something else."""
    asked = {key: plan[key] for key in _ASKED} | {"digest": plan["tokenizer"]}
    if (out / MANIFEST).is_file():
        manifest = read_manifest(out)
        have = {key: manifest[key] for key in _ASKED} | {"digest": manifest["tokenizer"]["digest"]}
    elif (out / _PLAN).is_file():
        manifest = None
        have, asked = json.loads((out / _PLAN).read_text()), plan
    elif out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty, and holds no prepared data: name a new folder")
    else:
        return None
    if have != asked:
        differs = next(key for key in asked if have.get(key) != asked[key])
        what = {"digest": "tokenizer"}.get(differs, differs)
        raise UserError(f"--out {out} holds a preparation with other {what}: name another folder, or remove that one")
    return manifest


def read_manifest(folder: Path) -> dict:
    """Raises ``UserError`` if it is not one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != 1:
            raise ValueError(f"format {manifest['format']}")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST} is not the manifest of prepared data: {error}") from None


def _run(job: Job, parts: list[Part], left: list[int], n_workers: int) -> None:
    """Do what is left, the largest first, with a bar over the bytes of text."""
    global _progress
    weights = {number: _n_bytes(parts[number]) for number in left}
    left = sorted(left, key=lambda number: -weights[number])
    context = multiprocessing.get_context("spawn")  # a fork would take the tokenizer's threads' locks along
    _progress = context.Value("q", 0)
    with tqdm(total=sum(weights.values()), unit="B", unit_scale=True, desc="prepare", disable=None) as bar:
        if n_workers == 1:
            for number in left:
                _do_part(job, number, parts[number])
                bar.update(_progress.value - bar.n)
        elif left:
            _run_pool(job, {number: parts[number] for number in left}, n_workers, context, bar)


def _run_pool(job: Job, parts: dict[int, Part], n_workers: int, context, bar: tqdm) -> None:
    n_processes = min(n_workers, len(parts))
    n_threads = n_workers // n_processes  # fewer files than cores: the rest of the cores within a file
    with _environment(TOKENIZERS_PARALLELISM=str(n_threads > 1).lower(), RAYON_NUM_THREADS=str(n_threads)):
        pool = concurrent.futures.ProcessPoolExecutor(n_processes, context, _begin_worker, (_progress,))
        waiting: set = set()
        try:
            waiting |= {pool.submit(_do_part, job, number, part) for number, part in parts.items()}
            while waiting:
                finished, waiting = concurrent.futures.wait(waiting, timeout=0.2, return_when="FIRST_COMPLETED")
                bar.update(_progress.value - bar.n)
                for future in finished:
                    future.result()
        except concurrent.futures.process.BrokenProcessPool:
            raise UserError(
                "a worker was killed, for want of memory perhaps: the same command goes on; fewer --workers take less"
            ) from None
        finally:
            for process in (pool._processes or {}).values():
                process.terminate()  # after a fault what is left is not worth waiting for; else all have done
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _environment(**values: str):
    """Environment variables for the processes started within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


_progress = None  # shared: bytes of text that all workers have done
_loaded: dict[Job, Reader] = {}


def _begin_worker(progress) -> None:
    global _progress
    _progress = progress
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _do_part(job: Job, number: int, part: Part) -> None:
    """Write the shard of one part, and its report."""
    if job not in _loaded:
        _loaded[job] = reader_of(load_tokenizer(job.tokenizer), job.text_field, job.template)
    reader = _loaded[job]
    bad = BadLines(skip=job.skip_bad_lines)
    out = Path(job.out)
    writer = IndexedWriter(out / f"{number:06d}", reader.dtype)
    try:
        for pieces in reader.encode(_counted(reader.read(part, bad), _n_bytes(part))):
            writer.add(pieces)
        n_documents = len(writer.lengths)
        if n_documents:
            writer.finish()
    finally:
        writer.discard()
    shard = {
        "name": writer.prefix.name, "documents": n_documents, "tokens": writer.n_tokens,
        "crc32": writer.crc32, "index_crc32": writer.index_crc32, "source": part.path,
    }  # fmt: skip
    report = {
        "shard": shard, "documents": n_documents, "tokens": writer.n_tokens,
        "skipped_lines": bad.n_skipped, "skipped_examples": bad.examples,
    }  # fmt: skip
    _write_json(_report_file(out, number), report)


def _counted(documents: Iterator[Piece], n_bytes: int) -> Iterator[Piece]:
    """The same documents; their bytes are added to the progress, but no more than the file has (it may be packed)."""
    unsaid = said = 0
    for text, ends in documents:
        yield text, ends
        unsaid += len(text)
        if unsaid >= 1 << 18:
            said += _say(min(unsaid, n_bytes - said))
            unsaid = 0
    _say(n_bytes - said)


def _say(n_bytes: int) -> int:
    with _progress.get_lock():
        _progress.value += n_bytes
    return n_bytes


def _n_bytes(part: Part) -> int:
    return size_of(part.path) if part.last is None else part.last - part.first


def _report_file(out: Path, number: int) -> Path:
    return out / f"{number:06d}.json"


def _write_json(path: Path, content: dict) -> None:
    partial = path.with_suffix(".json.tmp")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
