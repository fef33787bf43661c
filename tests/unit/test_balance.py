"""Layers over stages: no split has a smaller largest stage."""

import itertools
import random

import pytest

from parallelize.balance import balance_costs


def largest(costs, counts, first, last) -> float:
    bounds = [0, *itertools.accumulate(counts)]
    stages = [sum(costs[start:end]) for start, end in itertools.pairwise(bounds)]
    stages[0] += first
    stages[-1] += last
    return max(stages)


def best_of_all(costs, n_stages, first, last) -> float:
    cuts = itertools.combinations(range(1, len(costs)), n_stages - 1)
    splits = ([end - start for start, end in itertools.pairwise([0, *cut, len(costs)])] for cut in cuts)
    return min(largest(costs, split, first, last) for split in splits)


@pytest.mark.parametrize("seed", range(8))
def test_as_good_as_trying_all(seed):
    draw = random.Random(seed)
    for _ in range(100):
        n_layers = draw.randint(1, 9)
        n_stages = draw.randint(1, n_layers)
        costs = (
            (1.0,) * n_layers
            if draw.random() < 0.5
            else tuple(draw.choice([1, 2, 0.5, draw.random()]) for _ in range(n_layers))
        )
        first, last = draw.choice([0, 0.3, 2, 4 * draw.random()]), draw.choice([0, 0.7, 3, 4 * draw.random()])
        counts = balance_costs(costs, n_stages, first, last)
        assert sum(counts) == n_layers and min(counts) >= 1 and len(counts) == n_stages
        assert largest(costs, counts, first, last) == pytest.approx(best_of_all(costs, n_stages, first, last), rel=1e-6)


@pytest.mark.parametrize(
    "n_layers, n_stages, head, counts",
    [(32, 4, 2.3, (8, 9, 9, 6)), (28, 8, 9.5, (4, 4, 4, 4, 4, 4, 3, 1)), (4, 2, 0, (2, 2)), (5, 1, 1, (5,))],
)
def test_the_stages_beside_the_largest_are_about_even(n_layers, n_stages, head, counts):
    got = balance_costs((1.0,) * n_layers, n_stages, 0.0, head)
    assert sorted(got[:-1]) == sorted(counts[:-1]) and got[-1] == counts[-1]


def test_too_many_stages():
    with pytest.raises(ValueError, match="3 layers cannot make 4 stages"):
        balance_costs((1.0,) * 3, 4)
