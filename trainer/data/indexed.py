"""The indexed token files of Megatron: ``NAME.bin`` holds token ids end to end, ``NAME.idx`` where each sequence begins.

The format, version 1, little-endian, without padding::

    magic "MMIDIDX\\0\\0"   version u64 = 1    dtype code u8     n_sequences u64    n_entries u64
    lengths int32 [n_sequences]               tokens of each sequence
    pointers int64 [n_sequences]              where each begins in the .bin, in bytes
    document_indices int64 [n_entries]        the first sequence of each document, and at the end n_sequences

Loads no torch.
"""

import os
import struct
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from trainer.errors import UserError

MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}  # 6 and 7 are floats
_PIECES_AT_ONCE = 4096
_LOOKED_AT, _WINDOW = 1 << 20, 1 << 10
_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}


def dtype_for(n_ids: int) -> np.dtype:
    """The smallest dtype that holds ids 0 ... n_ids - 1 and that Megatron, too, writes: uint16 or int32."""
    return np.dtype(np.uint16 if n_ids <= 1 << 16 else np.int32)


class IndexedWriter:
    """Writes documents of one sequence each to ``PREFIX.bin`` and ``PREFIX.idx``: complete, or not there.

    Keeps 4 bytes a document in memory.
    """

    def __init__(self, prefix: Path, dtype: np.dtype):
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        self.lengths, self.n_tokens = array("i"), 0
        self._length = 0  # so far, of the document under way
        self.crc32 = self.index_crc32 = 0  # of the two files, as they are written
        self._unwritten: list[np.ndarray] = []
        self._bin = _beside(prefix, ".bin.tmp").open("wb", buffering=1 << 20)

    def add(self, pieces: Iterable[np.ndarray], is_last: bool = True) -> None:
        """Append token ids to the document under way, in pieces; the document ends with the last ones."""
        n_tokens = 0
        for piece in pieces:
            self._unwritten.append(piece)
            n_tokens += len(piece)
        self._length += n_tokens
        if self._length >= 1 << 31:
            raise UserError(
                f"{self.prefix}: a document of more than 2**31 - 1 tokens, which the index cannot hold: cut it"
            )
        self.n_tokens += n_tokens
        if is_last:
            self.lengths.append(self._length)
            self._length = 0
        if len(self._unwritten) >= _PIECES_AT_ONCE or n_tokens >= _PIECES_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        """Documents are short, and each of these calls has its price."""
        if self._unwritten:
            content = np.concatenate(self._unwritten).astype(self.dtype).tobytes()
            self.crc32 = zlib.crc32(content, self.crc32)
            self._bin.write(content)
            self._unwritten.clear()

    def finish(self) -> None:
        """Write the index, and give both files their names."""
        self._flush()
        _sync_and_close(self._bin)
        lengths = np.frombuffer(self.lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
        with _beside(self.prefix, ".idx.tmp").open("wb") as file:
            n = len(lengths)
            starts = np.concatenate(([0], ends))[:n]
            columns = (lengths, starts.astype(np.int64), np.arange(n + 1, dtype=np.int64))
            for part in (_HEADER.pack(MAGIC, 1, _CODES[self.dtype], n, n + 1), *(c.tobytes() for c in columns)):
                self.index_crc32 = zlib.crc32(part, self.index_crc32)
                file.write(part)
            _sync_and_close(file)
        for suffix in (".bin", ".idx"):
            os.replace(_beside(self.prefix, f"{suffix}.tmp"), _beside(self.prefix, suffix))

    def discard(self) -> None:
        """Leave nothing of what is not finished."""
        self._bin.close()
        for suffix in (".bin.tmp", ".idx.tmp"):
            _beside(self.prefix, suffix).unlink(missing_ok=True)


class IndexedTokens:
    """One ``.bin`` and its ``.idx``, memory-mapped: opening it reads no more than the header."""

    def __init__(self, prefix: Path):
        self.prefix, self.name = prefix, f"{prefix}.bin"
        self._open()

    def _open(self) -> None:
        index = _beside(self.prefix, ".idx")
        try:
            content = np.asarray(np.memmap(index, np.uint8, "r"))
            magic, version, code, n, n_entries = _HEADER.unpack(content[: _HEADER.size].tobytes())
            n_bytes = _beside(self.prefix, ".bin").stat().st_size
        except (OSError, ValueError, struct.error) as error:
            raise UserError(f"{index}: cannot be read as the index of {self.name}: {error}") from None
        if magic != MAGIC or version != 1:
            raise UserError(f"{index}: not a Megatron index of version 1 (it begins with {magic!r}, version {version})")
        if code not in _DTYPES:
            raise UserError(f"{index}: dtype code {code} is none of integers ({', '.join(map(str, _DTYPES))})")
        first, dtype = _HEADER.size, np.dtype(_DTYPES[code])
        # A multimodal index has a byte a sequence behind it.
        if n < 1 or n_entries < 1 or len(content) - (first + 12 * n + 8 * n_entries) not in (0, n):
            raise UserError(f"{index}: {len(content):,} bytes do not hold {n:,} sequences and {n_entries:,} documents")
        lengths = content[first : first + 4 * n].view("<i4")
        self._pointers = content[first + 4 * n : first + 12 * n].view("<i8")
        self._documents = content[first + 12 * n : first + 12 * n + 8 * n_entries].view("<i8")
        if int(self._pointers[-1]) + int(lengths[-1]) * dtype.itemsize != n_bytes:
            raise UserError(
                f"{self.name}: {n_bytes:,} bytes are not what {index} describes: one of the two is of another file"
            )
        _check_index(index, lengths, self._pointers, self._documents, dtype.itemsize)
        self.tokens = np.asarray(np.memmap(self.name, dtype, "r")) if n_bytes else np.zeros(0, dtype)
        # The last entry is the end; some writers leave it out, and documents without a sequence stand there as well.
        self.n_documents = bisect_left(self._documents, n)  # numpy's own would copy them all, for they are not aligned

    def starts(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Where documents ``first`` ... ``last - 1`` begin, in tokens: int64."""
        return (
            self._pointers[self._documents[first : self.n_documents if last is None else last]] // self.tokens.itemsize
        )

    def document_at(self, token: int) -> int:
        """The first document that begins at ``token`` or behind it; O(log sequences)."""
        return bisect_left(self._documents, bisect_left(self._pointers, token * self.tokens.itemsize))

    def __reduce__(self):  # to a loader worker goes the name, not the content
        return IndexedTokens, (self.prefix,)


def _check_index(index: Path, lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray, itemsize: int) -> None:
    """Raise ``UserError`` unless sequences lie end to end and documents begin with them, in order.

    Looks at all of up to 2**20 entries, of more at 1,024 places: opening a file stays quick.
    """
    fault = None
    if pointers[0] != 0 or documents[0] != 0 or documents[-1] > len(lengths):
        fault = f"its documents are not sequences 0 to {len(lengths) - 1:,}"
    for part in windows_of(len(documents)):
        if (np.diff(documents[part]) < 0).any():
            fault = "its documents are not in order"
    for part in windows_of(len(lengths)):
        ends = pointers[part] + lengths[part].astype(np.int64) * itemsize
        if lengths[part].min() < 0 or (pointers[part][1:] != ends[:-1]).any():
            fault = "its sequences do not lie one behind another"
    if fault:
        raise UserError(f"{index} is damaged, or of a kind that is not read: {fault}")


def windows_of(n: int) -> Iterator[slice]:
    """All of up to 2**20 entries, of more 1,024 windows of as many at even distances."""
    if n <= _LOOKED_AT:
        yield slice(0, n)
        return
    n_windows = _LOOKED_AT // _WINDOW
    for number in range(n_windows):
        first = (n - _WINDOW) * number // (n_windows - 1)
        yield slice(first, first + _WINDOW)


def _beside(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)


def _sync_and_close(file) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
