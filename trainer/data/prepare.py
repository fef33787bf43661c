"""``prepare``: text into memory-mapped shards of tokens, once, on all cores. Loads no torch.

The work is cut into shards by the files alone: a large plain JSONL file into stretches of lines, small files that follow each
other share one, any other file is one. A shard is written under a temporary name; a small ``.json`` says that it is complete, so
that a killed preparation goes on with those that are left. ``manifest.json``, written last, makes the folder a data set.
"""

import concurrent.futures
import contextlib
import fcntl
import functools
import itertools
import json
import multiprocessing
import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from trainer.data.chat_template import Template
from trainer.data.documents import (
    BadLines,
    Part,
    Piece,
    documents_in,
    is_dataset,
    is_packed,
    size_of,
    state_of,
)
from trainer.data.encode import reader_of
from trainer.data.indexed import IndexedWriter
from trainer.data.tokenizer import digest_of, load_tokenizer
from trainer.errors import UserError
from trainer.signals import ignore_stop_signals

MANIFEST = "manifest.json"
_PLAN = "plan.json"
_LOCK = "prepare.lock"
_KEYS = ("tokenizer", "sources", "text_field", "bad_lines", "skipped_lines", "skipped_examples", "shards")
_ASKED = ("sources", "text_field", "bad_lines")  # by which a manifest tells that it is what is asked for
_LEAST_SHARD_BYTES, _MOST_SHARD_BYTES, _SHARDS = 4 << 20, 256 << 20, 256


@dataclass(frozen=True)
class Job:
    """What a worker needs to know. ``template``: of conversations."""

    out: str
    tokenizer: str
    text_field: str
    skip_bad_lines: bool
    template: Template | None


def prepare(
    paths: Sequence[str],
    tokenizer: str,
    out: Path,
    n_workers: int,
    text_field: str = "text",
    skip_bad_lines: bool = False,
    kind: str | None = None,
    template: Template | None = None,
    wait: bool = False,
) -> dict:
    """Tokenize files into ``out``. Returns the manifest. Raises ``UserError``.

    ``kind``: as from ``documents_in`` (default: by each file's name). ``template``: of conversations, else text is read.
    ``wait`` while another writes to ``out``: else refuse.
    """
    shards = _shards(paths, kind)
    plan = {
        "format": 1,
        "sources": [{"path": path, "state": state_of(path)} for path in paths],
        "tokenizer": digest_of(tokenizer),
        "text_field": text_field,
        "bad_lines": "skip" if skip_bad_lines else "error",
        "shards": [[asdict(part) for part in parts] for parts in shards],
    }
    if (out / MANIFEST).is_file():  # which nobody changes any more
        return _finished(out, plan)
    _check_out(out)
    with _locked(out, wait):
        return _finished(out, plan) or _make(out, plan, shards, tokenizer, n_workers, template)


def _make(
    out: Path, plan: dict, shards: list[list[Part]], tokenizer: str, n_workers: int, template: Template | None
) -> dict:
    """What is left to do in ``out``. Returns the manifest. Raises ``UserError``."""
    loaded, paths = _tokenizer(tokenizer), [source["path"] for source in plan["sources"]]
    dtype = reader_of(loaded, plan["text_field"], template).dtype
    if not _begun(out):
        for path in out.glob("[0-9]*.*"):  # halves that a kill left, of other files perhaps
            path.unlink()
    _write_json(out / _PLAN, plan)
    job = Job(str(out), tokenizer, plan["text_field"], plan["bad_lines"] == "skip", template)
    left = [number for number in range(len(shards)) if not _report_file(out, number).is_file()]
    _run(job, shards, left, n_workers)
    for source in plan["sources"]:
        if not is_dataset(source["path"]) and not _is_as_before(source["path"], source["state"]):
            raise UserError(f"{source['path']} was changed while it was read: prepare it again, into a new folder")
    reports = [json.loads(_report_file(out, number).read_text()) for number in range(len(shards))]
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
    for path in [*(_report_file(out, number) for number in range(len(shards))), out / _PLAN]:
        path.unlink()
    return manifest


@contextlib.contextmanager
def _locked(out: Path, wait: bool) -> Iterator[None]:
    """While no other process writes to ``out``. The file goes once there is a manifest, which who waited for it will find."""
    with (out / _LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--out {out}: another prepare is writing there: wait for it, or name a new folder"
            ) from None
        yield
        if (out / MANIFEST).is_file():
            (out / _LOCK).unlink(missing_ok=True)


def _check_out(out: Path) -> None:
    """Make the folder. Raise ``UserError`` if it is somebody else's: a preparation under way has its lock at least."""
    out.mkdir(parents=True, exist_ok=True)
    names = {path.name for path in out.iterdir()}
    if names and names.isdisjoint((MANIFEST, _PLAN, _LOCK)) and not (out / MANIFEST).is_file():
        raise UserError(f"--out {out} is not empty, and holds no prepared data: name a new folder")


def check_shards(folder: Path, manifest: dict) -> None:
    """Raise ``UserError`` for the first file of prepared data that is not what was written; reads them all."""
    for shard in manifest["shards"]:
        for suffix, key in ((".bin", "crc32"), (".idx", "index_crc32")):
            path, crc32 = folder / f"{shard['name']}{suffix}", 0
            try:
                with path.open("rb") as file:
                    while content := file.read(1 << 24):
                        crc32 = zlib.crc32(content, crc32)
            except OSError as error:
                raise UserError(f"{path}: cannot be read: {error}: prepare it again, into a new folder") from None
            if crc32 != shard[key]:
                raise UserError(
                    f"{path} is not what was written (CRC-32 {crc32:#010x}, in {MANIFEST} {shard[key]:#010x}): prepare it again, into a new folder"
                )


def _shards(paths: Sequence[str], kind: str | None) -> list[list[Part]]:
    """What each shard holds, the same for any number of workers: a resumed preparation may have another."""
    sizes = {path: size_of(path) for path in paths}
    total = sum(sizes.values())
    shard_bytes = min(max(total // _SHARDS, _LEAST_SHARD_BYTES), _MOST_SHARD_BYTES)
    shards, room = [], 0
    for path, size in sizes.items():
        of_path = kind or documents_in(path)
        cut = of_path == "jsonl" and not is_packed(path)
        n = max(1, round(size / shard_bytes)) if cut else 1
        bounds = [size * number // n for number in range(n + 1)]
        parts = (
            [Part(path, of_path, *bounds[number : number + 2]) for number in range(n)] if cut else [Part(path, of_path)]
        )
        if 0 < size <= room:
            shards[-1] += parts
            room -= size
        else:
            shards += [[part] for part in parts]
            room = shard_bytes - size if size else 0  # a data set's is not known
    return shards


def _finished(out: Path, plan: dict) -> dict | None:
    """The manifest, if ``out`` holds just what is asked for. Raises ``UserError`` if it holds something else."""
    asked = {key: plan[key] for key in _ASKED} | {"digest": plan["tokenizer"]}
    if (out / MANIFEST).is_file():
        manifest = read_manifest(out)
        have = {key: manifest[key] for key in _ASKED} | {"digest": manifest["tokenizer"]["digest"]}
    elif _begun(out):
        manifest = None
        have, asked = json.loads((out / _PLAN).read_text()), plan
        if plan["bad_lines"] == "skip":  # what is complete has met no bad line, whatever was asked for then
            have["bad_lines"] = "skip"
    else:
        return None
    if have != asked:
        differs = next(key for key in asked if have.get(key) != asked[key])
        what = {"digest": "tokenizer"}.get(differs, differs)
        raise UserError(f"--out {out} holds a preparation with other {what}: name another folder, or remove that one")
    return manifest


def _is_as_before(path: str, state: str) -> bool:
    try:
        return state_of(path) == state
    except OSError:
        return False


def _begun(out: Path) -> bool:
    """Whether a part of a preparation is complete."""
    return (out / _PLAN).is_file() and any(out.glob("[0-9]*.json"))


def read_manifest(folder: Path) -> dict:
    """Raises ``UserError`` if it is not one."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != 1:
            raise ValueError(f"format {manifest['format']}")
        if missing := [key for key in _KEYS if key not in manifest]:
            raise ValueError(f"no {', '.join(missing)}")
        return manifest
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder / MANIFEST} is not the manifest of prepared data: {error}") from None


def _run(job: Job, shards: list[list[Part]], left: list[int], n_workers: int) -> None:
    """Do what is left, the largest first, with a bar over the bytes of text."""
    global _progress
    weights = {number: _n_bytes(shards[number]) for number in left}
    left = sorted(left, key=lambda number: -weights[number])
    context = multiprocessing.get_context("spawn")  # a fork would take the tokenizer's threads' locks along
    _progress = context.Value("q", 0)
    with tqdm(total=sum(weights.values()), unit="B", unit_scale=True, desc="prepare", disable=None) as bar:
        if n_workers == 1:
            for number in left:
                _make_shard(job, number, shards[number])
                bar.update(_progress.value - bar.n)
        elif left:
            _run_pool(job, {number: shards[number] for number in left}, n_workers, context, bar)


def _run_pool(job: Job, shards: dict[int, list[Part]], n_workers: int, context, bar: tqdm) -> None:
    n_processes = min(n_workers, len(shards))
    n_threads = n_workers // n_processes  # fewer files than cores: the rest of the cores within a file
    with _environment(TOKENIZERS_PARALLELISM=str(n_threads > 1).lower(), RAYON_NUM_THREADS=str(n_threads)):
        pool = concurrent.futures.ProcessPoolExecutor(n_processes, context, _begin_worker, (_progress,))
        waiting: set = set()
        try:
            waiting |= {pool.submit(_make_shard, job, number, parts) for number, parts in shards.items()}
            while waiting:
                finished, waiting = concurrent.futures.wait(waiting, timeout=0.2, return_when="FIRST_COMPLETED")
                bar.update(_progress.value - bar.n)
                for future in finished:
                    future.result()
        except BaseException as error:
            for process in (pool._processes or {}).values():
                process.kill()  # what is left is not worth waiting for
            if isinstance(error, concurrent.futures.process.BrokenProcessPool):
                raise UserError(
                    "a worker was killed, for want of memory perhaps: the same command goes on; fewer --workers take less"
                ) from None
            raise
        finally:
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
_tokenizer = functools.lru_cache(maxsize=1)(load_tokenizer)  # of this process


def _begin_worker(progress) -> None:
    global _progress
    _progress = progress
    ignore_stop_signals()  # Ctrl-C reaches all: the parent ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _make_shard(job: Job, number: int, parts: list[Part]) -> None:
    """Write one shard, and its report."""
    reader = reader_of(_tokenizer(job.tokenizer), job.text_field, job.template)
    bad = BadLines(skip=job.skip_bad_lines)
    out = Path(job.out)
    writer = IndexedWriter(out / f"{number:06d}", reader.dtype)
    try:
        documents = itertools.chain.from_iterable(reader.read(part, bad) for part in parts)
        for pieces, is_last in reader.encode(_counted(documents, _n_bytes(parts))):
            writer.add(pieces, is_last)
        n_documents = len(writer.lengths)
        if n_documents:
            writer.finish()
    finally:
        writer.discard()
    shard = {
        "name": writer.prefix.name, "documents": n_documents, "tokens": writer.n_tokens,
        "crc32": writer.crc32, "index_crc32": writer.index_crc32, "sources": list(dict.fromkeys(part.path for part in parts)),
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


def _n_bytes(parts: list[Part]) -> int:
    return sum(size_of(part.path) if part.last is None else part.last - part.first for part in parts)


def _report_file(out: Path, number: int) -> Path:
    return out / f"{number:06d}.json"


def _write_json(path: Path, content: dict) -> None:
    partial = path.with_suffix(".json.tmp")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
