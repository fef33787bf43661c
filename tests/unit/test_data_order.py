"""Which rows a step holds: the shuffle, the mixture of sources, the shares of data ranks, the end of the data."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from tests.tiny import tiny_config
from tests.unit.test_data import stream_of
from trainer.config import Config
from trainer.data import order
from trainer.data.loader import StepSampler, make_loader
from trainer.data.mixture import Mixture, mixture_of, pattern_of
from trainer.data.order import Bijection, RowOrder
from trainer.data.rows import TokenRows
from trainer.data.samples import Samples


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 13, 255, 256, 257, 1000])
def test_a_bijection_reaches_every_value_once(n):
    assert sorted(map(Bijection.of(n, "a"), range(n))) == list(range(n))


def test_bijections_are_spread_over_all_permutations():
    """Of 4 values there are 24; 200 of each are expected, give or take 14."""
    seen = Counter(tuple(map(Bijection.of(4, str(name)), range(4))) for name in range(4800))
    assert len(seen) == 24 and min(seen.values()) > 130 and max(seen.values()) < 270


@pytest.mark.parametrize("n_rows", [1, 2, 11, 12, 13, 47, 48, 49, 50, 997])
def test_an_epoch_holds_every_row_once_in_a_new_order(monkeypatch, n_rows):
    """Blocks of 4 rows, windows of 3 blocks: ragged ends of both."""
    monkeypatch.setattr(order, "BLOCK_ROWS", 4)
    monkeypatch.setattr(order, "WINDOW_BLOCKS", 3)
    rows = RowOrder(n_rows, seed=1000 + n_rows, shuffle=True)
    epochs = [rows.epoch(number) for number in range(5)]
    assert all(sorted(epoch) == list(range(n_rows)) for epoch in epochs)
    if n_rows > 10:
        assert len({tuple(epoch) for epoch in epochs}) == 5
    if n_rows == 997:  # a window of 12 samples is 3 stretches of rows
        for first in range(0, 996, 12):
            window = set(epochs[0][first : first + 12])
            assert sum((row + 1) % n_rows not in window for row in window) <= 3
    assert RowOrder(n_rows, seed=0, shuffle=False).epoch(3) == list(range(n_rows))


def test_a_small_data_set_is_shuffled_whole():
    epoch = np.array(RowOrder(5349, seed=0, shuffle=True).epoch(0))
    assert abs(np.corrcoef(epoch, np.arange(5349))[0, 1]) < 0.05
    assert abs(np.corrcoef(epoch[1:], epoch[:-1])[0, 1]) < 0.05
    assert np.abs(epoch[:16].mean() - 2674) < 1500  # a batch comes from all over


def test_sources_have_orders_of_their_own():
    a, b = (RowOrder(100, seed=0, shuffle=True, name=name).epoch(0) for name in "ab")
    assert a != b


@pytest.mark.parametrize("weights", [(7, 3), (0.7, 0.3), (1, 1, 1), (5, 0, 1), (0.335, 0.6, 0.065), (97, 2, 1), (1,)])
def test_every_window_has_the_shares(weights):
    pattern = pattern_of(weights)
    shares, n = np.array(weights) / sum(weights), len(pattern)
    assert np.bincount(pattern, minlength=len(weights)) / n == pytest.approx(shares)
    twice = np.array(pattern * 2)
    for length in range(1, n + 1):  # wherever it begins, no source is a sample and a half away from its share
        for first in range(0, n, max(1, n // 50)):
            counts = np.bincount(twice[first : first + length], minlength=len(weights))
            assert np.abs(counts - length * shares).max() < 1.5


def test_shares_that_would_take_a_long_pattern_are_refused_with_some_that_work():
    with pytest.raises(ValueError, match=r"at most 10,000\); use \[123, 877\]"):
        pattern_of([123_457, 876_543])
    assert len(pattern_of([123, 877])) == 1000


def test_a_mixture_counts_each_source_by_itself_over_a_change_of_weights():
    mixture = Mixture([(0, [7, 3, 0]), (24, [1, 1, 2]), (40, [0, 1, 0])])
    counts = [0, 0, 0]
    for sample in range(60):
        assert mixture.taken(sample).tolist() == counts
        source, index = mixture.place(sample)
        assert index == counts[source]
        counts[source] += 1
    assert counts[1:] == [7 + 4 + 20, 8] and counts[0] == 17 + 4
    assert mixture.place(10**15) == (1, 10**15 - 40 + 11)


def test_a_mixture_by_epochs_reads_each_source_so_often():
    """Twice the small one while the large one is read once; and data.epochs = 2 ends there."""
    sources = {"large": {"path": "l", "epochs": 1.0}, "small": {"path": "s", "epochs": 2.0}}
    config = Config.model_validate({"data": {"sources": sources, "epochs": 2}})
    n_rows = {"large": 1003, "small": 57}
    mixture = mixture_of(config.data, 8, n_rows)
    large, small = mixture.taken(1003 + 2 * 57).tolist()
    assert abs(large - 1003) <= 1 and abs(small - 114) <= 1
    samples = Samples(samples_of(n_rows).rows, mixture, 0, True)
    assert abs(samples.samples_in(2, 10**6) - 1117) <= 11


def samples_of(n_rows: dict[str, int], weights=(1,), seed=3, seq_len=10) -> Samples:
    """Rows of tokens that say where they come from."""
    rows = {
        name: TokenRows(stream_of(np.arange(n * seq_len + 1) + 100_000 * place), seq_len)
        for place, (name, n) in enumerate(n_rows.items())
    }
    return Samples(rows, Mixture([(0, weights)]), seed, shuffle=True)


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("first_step", [1, 4])
def test_b32_the_global_batch_is_a_function_of_the_step(dp, first_step):
    """Across dp sizes, starts in the middle, and the end of an epoch (13 rows, 8 a step)."""
    samples = samples_of({"": 13})
    expected = [[samples.place(8 * step + place)[1] for place in range(8)] for step in range(8)]
    shares = [iter(StepSampler(8, index, dp, first_step)) for index in range(dp)]
    for step in range(first_step, 9):
        batch = sum((next(share) for share in shares), [])
        assert [samples.place(sample)[1] for sample in batch] == expected[step - 1]
    assert sorted(sum(expected, [])[:13]) == list(range(13))  # an epoch holds each row once


def batches(samples, workers: int, first_step: int, n: int, dp: int = 1) -> list[torch.Tensor]:
    """Global batches, fetched by ``dp`` ranks."""
    data = tiny_config(data__workers=workers).data
    loaders = [iter(make_loader(samples, data, 8, index, dp, first_step)) for index in range(dp)]
    return [torch.cat([next(loader)["labels"] for loader in loaders]) for _ in range(n)]


def test_b26_b30_a_run_resumed_twice_at_any_step_reads_what_the_straight_run_reads():
    """Two sources of 13 and 29 rows, 8 samples a step: both go through several epochs, with 0 and 2 workers."""
    samples = samples_of({"a": 13, "b": 29}, weights=(7, 3))
    straight = batches(samples, 0, 1, 14)
    for step in range(1, 13):
        first = batches(samples, 0, 1, step)
        second = batches(samples, 0, step + 1, 1, dp=2)
        third = batches(samples, 0, step + 2, 14 - step - 1, dp=4)
        assert torch.equal(torch.stack(first + second + third), torch.stack(straight)), step
    for step in (1, 6, 11):
        resumed = batches(samples, 2, step + 1, 2, dp=2) + batches(samples, 2, step + 3, 1)
        assert torch.equal(torch.stack(resumed), torch.stack(straight[step : step + 3])), step


def test_a_million_steps_in_a_step_is_still_its_samples():
    samples = samples_of({"a": 1300, "b": 290}, weights=(7, 3))
    (batch,) = batches(samples, 0, 1_000_000, 1, dp=2)
    first = 999_999 * 8
    assert torch.equal(batch, torch.stack([samples[first + place]["labels"] for place in range(8)]))
    taken = samples.tokens_by_source(first + 8)
    assert taken == {"a": 5_600_000 * 10, "b": 2_400_000 * 10}


@pytest.mark.parametrize("draw", range(10))
def test_an_epoch_of_each_source_holds_every_row_once_whatever_the_weights(draw):
    rng = random.Random(draw)
    n_rows = {name: rng.randint(1, 60) for name in "abc"[: rng.randint(1, 3)]}
    weights = [rng.randint(1, 9) for _ in n_rows]
    samples = samples_of(n_rows, weights, seed=draw)
    seen: dict[str, list[int]] = {name: [] for name in n_rows}
    for sample in range(1500):
        name, row = samples.place(sample)
        seen[name].append(row)
    for name, n in n_rows.items():
        for epoch in range(len(seen[name]) // n):
            assert sorted(seen[name][epoch * n : (epoch + 1) * n]) == list(range(n))


def test_b63_the_data_ends_before_a_source_is_read_again():
    samples = samples_of({"a": 14, "b": 30}, weights=(7, 3))
    assert samples.samples_in(1, 10_000) == 20  # 14 of a, 6 of b: the next one would be of a
    assert samples.place(20)[0] == "a"
    assert samples.samples_in(2, 10_000) == 40
    assert samples.samples_in(1, 15) == 15
    assert samples_of({"": 5}).samples_in(3, 100) == 15


def first_batch(seed=0, shuffle=True, job_seed=0):
    config = tiny_config(data__seed=seed, data__shuffle=shuffle, job__seed=job_seed)
    rows = {"": TokenRows(stream_of(np.arange(2001)), seq_len=10)}
    samples = Samples(rows, Mixture([(0, [1])]), config.data.seed, config.data.shuffle)
    return next(iter(make_loader(samples, config.data, 8, dp_index=0, dp=1, first_step=1)))["tokens"]


def test_b70_the_data_seed_decides_the_order():
    assert torch.equal(first_batch(1), first_batch(1))
    assert not torch.equal(first_batch(1), first_batch(2))
    assert torch.equal(first_batch(1, job_seed=5), first_batch(1, job_seed=6))
    assert first_batch(1, shuffle=False)[:, 0].tolist() == [0, 10, 20, 30, 40, 50, 60, 70]
