"""Tokens of one source as one stream, wherever they lie: in memory, in indexed files, in a file of bare ids.

A piece has ``tokens`` (integers [n]), a ``name`` for messages, ``n_documents``, ``starts`` (where its documents begin) and
``document_at``. Loads no torch.
"""

import bisect
import functools
import itertools
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from trainer.data.indexed import windows_of
from trainer.errors import UserError

_AT_ONCE = 1 << 20  # tokens
_HEADER_IDS, _HEADER_MAGIC = 512, 20240520  # llm.c and modded-nanogpt put 256 int32 before the ids


class Piece(Protocol):
    tokens: np.ndarray
    name: str
    n_documents: int

    def starts(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Where documents ``first`` ... ``last - 1`` begin, in tokens: int64."""

    def document_at(self, token: int) -> int:
        """The first document that begins at ``token`` or behind it."""


class MemoryTokens:
    """Token ids in memory, and where documents begin: int64 [documents]."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, name: str = "data.path"):
        self.tokens, self.name = tokens, name
        self._starts = np.asarray(starts, dtype=np.int64)
        self.n_documents = len(self._starts)

    def starts(self, first: int = 0, last: int | None = None) -> np.ndarray:
        return self._starts[first:last]

    def document_at(self, token: int) -> int:
        return int(np.searchsorted(self._starts, token))


class BareTokens:
    """A file of nothing but ids, as nanoGPT writes them (uint16). A document ends behind each ``eos_id``."""

    def __init__(self, path: Path, eos_id: int, dtype=np.uint16):
        self.path, self.name, self.eos_id, self.dtype = path, str(path), eos_id, np.dtype(dtype)
        n_bytes = path.stat().st_size
        if n_bytes == 0 or n_bytes % self.dtype.itemsize:
            raise UserError(f"{path}: {n_bytes:,} bytes are not a row of {self.dtype} token ids")
        self.tokens = np.asarray(np.memmap(path, self.dtype, "r"))
        if len(self.tokens) > _HEADER_IDS and self.tokens[:2].view("<i4")[0] == _HEADER_MAGIC:
            if (version := self.tokens[2:4].view("<i4")[0]) != 1:
                raise UserError(f"{path}: its header says version {version}; version 1, of uint16 ids, is read")
            self.tokens = self.tokens[_HEADER_IDS:]
        head = self.tokens[:4096]
        if len(head) >= 64 and head[1::2].max() < 4 <= head[::2].max():
            raise UserError(
                f"{path}: every second id is near 0: these are ids of 32 bits or more, and {self.dtype} is read"
            )

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """Found by one pass over the file, at the first question."""
        found, step = [np.zeros(1, np.int64)], 1 << 24
        for first in range(0, len(self.tokens), step):
            found.append(np.flatnonzero(self.tokens[first : first + step] == self.eos_id) + first + 1)
        starts = np.concatenate(found)
        return starts[starts < len(self.tokens)]

    @property
    def n_documents(self) -> int:
        return len(self._starts)

    def starts(self, first: int = 0, last: int | None = None) -> np.ndarray:
        return self._starts[first:last]

    def document_at(self, token: int) -> int:
        return int(np.searchsorted(self._starts, token))

    def __reduce__(self):
        return BareTokens, (self.path, self.eos_id, self.dtype)


class TokenStream:
    """Pieces end to end. Token numbers count over all of them.

    ``n_ids``: ids must be 0 ... n_ids - 1; ``key``: what the user wrote the source under, for messages. ``masked``: of
    conversations, in which a token that is not learnt is stored as its complement, ``~id``.
    """

    def __init__(self, pieces: Sequence[Piece], n_ids: int = 1 << 62, key: str = "data.path", masked: bool = False):
        self.n_ids, self.key, self.masked = n_ids, key, masked
        self.pieces = [piece for piece in pieces if len(piece.tokens)]
        self._ends = list(itertools.accumulate(len(piece.tokens) for piece in self.pieces))

    def __len__(self) -> int:
        return self._ends[-1] if self.pieces else 0

    def tokens(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens ``first`` ... ``last - 1``, int64; and which of them are learnt, bool, None for all."""
        stored = self.read(first, last)
        return (_ids(stored), stored >= 0) if self.masked else (stored, None)

    def read(self, first: int, last: int) -> np.ndarray:
        """Tokens ``first`` ... ``last - 1`` as they are stored: int64."""
        parts = [piece.tokens[a:b] for piece, a, b, _ in self._cut(first, last)]
        return parts[0].astype(np.int64) if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])

    def starts_in(self, first: int, last: int) -> np.ndarray:
        """The tokens from ``first`` to ``last - 1`` with which a document begins: int64, in order."""
        found = [
            piece.starts(piece.document_at(a), piece.document_at(b)) + offset
            for piece, a, b, offset in self._cut(first, last)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    @property
    def n_documents(self) -> int:
        return sum(piece.n_documents for piece in self.pieces)

    def document_starts(self) -> np.ndarray:
        """Where every document begins: int64 [n_documents]. The length of each is the distance to the next."""
        starts = [piece.starts() + offset for piece, offset in zip(self.pieces, [0, *self._ends])]
        return np.concatenate(starts) if starts else np.zeros(0, np.int64)

    def name_of(self, document: int) -> str:
        """What a message calls a document: its number, from 1, in its file."""
        for piece in self.pieces:
            if document < piece.n_documents:
                return f"number {document + 1:,} of {piece.name}"
            document -= piece.n_documents
        raise IndexError(document)

    def document_of(self, token: int) -> int:
        """The number of the document that holds ``token``; -1 before the first."""
        number = 0
        for piece, end in zip(self.pieces, self._ends):
            if token < end:
                return number + piece.document_at(token - end + len(piece.tokens) + 1) - 1
            number += piece.n_documents
        raise IndexError(token)

    @functools.cached_property
    def identity(self) -> dict[str, int]:
        """What tells this stream from another, wherever it lies: number of tokens, and a checksum.

        The checksum covers all of a stream up to 2**20 tokens, of a longer one 1,024 pieces at even distances.
        """
        return {"tokens": len(self), "crc32": functools.reduce(_add_to_crc, self._sample(), 0)}

    def check_sample(self) -> None:
        """Raise ``UserError`` for an id that is out of range, as far as ``identity`` looks."""
        if not all(self.fits(_ids(window) if self.masked else window) for window in self._sample()):
            self.check_all()

    def fits(self, ids) -> bool:
        """Whether all of these ids (an array or a tensor) are in range."""
        return 0 in ids.shape or bool(0 <= ids.min() <= ids.max() < self.n_ids)

    def check_all(self) -> None:
        """Raise ``UserError`` for the first id that is out of range."""
        for piece in self.pieces:
            for first in range(0, len(piece.tokens), _AT_ONCE):
                window = piece.tokens[first : first + _AT_ONCE]
                window = _ids(window) if self.masked else window
                bad = np.flatnonzero((window < 0) | (window >= self.n_ids))
                if len(bad):
                    raise UserError(
                        f"{self.key}: {piece.name}, token {first + bad[0]:,}: id {window[bad[0]]}, but the model has vocab_size = "
                        f"{self.n_ids}: set model.vocab_size to more than the largest id, or use the data of another tokenizer"
                    )

    def _cut(self, first: int, last: int):
        """(piece, first and last token in it, offset of the piece) of each piece in a range."""
        number = bisect.bisect_right(self._ends, first)
        while first < last and number < len(self.pieces):
            piece = self.pieces[number]
            offset = self._ends[number] - len(piece.tokens)
            yield piece, first - offset, min(last - offset, len(piece.tokens)), offset
            first, number = self._ends[number], number + 1

    def _sample(self) -> Iterator[np.ndarray]:
        for window in windows_of(len(self)):
            yield self.read(window.start, window.stop)


def _ids(stored: np.ndarray) -> np.ndarray:
    return np.where(stored < 0, ~stored, stored)


def _add_to_crc(crc: int, tokens: np.ndarray) -> int:
    return zlib.crc32(tokens.astype(np.int32), crc)
