"""Rows that know their documents: every token of an epoch once, whole documents, and no label across a border."""

import json

import numpy as np
import pytest
import torch

from tests.tiny import tiny_config
from trainer.config_rules import resolve_config
from trainer.data.loader import batches_in_order, make_loader
from trainer.data.mixture import Mixture
from trainer.data.packing import IsolatedRows, PackedRows, best_fit, pack, rows_of
from trainer.data.rows import IGNORED, TokenRows
from trainer.data.samples import Samples, load_validation_rows
from trainer.data.stream import MemoryTokens, TokenStream
from trainer.errors import UserError

EOS = 0


def documents(lengths) -> tuple[np.ndarray, np.ndarray]:
    """A stream in which every token but the EOS is another, and where its documents start."""
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    stream = np.arange(1, starts[-1] + 1, dtype=np.int32)
    stream[starts[1:] - 1] = EOS
    return stream, starts


def of(stream: np.ndarray, starts: np.ndarray) -> TokenStream:
    return TokenStream([MemoryTokens(stream, starts[:-1])])


def drawn_lengths(seed: int, seq_len: int) -> np.ndarray:
    """From short to many rows long, EOS included."""
    generator = np.random.default_rng(seed)
    return np.concatenate((generator.integers(2, seq_len + 3, 40), generator.geometric(1 / (2 * seq_len), 20) + 1))


CASES = [(seed, seq_len) for seed in range(4) for seq_len in (1, 2, 7, 32)]


@pytest.mark.parametrize("seed, seq_len", CASES)
def test_b65_b69_isolated_rows_are_the_plain_ones_with_borders(seed, seq_len):
    stream, starts = documents(drawn_lengths(seed, seq_len))
    plain, isolated = TokenRows(of(stream, starts), seq_len), IsolatedRows(of(stream, starts), seq_len)
    assert len(plain) == len(isolated) and plain.identity == isolated.identity
    first_tokens, seen = set(starts.tolist()), []
    for index in range(len(plain)):
        row, other = ({key: value.tolist() for key, value in rows[index].items()} for rows in (isolated, plain))
        assert row["tokens"] == other["tokens"]
        for place in range(seq_len):
            at = index * seq_len + place
            starts_here = at in first_tokens or place == 0
            assert row["positions"][place] == (0 if starts_here else row["positions"][place - 1] + 1)
            crosses = at + 1 in first_tokens
            assert row["labels"][place] == (IGNORED if crosses else other["labels"][place])
            assert not crosses or row["tokens"][place] == EOS
            seen.append(at)
    assert seen == list(range(len(plain) * seq_len)) and len(stream) - 1 - len(seen) < seq_len


@pytest.mark.parametrize("seed, seq_len", CASES)
def test_b65_b69_packed_rows_hold_every_label_once_and_whole_documents(seed, seq_len):
    stream, starts = documents(drawn_lengths(seed, seq_len))
    rows, pieces = PackedRows(of(stream, starts), seq_len), []
    n_labels = 0
    for index in range(len(rows)):
        row = rows[index]
        assert all(value.shape == (seq_len,) and value.dtype == torch.int64 for value in row.values())
        begins = [*(row["positions"] == 0).nonzero().flatten().tolist(), seq_len]
        for begin, end in zip(begins, begins[1:]):
            tokens, labels = row["tokens"][begin:end].tolist(), row["labels"][begin:end].tolist()
            assert row["positions"][begin:end].tolist() == list(range(end - begin))
            if set(labels) == {IGNORED}:  # padding
                assert end == seq_len and set(tokens) == {0}
                continue
            assert labels[:-1] == tokens[1:] and EOS not in tokens and IGNORED not in labels
            pieces.append((tokens[0] - 1, [*tokens, labels[-1]]))
            n_labels += len(labels)
    assert n_labels == rows.packing.n_inputs.sum() == len(stream) - len(starts) + 1  # all but the first tokens
    assert rows.share_filled == n_labels / (len(rows) * seq_len)
    pieces.sort()
    whole = [stream[first : first + len(tokens)].tolist() for first, tokens in pieces]
    assert whole == [tokens for _, tokens in pieces]
    cut = sum(-(-(length - 1) // seq_len) for length in np.diff(starts))
    assert len(pieces) == cut  # no more pieces than rows make necessary


def plain_best_fit(sizes, capacity):
    """One item after another, every bin looked at: room left in each bin, sorted."""
    rooms = []
    for size in sorted(sizes, reverse=True):
        fitting = [room for room in rooms if room >= size]
        room = min(fitting, default=capacity)
        if fitting:
            rooms.remove(room)
        rooms.append(room - size)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(20))
def test_many_at_once_is_best_fit_decreasing(seed):
    generator = np.random.default_rng(seed)
    capacity = int(generator.integers(1, 60))
    sizes = generator.integers(1, generator.integers(1, capacity + 1), 300, endpoint=True)
    bins = best_fit(sizes, capacity)
    filled = np.bincount(bins, weights=sizes)
    assert filled.max() <= capacity and filled.min() > 0
    assert sorted(capacity - filled) == plain_best_fit(sizes, capacity)
    assert (bins == best_fit(sizes, capacity)).all()


def test_packing_many_documents():
    """Its efficiency is what best-fit decreasing is known for; the index is what it says, an entry a piece."""
    lengths = np.random.default_rng(0).lognormal(6, 1.2, 200_000).astype(np.int64) + 2
    starts = np.concatenate(([0], lengths.cumsum()))
    packing = pack(starts, 2048)
    n_rows = len(packing.row_starts) - 1
    assert packing.n_inputs.sum() == (lengths - 1).sum()
    assert packing.n_inputs.sum() / (n_rows * 2048) > 0.999
    row_of = np.repeat(np.arange(n_rows), np.diff(packing.row_starts))
    assert np.bincount(row_of, weights=packing.n_inputs).max() <= 2048
    first_of_row = packing.first[packing.row_starts[:-1]]
    assert (np.diff(first_of_row) > 0).all()  # rows are in the order of their first documents


def test_what_has_no_pair_of_tokens_is_nothing():
    stream, starts = documents([1, 1])
    with pytest.raises(UserError, match="my.key has no document of two tokens or more"):
        PackedRows(of(stream, starts), 8, "my.key")
    rows = PackedRows(of(*documents([1, 3, 1])), 8)
    assert len(rows) == 1 and rows[0]["labels"].tolist() == [3, EOS] + [IGNORED] * 6


def jsonl(tmp_path, n=50):
    path = tmp_path / "documents.jsonl"
    texts = [chr(97 + i % 26) * (1 + i * 7 % 45) for i in range(n)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ["", *texts, ""]))
    return str(path), texts


@pytest.mark.parametrize(
    "packing, isolated, kind",
    [("concatenate", False, TokenRows), ("concatenate", True, IsolatedRows), ("best_fit", True, PackedRows)],
)
def test_b67_rows_of_a_file_are_as_the_config_says(tmp_path, packing, isolated, kind):
    path, texts = jsonl(tmp_path)
    config = tiny_config(data__path=path, data__packing=f'"{packing}"', data__isolate_documents=isolated)
    rows = load_validation_rows(config, vocab_size=300)[""]
    assert type(rows) is kind and rows.identity["tokens"] == sum(len(text) + 1 for text in texts)  # empty ones add none
    if kind is PackedRows:  # each document's letters, and its end
        seen = [bytes(rows[i]["tokens"].tolist()).replace(b"\0", b"") for i in range(len(rows))]
        assert sorted(b"".join(seen)) == sorted("".join(texts).encode())


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_b26_b30_b32_batches_depend_on_the_step_alone(tmp_path, packing):
    """At any dp, from any step on, with workers or without, over the end of an epoch; and in file order."""
    config = tiny_config(data__packing=f'"{packing}"', data__isolate_documents=True, data__workers=0)
    rows = rows_of(config.data, of(*documents(drawn_lengths(0, 16))), 16)
    samples = Samples({"": rows}, Mixture([(0, [1])]), seed=0, shuffle=True)
    whole = iter(make_loader(samples, config.data, 8, 0, 1, first_step=1))
    expected = [next(whole) for _ in range(2 * len(rows) // 8 + 2)]
    for dp, first_step, workers in ((2, 1, 0), (4, 3, 0), (2, 5, 2)):
        data = config.data.model_copy(update={"workers": workers})
        shares = [iter(make_loader(samples, data, 8, index, dp, first_step)) for index in range(dp)]
        for want in expected[first_step - 1 :]:
            parts = [next(share) for share in shares]
            for key in ("tokens", "labels", "positions"):
                assert torch.equal(torch.cat([part[key] for part in parts]), want[key])
    in_order = [list(batches_in_order(rows, 8, index, 2)) for index in range(2)]
    labels = torch.cat([torch.cat((a[1], b[1])) for a, b in zip(*in_order)])
    assert torch.equal(labels[: len(rows)], torch.stack([rows[i]["labels"] for i in range(len(rows))]))
    assert (labels[len(rows) :] == IGNORED).all()


def test_best_fit_needs_isolation():
    with pytest.raises(UserError, match='data.packing = "best_fit" needs data.isolate_documents = true'):
        resolve_config(tiny_config(data__packing='"best_fit"'), 1)
