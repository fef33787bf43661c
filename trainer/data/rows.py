"""A stream of tokens cut into training rows."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch.utils.data import Dataset

from trainer.data.stream import TokenStream
from trainer.errors import UserError

IGNORED = -100  # a label that does not count; torch's default ignore_index


class Rows(Protocol):
    """Training rows. A row is a dict of int64 [S]: "tokens", "labels", and "positions" where documents are isolated."""

    stream: TokenStream
    seq_len: int
    warnings: list[str]  # about documents that are not in them whole

    @property
    def identity(self) -> dict[str, int]: ...

    @property
    def share_filled(self) -> float: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]: ...

    def documents(self, row: int) -> list[tuple[int, int]]:
        """(place in the row, number of the document) of each document in a row's S inputs, in order; number -1: padding."""


def model_inputs(entry: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a step takes of a row or a batch of rows: tokens, labels, and positions if there are any."""
    return tuple(entry[key] for key in ("tokens", "labels", "positions") if key in entry)


def labels_of(tokens: torch.Tensor, trained: torch.Tensor | None = None) -> torch.Tensor:
    """Labels int64 [S] of S + 1 tokens: ``label[i] = token[i + 1]``, IGNORED where that token is not trained.

    ``trained`` bool [S + 1] says which tokens the model should learn to produce: with a prompt of p
    tokens masked, label p - 1 (the first answer token) is the first that counts.
    """
    labels = tokens[1:].clone()
    if trained is not None:
        labels[~trained[1:]] = IGNORED
    return labels


def tokens_of(stream: TokenStream, first: int, n: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``TokenStream.tokens`` from ``first`` on: int64 [n], and bool [n] or None."""
    tokens, trained = stream.tokens(first, first + n)
    return torch.from_numpy(tokens), None if trained is None else torch.from_numpy(trained)


class TokenRows(Dataset):
    """Row i holds tokens [i S, i S + S] of the stream: S inputs and S labels.

    Neighbouring rows share one token, as the last label of one and the first input of the next, so every
    token but the first is a label exactly once. A last, shorter row is dropped.
    """

    def __init__(self, stream: TokenStream, seq_len: int, key: str = "data.path"):
        self.stream = stream
        self.seq_len = seq_len
        self.warnings: list[str] = []
        self.n_rows = (len(stream) - 1) // seq_len
        if self.n_rows < 1:
            raise UserError(
                f"the text of {key} has {len(stream)} tokens, fewer than one row of training.seq_len + 1 = {seq_len + 1}: "
                "use a longer text or a shorter seq_len"
            )

    @property
    def identity(self) -> dict[str, int]:
        """What tells this data from other data."""
        return self.stream.identity

    @property
    def share_filled(self) -> float:
        """How many of the rows' positions hold a token."""
        return 1.0

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        first = row * self.seq_len
        tokens, _ = tokens_of(self.stream, first, self.seq_len + 1)
        return {"tokens": tokens[:-1], "labels": labels_of(tokens)}

    def documents(self, row: int) -> list[tuple[int, int]]:
        """(place in the row, number of the document) of each document in a row's S inputs, in order."""
        first = row * self.seq_len
        starts = self.stream.starts_in(first + 1, first + self.seq_len)
        return [(place, self.stream.document_of(first + place)) for place in [0, *(starts - first).tolist()]]
