"""Rows that know their documents: isolated from one another, or packed whole.

A document's last token is its end-of-text id.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.data import Dataset

from trainer.config import Data
from trainer.data.rows import IGNORED, Rows, TokenRows, labels_of, tokens_of
from trainer.data.stream import TokenStream
from trainer.errors import UserError


def rows_of(data: Data, stream: TokenStream, seq_len: int, key: str = "data.path") -> Rows:
    """The rows of documents as ``[data]`` wants them. Raises ``UserError``, with ``key``, if there is not one."""
    if data.packing == "best_fit":
        return PackedRows(stream, seq_len, key, data.too_long if stream.masked else "cut")
    if data.isolate_documents:
        return IsolatedRows(stream, seq_len, key)
    return TokenRows(stream, seq_len, key)


class IsolatedRows(TokenRows):
    """The same rows, token for token, with positions that restart at each document.

    A document that was cut starts again in the next row. The first token of a document is nobody's label: the label
    at the end-of-text token before it is IGNORED.
    """

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        first = row * self.seq_len
        tokens, _ = tokens_of(self.stream, first, self.seq_len + 1)
        is_start = torch.zeros(self.seq_len + 1, dtype=torch.bool)
        is_start[torch.from_numpy(self.stream.starts_in(first, first + self.seq_len + 1) - first)] = True
        labels = labels_of(tokens, trained=~is_start)
        return {"tokens": tokens[:-1], "labels": labels, "positions": positions_after(is_start[:-1])}


def positions_after(is_start: torch.Tensor) -> torch.Tensor:
    """Each token's distance from the last start at or before it, or from the row's: int64 [S] of bool [S]."""
    index = torch.arange(len(is_start))
    return index - torch.where(is_start, index, 0).cummax(0).values


@dataclass(frozen=True)
class Packing:
    """Pieces of documents, and the rows that they are in.

    first, n_inputs: [pieces] where the inputs of a piece begin in the stream, and how many there are.
    row_starts: [rows + 1] the pieces of row r are ``row_starts[r]`` up to ``row_starts[r + 1]``.
    """

    first: np.ndarray
    n_inputs: np.ndarray
    row_starts: np.ndarray


def inputs_of(starts: np.ndarray) -> np.ndarray:
    """Inputs of each document, int64 [n]: one less than its tokens. ``starts``: of each, and the end of the last."""
    return np.maximum(np.diff(starts) - 1, 0)


def pack(starts: np.ndarray, seq_len: int, n_inputs: np.ndarray | None = None) -> Packing:
    """Put whole documents into rows of ``seq_len`` inputs.

    A document of n tokens has n - 1 inputs and as many labels, unless ``n_inputs`` says how many of them are wanted. What
    is longer than a row is cut into pieces of ``seq_len`` inputs, and the rest is one more piece. Rows are in the order of
    their first documents.
    """
    n_inputs = inputs_of(starts) if n_inputs is None else n_inputs
    n_pieces = -(-n_inputs // seq_len)
    number = np.arange(n_pieces.sum()) - np.repeat(n_pieces.cumsum() - n_pieces, n_pieces)  # of a piece in its document
    first = np.repeat(starts[:-1], n_pieces) + number * seq_len
    length = np.minimum(np.repeat(n_inputs, n_pieces) - number * seq_len, seq_len)
    rows = best_fit(length, seq_len)
    _, first_piece = np.unique(rows, return_index=True)
    rank = np.empty_like(first_piece)
    rank[np.argsort(first_piece)] = np.arange(len(first_piece))
    rows = rank[rows]
    order = np.argsort(rows, kind="stable")
    row_starts = np.zeros(len(rank) + 1, dtype=np.int64)
    row_starts[1:] = np.bincount(rows, minlength=len(rank)).cumsum()
    return Packing(first[order], length[order].astype(np.int32), row_starts)


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Best-fit decreasing (Johnson 1973): the bin of each item, int64 [n]. Sizes are from 1 to ``capacity``.

    From the largest item on, each goes where the least room is left that suffices, or into a new bin. A bin
    that takes one item has the least room of all then, and so takes as many of its size as fit: items of one size are
    placed many at once, bins with the same room in one go.
    """
    bins = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-sizes, kind="stable")
    distinct, begins = np.unique(-sizes[order], return_index=True)
    rooms: list[int] = []  # what is left in any bin, sorted
    chunks: dict[int, list[np.ndarray]] = {}  # room -> bins that have so much
    n_bins = 0

    def put(room: int, some: np.ndarray) -> None:
        if room == 0 or not len(some):
            return
        if room not in chunks:
            insort(rooms, room)
            chunks[room] = []
        chunks[room].append(some)

    for size, items in zip((-distinct).tolist(), np.split(order, begins[1:])):
        while len(items):
            place = bisect_left(rooms, size)
            if place == len(rooms):
                room, n_new = capacity, -(-len(items) // (capacity // size))
                some = np.arange(n_bins, n_bins + n_new)
                n_bins += n_new
            else:
                room = rooms[place]
                some = chunks[room].pop()
                if not chunks[room]:
                    del chunks[room], rooms[place]
            each = room // size
            now, items = items[: each * len(some)], items[each * len(some) :]
            bins[now] = np.repeat(some, each)[: len(now)]
            n_full, rest = divmod(len(now), each)
            put(room - each * size, some[:n_full])
            put(room - rest * size, some[n_full : n_full + (rest > 0)])
            put(room, some[n_full + (rest > 0) :])
    return bins


class PackedRows(Dataset):
    """Rows of whole documents, each at positions of its own: every token but a document's first is a label once.

    What is left of a row is 0, IGNORED and a document of its own. ``too_long``: what becomes of a document that is longer
    than a row: "cut" into several, "truncate", "skip" or "error".
    """

    def __init__(self, stream: TokenStream, seq_len: int, key: str = "data.path", too_long: str = "cut"):
        self.stream = stream
        self.seq_len = seq_len
        starts = np.append(stream.document_starts(), len(stream))
        n_inputs, self.warnings = inputs_of(starts), []
        if too_long != "cut" and (n_inputs > seq_len).any():
            self.warnings = [self._shorten(starts, n_inputs, key, too_long)]
        self.packing = pack(starts, seq_len, n_inputs)
        if not len(self):
            raise UserError(
                f"the text of {key} has no document of two tokens or more: use a longer text", *self.warnings
            )

    def _shorten(self, starts: np.ndarray, n_inputs: np.ndarray, key: str, too_long: str) -> str:
        """Change ``n_inputs`` of documents that do not fit. Returns what is to be said of them. Raises ``UserError``."""
        found = np.flatnonzero(n_inputs > self.seq_len)
        shown = ", ".join(
            f"{self.stream.name_of(document)} ({n_inputs[document] + 1:,} tokens)" for document in found[:3]
        )
        said = (
            f"{key}: {len(found):,} of {len(n_inputs):,} conversations are longer than training.seq_len + 1 = "
            f"{self.seq_len + 1} tokens, such as {shown}"
        )
        if too_long == "error":
            raise UserError(
                f'{said}: use training.seq_len = {n_inputs.max()} or more, or data.too_long = "skip" or "truncate"'
            )
        n_inputs[found] = self.seq_len if too_long == "truncate" else 0
        if too_long == "skip":
            return f"{said}: left out"
        unlearnt = [
            document for document in found.tolist()
            if not self.stream.tokens(int(starts[document]) + 1, int(starts[document]) + self.seq_len + 1)[1].any()
        ]  # fmt: skip
        n_inputs[unlearnt] = 0
        left_out = f"; {len(unlearnt):,} of them left out, of which nothing would be learnt" if unlearnt else ""
        return f"{said}: truncated{left_out}"

    @property
    def identity(self) -> dict[str, int]:
        """As of ``TokenRows``."""
        return self.stream.identity

    @property
    def share_filled(self) -> float:
        """How many of the rows' positions hold a token."""
        return float(self.packing.n_inputs.sum()) / (len(self) * self.seq_len)

    def __len__(self) -> int:
        return len(self.packing.row_starts) - 1

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        packing, filled = self.packing, 0
        tokens = torch.zeros(self.seq_len, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED)
        is_start = torch.zeros_like(tokens, dtype=torch.bool)
        for piece in range(packing.row_starts[row], packing.row_starts[row + 1]):
            first, n_inputs = packing.first[piece], packing.n_inputs[piece]
            of_piece, trained = tokens_of(self.stream, int(first), int(n_inputs) + 1)
            place = slice(filled, filled + int(n_inputs))
            tokens[place], labels[place] = of_piece[:-1], labels_of(of_piece, trained)
            is_start[filled] = True
            filled = place.stop
        is_start[filled:][:1] = True
        return {"tokens": tokens, "labels": labels, "positions": positions_after(is_start)}

    def documents(self, row: int) -> list[tuple[int, int]]:
        """As of ``Rows``."""
        found, filled = [], 0
        for piece in range(self.packing.row_starts[row], self.packing.row_starts[row + 1]):
            found.append((filled, self.stream.document_of(int(self.packing.first[piece]))))
            filled += int(self.packing.n_inputs[piece])
        return found if filled == self.seq_len else [*found, (filled, -1)]
