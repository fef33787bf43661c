"""Reading documents out of files."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from trainer.data.tokenizer import ASSETS
from trainer.errors import UserError

BUNDLED_TEXT = ASSETS / "pride_and_prejudice.txt.gz"


def source_of(path: str) -> str:
    """What a file holds, by its name: "jsonl" or "text"."""
    return "jsonl" if path.removesuffix(".gz").endswith(".jsonl") else "text"


def read_documents(source: str, path: str | None, key: str = "data.path") -> Iterator[str]:
    """The documents of a data source in file order: a text file is one, a JSONL file one a line.

    Empty documents are left out. Raises ``UserError`` naming ``key`` and the file, and the line where there is one.
    """
    file = check_source(source, path, key)
    content = _read_bytes(file, key)
    if not content.strip():
        raise UserError(f"{key} = {str(file)!r}: the file is empty")
    documents = _json_lines(file, content) if source == "jsonl" else [_decode(file, content)]
    return (document for document in documents if document)


def check_source(source: str, path: str | None, key: str = "data.path") -> Path:
    """The file of a data source, without reading it. Raises ``UserError`` if it is missing or empty."""
    file = BUNDLED_TEXT if source == "bundled" else Path(path)
    if not file.is_file():
        raise UserError(f"{key} = {str(file)!r}: {'is not a file' if file.exists() else 'no such file'}")
    if file.stat().st_size == 0:
        raise UserError(f"{key} = {str(file)!r}: the file is empty")
    return file


def _read_bytes(file: Path, key: str) -> bytes:
    try:
        return gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{key} = {str(file)!r}: cannot be read: {error}") from None


def _decode(file: Path, content: bytes, line: int | None = None) -> str:
    try:
        return content.decode("utf-8-sig" if line in (None, 1) else "utf-8")
    except UnicodeDecodeError as error:
        where = f"{file}:{line}" if line else f"{file}, byte {error.start}"
        raise UserError(f"{where}: not valid UTF-8 ({error.reason})") from None


def _json_lines(file: Path, content: bytes) -> Iterator[str]:
    # Split on newlines alone: str.splitlines would also cut at U+2028 inside a string.
    for number, raw in enumerate(content.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            entry = json.loads(_decode(file, raw, number))
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{file}:{number}: not one JSON object a line ({error})") from None
        text = entry.get("text") if isinstance(entry, dict) else None
        if not isinstance(text, str):
            raise UserError(f'{file}:{number}: expected {{"text": "..."}}')
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # JSON can spell half a UTF-16 pair
            raise UserError(f"{file}:{number}: a lone surrogate, which is not a character")
        yield text
