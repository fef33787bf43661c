"""Drawn compositions against one process. ``--long`` runs the several hundred of docs/parity.md."""

import pytest

from tests.dist.draws import describe, draw
from tests.dist.parity import check_parity

N_SHORT, N_LONG = 40, 400


def pytest_generate_tests(metafunc):
    n = N_LONG if metafunc.config.getoption("--long") else N_SHORT
    metafunc.parametrize("seed", range(n)) if "seed" in metafunc.fixturenames else None


def test_draw(ranks, seed):
    world_size, mask, overrides = draw(seed)
    check_parity(ranks, world_size, n_steps=2, mask=mask, timeout_s=300, **overrides)


def test_draws_are_distinct_and_cover_every_axis_and_schedule():
    draws = [describe(*draw(seed)) for seed in range(N_SHORT)]
    assert len({tuple(row.values()) for row in draws}) >= 38
    text = " ".join(" ".join(row.values()) for row in draws)
    for word in ("pp4", "tp4", "dp_replicate2", "1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
                 "ZBVZeroBubble", "DualPipeV", "tie_embeddings", "qk_norm", "no sequence_parallel",
                 "replicate_kv_heads", "in 2 runs",
                 "full recompute", "selective recompute", "compile", "empty_rows"):  # fmt: skip
        assert word in text, word
