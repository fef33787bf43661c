"""Reading documents out of files, as a stream: a line, or a piece of a text, is all that is in memory. Loads no torch."""

import contextlib
import functools
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from trainer.data.hugging_face import entries, state_of_dataset
from trainer.data.remote import expand_remote, is_remote, open_remote, remote_size, state_of_remote
from trainer.data.tokenizer import ASSETS
from trainer.errors import UserError

BUNDLED_TEXT = ASSETS / "pride_and_prejudice.txt.gz"
PIECE_BYTES = 1 << 20  # of a text that is read at once
_BOM = b"\xef\xbb\xbf"
_BETWEEN_WORDS = re.compile(rb"[A-Za-z](?= [A-Za-z])")

# A document, or a piece of its text; and whether the document ends with it.
Piece = tuple[object, bool]


def documents_in(name: str) -> str:
    """How a file holds documents, by its name: "jsonl", "parquet", "text" or "hf"."""
    if is_dataset(name):
        return "hf"
    name = _without_query(name).removesuffix(".gz").removesuffix(".zst")
    if name.endswith((".jsonl", ".ndjson", ".json")):
        return "jsonl"
    return "parquet" if name.endswith(".parquet") else "text"


def is_packed(name: str) -> bool:
    return _without_query(name).endswith((".gz", ".zst"))


def _without_query(name: str) -> str:
    return urlsplit(name).path if name.startswith(("http://", "https://")) else name


def is_dataset(path: str) -> bool:
    """Whether it is a Hugging Face data set, by its name or by what its folder holds."""
    names = ("dataset_info.json", "dataset_dict.json")
    return path.startswith("hf://") or any((Path(path) / name).is_file() for name in names)


@dataclass
class BadLines:
    """What to do about a line that cannot be read: an error by default, or skip and count."""

    skip: bool = False
    n_skipped: int = 0
    examples: list[str] = field(default_factory=list)  # the first few

    def found(self, problem: str) -> None:
        if not self.skip:
            raise UserError(problem)
        self.n_skipped += 1
        if len(self.examples) < 3:
            self.examples.append(problem)


@dataclass(frozen=True)
class Part:
    """A file, or the lines of a plain JSONL file that begin at bytes ``first`` ... ``last - 1``."""

    path: str
    kind: str  # as from ``documents_in``
    first: int = 0
    last: int | None = None


def read_documents(
    part: Part, bad: BadLines, text_field: str = "text", convert: Callable[[dict], object] | None = None
) -> Iterator[Piece]:
    """The documents of a part in file order: a text file is one, a JSONL file one a line, a parquet file one a row.

    ``convert``: makes the document from a whole record, in place of its text field; raises ``ValueError``.
    Empty documents are left out. Raises ``UserError`` naming the file, and line and byte where there are any.
    """
    column = text_field if convert is None else None  # the others are not even read
    convert = convert or functools.partial(_text_of, text_field=text_field)
    try:
        if part.kind == "jsonl":
            yield from _lines(part, bad, convert)
        elif part.kind == "text":
            yield from _text(part.path, bad)
        else:
            rows = _parquet_rows if part.kind == "parquet" else entries
            for number, record in enumerate(rows(part.path, column), 1):
                try:
                    text = convert(record)
                except ValueError as error:
                    bad.found(f"{part.path}, row {number}: {error}")
                    text = ""
                if text:
                    yield text, True
    except UserError:
        raise
    except Exception as error:
        if not is_remote(part.path) and not isinstance(error, (OSError, EOFError, zlib.error)):
            raise
        raise UserError(f"{part.path}: cannot be read: {error}") from None  # each remote system has errors of its own


@contextlib.contextmanager
def _open(path: str) -> Iterator[io.BufferedIOBase]:
    """The file's bytes, unpacked."""
    name = _without_query(path)
    with open_remote(path) if is_remote(path) else Path(path).open("rb") as raw:
        if name.endswith(".gz"):
            yield gzip.GzipFile(fileobj=raw)
        elif name.endswith(".zst"):
            yield io.BufferedReader(_Pieces(_unpacked(raw, path)), 1 << 20)
        else:
            yield raw


def _unpacked(raw, path: str) -> Iterator[bytes]:
    """A .zst file, frame by frame. (The library's own reader takes a file that was cut for one that ends there.)"""
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: a .zst file needs the extra data: pip install 'meshloom[data]'") from None
    packed, frame = b"", None
    while packed := packed or raw.read(1 << 16):
        frame = frame or zstandard.ZstdDecompressor().decompressobj()
        try:
            yield frame.decompress(packed)
        except zstandard.ZstdError as error:
            raise OSError(error) from None
        packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file ends within a frame: a part of it is missing")


class _Pieces(io.RawIOBase):
    """Pieces of bytes, as a file."""

    def __init__(self, pieces: Iterator[bytes]):
        self._pieces, self._rest = pieces, b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._rest = memoryview(piece)
        n = min(len(buffer), len(self._rest))
        buffer[:n], self._rest = self._rest[:n], self._rest[n:]
        return n


def expand(pattern: str, key: str) -> list[str]:
    """The files that a name or pattern stands for, sorted. Raises ``UserError`` if there are none."""
    if is_dataset(pattern):
        found = [pattern]
    elif is_remote(pattern):
        found = expand_remote(pattern)
    elif Path(pattern).is_dir():
        raise UserError(f"{key} = {pattern!r} is a folder: name the files in it, as in {pattern.rstrip('/')}/*.jsonl")
    elif Path(pattern).exists():
        found = [pattern]
    else:
        found = sorted(name for name in glob.glob(pattern, recursive=True) if Path(name).is_file())
    if not found:
        raise UserError(f"{key} = {pattern!r}: no such file")
    return found


def size_of(path: str) -> int:
    """In bytes; 0 for a data set, whose size only its reading would tell."""
    if is_dataset(path):
        return 0
    return remote_size(path) if is_remote(path) else Path(path).stat().st_size


def state_of(path: str) -> str:
    """What changes when a file does, without reading it: its size and its time, or what a remote system calls its version."""
    if is_dataset(path):
        return state_of_dataset(path)
    if is_remote(path):
        return state_of_remote(path)
    state = Path(path).stat()
    return f"{state.st_size}/{state.st_mtime_ns}"


def _lines(part: Part, bad: BadLines, convert: Callable[[dict], object]) -> Iterator[Piece]:
    """Split at newlines alone: ``str.splitlines`` would also cut at U+2028 inside a string."""
    with _open(part.path) as file:
        offset, number = part.first, 1
        if part.first:  # a line belongs to the part in which it begins
            file.seek(part.first - 1)
            offset += len(file.readline()) - 1
            number = None  # counted only if it has to be told
        while part.last is None or offset < part.last:
            raw = file.readline()
            if not raw:
                return
            try:
                text = _document_of_line(raw, convert, is_first=offset == 0)
            except ValueError as error:
                line = number or _count_lines(part.path, offset)
                bad.found(f"{part.path}:{line}, byte {offset}: {error}")
                text = ""
            if text:
                yield text, True
            offset, number = offset + len(raw), number and number + 1


def _document_of_line(raw: bytes, convert: Callable[[dict], object], is_first: bool):
    """The document of one line of JSONL, "" for a blank line. Raises ``ValueError``."""
    raw = raw.removeprefix(_BOM) if is_first else raw
    if not raw.strip():
        return ""
    try:
        entry = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8 ({error.reason} at byte {error.start} of the line)") from None
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not one JSON object a line ({error})") from None
    return convert(entry)


def _text_of(record, text_field: str) -> str:
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f'expected {{"{text_field}": "..."}}')
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a UTF-16 pair
        raise ValueError("a lone surrogate, which is not a character") from None
    return text


def _count_lines(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at a byte."""
    number = 1
    with _open(path) as file:
        while offset > 0:
            content = file.read(min(offset, 1 << 24))
            number, offset = number + content.count(b"\n"), offset - len(content)
    return number


def _text(path: str, bad: BadLines) -> Iterator[Piece]:
    """A whole file as one document, in pieces that end with a line.

    Cut where a single newline stands between two characters that are no white space, or else a single space between two
    letters: there the usual pre-tokenizers (GPT-2, Llama 3, Qwen) cut as well, so that the tokens are those of the whole.
    Only 16 MiB without such a place are cut anywhere.
    """
    with _open(path) as file:
        content = file.read(PIECE_BYTES)
        first = offset = len(_BOM) if content.startswith(_BOM) else 0
        rest = content[offset:]
        while content:
            if cut := _last_cut(rest):
                yield _decoded(path, rest[:cut], offset, bad), False
                rest, offset = rest[cut:], offset + cut
            content = file.read(PIECE_BYTES)
            rest += content
    text = _decoded(path, rest, offset, bad)
    if offset > first or text.strip():
        yield text, True


def _last_cut(content: bytes) -> int:
    """Behind the last lone newline, or between two of the last words; 0 to wait for a place, if the content is not too long."""
    at = len(content) - 4  # a whole character behind it
    while (at := content.rfind(b"\n", 4, at)) > 0:
        before, behind = (content[a : a + 4].decode("utf-8", "ignore") for a in (at - 4, at + 1))
        if not before[-1:].isspace() and not behind[:1].isspace():
            return at + 1
    if places := [match.end() for match in _BETWEEN_WORDS.finditer(content, max(0, len(content) - (1 << 16)))]:
        return places[-1]
    if len(content) < 16 * PIECE_BYTES:
        return 0
    at = len(content) - 4
    while content[at] & 0xC0 == 0x80:  # within a character
        at -= 1
    return content.rfind(b" ", len(content) // 2) if b" " in content[len(content) // 2 :] else at


def _decoded(path: str, content: bytes, offset: int, bad: BadLines) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        bad.found(f"{path}, byte {offset + error.start}: not valid UTF-8 ({error.reason})")
        text = content.decode("utf-8", errors="ignore")
    if "\0" in text:
        bad.found(f"{path}, byte {offset + content.index(0)}: a zero byte: this is no text")
        text = text.replace("\0", "")
    return text


def _parquet_rows(path: str, text_field: str | None) -> Iterator[dict]:
    """Rows with one column, or with all."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path}: a parquet file needs the extra data: pip install 'meshloom[data]'") from None
    with open_remote(path) if is_remote(path) else Path(path).open("rb") as file:
        try:
            table = pyarrow.parquet.ParquetFile(file)
            if text_field is not None and text_field not in table.schema_arrow.names:
                raise UserError(f"{path}: no column {text_field!r} (it has {', '.join(table.schema_arrow.names)})")
            for batch in table.iter_batches(batch_size=256, columns=text_field and [text_field]):
                yield from batch.to_pylist()
        except pyarrow.ArrowException as error:
            raise UserError(f"{path}: cannot be read: {error}") from None
