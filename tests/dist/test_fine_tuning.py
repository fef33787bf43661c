"""Adapters, frozen parameters and groups of rates at any layout: every parameter as on one process."""

import pytest
import torch

from models import initialize
from tests.dist.parity import check_parity, observe_rank, same_on_one_process
from tests.dist.runs import run_config, run_training
from tests.tiny import reference, tiny_config
from trainer.config_rules import resolve_config
from trainer.errors import UserError

EIGHT = dict(parallel__tp=2, parallel__pp=2, parallel__dp_shard=2)
LORA = dict(training__method="lora", lora__rank=4, lora__alpha=8.0, model__tie_embeddings=True)


def with_started_adapters(config, world_size, n_steps, mask):
    """``observe_rank`` with a B that is not zero: else A has no gradient in step 1."""
    before = initialize_b()
    try:
        return observe_rank(config, world_size, n_steps, mask)
    finally:
        initialize_b(before)


def initialize_b(std_of=None):
    """Draw B like any matrix, in this process, or as ``std_of`` says. Returns what was there."""
    import tests.tiny
    import trainer.build

    before = trainer.build.initial_std
    std_of = std_of or (lambda architecture, name: 0.02 if name.endswith("lora_b") else initialize.initial_std(architecture, name))
    trainer.build.initial_std = tests.tiny.initial_std = std_of
    return before


@pytest.fixture
def started_adapters():
    before = initialize_b()
    yield
    initialize_b(before)


LAYOUTS = {
    "one": dict(),
    "dp2": dict(parallel__dp_shard=2),
    "tp2": dict(parallel__tp=2),
    "tp4": dict(parallel__tp=4, parallel__replicate_kv_heads=True),
    "pp2": dict(parallel__pp=2),
    "tp2-plain": dict(parallel__tp=2, parallel__sequence_parallel=False),
    "eight": EIGHT | dict(activation_checkpoint__mode="full"),
    "eight-zbv": EIGHT | dict(parallel__schedule="ZBVZeroBubble"),
    "eight-biased": EIGHT | dict(model__qkv_bias=True, model__wo_bias=True, parallel__schedule="Interleaved1F1B"),
    "dualpipe": dict(parallel__pp=2, parallel__schedule="DualPipeV", training__micro_batch_size=1),
    "izb": dict(parallel__pp=2, parallel__dp_shard=2, parallel__schedule="InterleavedZeroBubble", training__micro_batch_size=1),
    "compiled": dict(parallel__tp=2, parallel__dp_shard=2, compile__enabled=True, compile__backend="aot_eager"),
    "hsdp": dict(parallel__dp_shard=2, parallel__dp_replicate=2, data__isolate_documents=True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_alike_at_any_layout(ranks, started_adapters, name):
    layout = LAYOUTS[name]
    degrees = [value for key, value in layout.items() if key.split("__")[1] in ("tp", "pp", "dp_shard", "dp_replicate")]
    world_size = int(torch.tensor(degrees).prod()) if degrees else 1
    seen = check_parity(
        ranks, world_size, n_steps=3, mask="unequal", function=with_started_adapters,
        **(LORA | dict(data__packing="concatenate", data__isolate_documents=False) | layout),
    )  # fmt: skip
    names = set().union(*(rank.gradients for rank in seen))
    assert names and all(name.endswith(("lora_a", "lora_b")) for name in names)
    for rank in seen:
        for parameter, final in rank.final.items():
            changed = (torch.from_numpy(final) != torch.from_numpy(rank.initial[parameter])).any()
            assert changed == parameter.endswith(("lora_a", "lora_b")), parameter


FROZEN = {
    "first-stage": dict(training__freeze=["tok_embeddings", "layers.[01]"]),
    "tied": dict(training__freeze=["tok_embeddings", "*norm*"], model__tie_embeddings=True),
    "head": dict(training__freeze=["output", "layers.3"], training__loss_chunk_tokens=16),
}
GROUPS = dict(optimizer__groups=[
    {"match": ["layers.*.attention", "norm"], "lr_scale": 0.1, "weight_decay": 0.3}, {"match": ["layers.2.feed_forward.w1"], "lr_scale": 0},
])  # fmt: skip


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("layout", ["pp2", "eight", "izb"])
def test_frozen_parameters_and_groups_at_any_layout(ranks, frozen, layout):
    if (frozen, layout) == ("first-stage", "izb"):
        with pytest.raises(UserError) as error:
            resolve_config(tiny_config(**(FROZEN[frozen] | LAYOUTS[layout])), 4)
        assert "behind a first stage with nothing to train (the embedding and 1 layer(s) are frozen)" in error.value.message()
        return
    world_size = 2 if layout in ("pp2", "dp2") else 4 if layout == "izb" else 8
    seen = check_parity(ranks, world_size, n_steps=3, mask="unequal", **(FROZEN[frozen] | GROUPS | LAYOUTS[layout]))
    expected = reference(same_on_one_process(tiny_config(**(FROZEN[frozen] | GROUPS | LAYOUTS[layout]))), 3, "unequal")
    for rank in seen:
        for name, final in rank.final.items():
            moved = expected.final[name] - expected.initial[name]
            assert (torch.from_numpy(final) - expected.final[name]).norm() <= 0.02 * moved.norm(), name
            assert bool(moved.any()) == (name in rank.gradients and name != "layers.2.feed_forward.w1.weight"), name
