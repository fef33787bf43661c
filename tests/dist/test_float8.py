"""Blocks in float8: emulated, so only the rounding; speed and memory need a GPU."""

import pytest

from tests.dist.test_effects import losses_of_steps
from tests.tiny import tiny_config

EMULATED = dict(float8__emulate=True, float8__min_features=1)
LAYOUTS = {
    "pp2_dp2": (4, dict(parallel__pp=2)),
    "zero_bubble": (2, dict(parallel__pp=2, parallel__schedule="InterleavedZeroBubble")),
    "selective": (1, dict(activation_checkpoint__mode="selective")),
    "tp2": (2, dict(parallel__tp=2)),
    "tp2_compiled": (2, dict(parallel__tp=2, compile__enabled=True, compile__backend="aot_eager")),
}


@pytest.fixture(scope="module")
def exact(ranks):
    return ranks(1, losses_of_steps, tiny_config(), 1, 3)[0][0]


@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise"])
def test_a_run_in_float8(ranks, exact, recipe):
    """Near the run without it, and not the same; at another layout equal, but where tp scales other tensors."""
    keys = EMULATED | dict(float8__recipe=recipe)
    one = ranks(1, losses_of_steps, tiny_config(**keys), 1, 3, timeout_s=200)[0][0]
    assert one != exact and one == pytest.approx(exact, rel=0.02)
    for world_size, layout in LAYOUTS.values():
        losses = ranks(world_size, losses_of_steps, tiny_config(**keys, **layout), world_size, 3, timeout_s=200)[0][0]
        assert losses == pytest.approx(one, rel=5e-3 if "parallel__tp" in layout else 1e-6), layout


def test_only_chosen_projections_are_in_float8(ranks, exact):
    keys = dict(float8__recipe="rowwise", float8__emulate=True)
    some = [("attention.w[qk]",), ("attention.w[qk]", "feed_forward.*")]
    fewer, more = (ranks(1, losses_of_steps, tiny_config(**keys, float8__layers=layers, float8__min_features=1), 1, 3)[0][0] for layers in some)
    assert fewer != more and exact not in (fewer, more)
    large = tiny_config(**keys, float8__min_features=128)
    with pytest.raises(AssertionError, match=r"UserError: .*no projection of a block is chosen by \['\*'\], with at least 128 features"):
        ranks(1, losses_of_steps, large, 1, 1)


def test_without_a_gpu_for_it(ranks):
    with pytest.raises(AssertionError, match="UserError: .*float8.emulate = true computes its rounding alone"):
        ranks(1, losses_of_steps, tiny_config(float8__recipe="rowwise"), 1, 1)
