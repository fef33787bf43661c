"""Computing in bfloat16, a layout agrees with one process to the tolerance that ``verify`` states."""

import pytest

from tests.dist.draws import draw
from tests.dist.parity import as_tensors, observe_rank
from tests.tiny import tiny_config
from trainer.verify import TOLERANCES, compare, one_process

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, dict(parallel__tp=2)),
    "hsdp2x2": (4, dict(parallel__dp_replicate=2)),
    "tp4_no_sp": (4, dict(parallel__tp=4, parallel__replicate_kv_heads=True, parallel__sequence_parallel=False)),
    "dp2_pp2_dualpipe": (4, dict(parallel__pp=2, parallel__schedule="DualPipeV", training__micro_batch_size=1)),
    "dp2_tp2_pp2": (8, dict(parallel__tp=2, parallel__pp=2, model__tie_embeddings=True)),
}


def bfloat16_checks(ranks, world_size: int, mask: str, **overrides):
    """``verify``'s comparison of a layout with one process, both in bfloat16."""
    config = tiny_config(precision__compute="bfloat16", **overrides)
    reference = ranks(1, observe_rank, one_process(config), 1, 3, mask)
    seen = ranks(world_size, observe_rank, config, world_size, 3, mask, timeout_s=300)
    return compare(as_tensors(reference[0]), [as_tensors(rank) for rank in seen], TOLERANCES["bfloat16"])


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(ranks, name):
    world_size, overrides = LAYOUTS[name]
    checks = bfloat16_checks(ranks, world_size, "unequal", **overrides)
    assert all(check.passed for check in checks), checks
    worst_gradient = next(check for check in checks if check.name == "worst gradient, step 1")
    assert worst_gradient.difference > 1e-5, "it did not compute in bfloat16"


@pytest.mark.parametrize("seed", range(4))
def test_draw(ranks, seed):
    world_size, mask, overrides = draw(1000 + seed)
    checks = bfloat16_checks(ranks, world_size, mask, **overrides)
    assert all(check.passed for check in checks), checks
