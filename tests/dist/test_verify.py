"""``verify`` passes what is right, and finds and blames what is wrong."""

import json

import pytest

from tests.dist.parity import as_tensors
from tests.dist.planted_faults import FAULTS, observe_with
from tests.dist.test_command import run
from tests.tiny import tiny_config
from trainer.config_load import CONFIG_DIR, load_config
from trainer.config_rules import layout_needs, resolve_config
from trainer.verify import one_process, shrink, verify

# fault: the first check that must fail, and what must be suspected
BLAME = {
    "norm gradient not summed over tp": ("worst gradient, step 1", ["tp"]),
    "plan pattern removed": ("runs to the end", ["tp"]),
    "mean per micro-batch": ("loss, step 1", ["micro-batches"]),
    "layers counted from the stage": ("initial weights", ["pp"]),
    "scaled by world size": ("loss, step 1", ["pp", "dp_shard", "tp"]),
    "clipped per stage": ("worst gradient after clipping", ["pp"]),
    "tied weights untied": ("gradient norm, step 1", ["pp"]),
    "data rank shifted": ("batch", ["dp_shard"]),
    "averaged by FSDP": ("gradient norm, step 1", ["dp_shard"]),
    "borders only on the first stage": ("gradient norm, step 1", ["pp"]),  # the first loss is near log V either way
}


def verdict_of(ranks, config, world_size, fault=None):
    def observe(config, world_size):
        try:
            seen = ranks(world_size, observe_with, config, world_size, 2, fault)
        except AssertionError as error:  # the pool's way to say that a rank raised
            raise RuntimeError(str(error)) from None
        return [as_tensors(rank) for rank in seen]

    return verify(config, world_size, observe, "bfloat16" if config.precision.compute == "bfloat16" else "float32")


def three_axes(**overrides):
    keys = dict(parallel__tp=2, parallel__pp=2, parallel__dp_shard=2, model__vocab_size=300, training__max_grad_norm=0.1)
    return tiny_config(**(keys | overrides))


def test_every_fault_has_its_blame():
    assert BLAME.keys() == FAULTS.keys() and len(BLAME) >= 8


@pytest.mark.parametrize("tied, isolated", [(False, False), (True, False), (False, True)])
def test_a_right_layout_passes(ranks, tied, isolated):
    verdict = verdict_of(ranks, three_axes(model__tie_embeddings=tied, data__isolate_documents=isolated), 8)
    assert verdict.passed and verdict.suspects == [], verdict.table()
    assert all(check.passed for check in verdict.checks) and len(verdict.checks) == 9


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_and_blamed(ranks, fault):
    isolated = fault == "borders only on the first stage"
    config = three_axes(model__tie_embeddings=fault == "tied weights untied", data__isolate_documents=isolated)
    verdict = verdict_of(ranks, config, 8, fault)
    first, suspects = BLAME[fault]
    assert not verdict.passed
    assert next(check.name for check in verdict.checks if not check.passed) == first, verdict.table()
    assert verdict.suspects == suspects, verdict.table()
    assert f"suspect: {' and '.join(suspects)}" in verdict.table()


BFLOAT16 = dict(parallel__tp=2, parallel__pp=2, parallel__dp_shard=1, precision__compute="bfloat16")


@pytest.mark.parametrize(
    "fault", ["norm gradient not summed over tp", "mean per micro-batch", "layers counted from the stage", "tied weights untied"]
)
def test_a_planted_fault_is_found_in_bfloat16(ranks, fault):
    tied = fault == "tied weights untied"
    verdict = verdict_of(ranks, three_axes(model__tie_embeddings=tied, **BFLOAT16), 4, fault)
    assert not verdict.passed and verdict.suspects == BLAME[fault][1], verdict.table()


@pytest.mark.parametrize("key", ["compute", "reduce", "param"])
def test_bfloat16_anywhere_is_held_to_its_tolerance(ranks, key):
    overrides = BFLOAT16 | {"precision__compute": "float32", "parallel__dp_shard": 2, f"precision__{key}": "bfloat16"}
    verdict = verdict_of(ranks, three_axes(**overrides), 8)
    assert verdict.passed, verdict.table()


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIG_DIR.glob("[!b]*.toml")))  # no bench_*
def test_shrinking_keeps_every_flag_and_ratio(name):
    config = load_config(name)
    world_size = layout_needs(config.parallel)
    resolved = resolve_config(config, world_size)
    small = resolve_config(shrink(resolved), world_size)
    assert small.architecture.n_params <= 2e7 or small.architecture.head_dim <= 8
    before, after = resolved.architecture, small.architecture
    assert after.n_heads == before.n_heads and after.n_kv_heads == before.n_kv_heads
    assert after.ffn_dim / after.dim == pytest.approx(before.ffn_dim / before.dim)
    assert len(small.layers_per_stage) == len(resolved.layers_per_stage)
    assert (len(set(small.layers_per_stage)) > 1) == (len(set(resolved.layers_per_stage)) > 1)
    if config.training.method != "pretrain":
        config = config.model_copy(update={"data": config.data.model_copy(update={"too_long": "truncate"})})
    for section in ("parallel", "activation_checkpoint", "compile", "precision", "optimizer", "data", "lora"):
        assert getattr(small.config, section) == getattr(config, section)
    assert resolve_config(one_process(small.config), 1).n_microbatches == 1


def test_the_command_with_real_processes(tmp_path):
    arguments = ["verify", "--config", "debug.toml", "--parallel.pp=2", "--steps=2", "--json"]
    result = run(tmp_path, *arguments, module="trainer")
    assert result.returncode == 0, result.stderr
    seen = json.loads(result.stdout)
    assert seen["passed"] and seen["layout"] == "pp 2" and len(seen["checks"]) == 9
    assert result.stderr == ""


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--steps=0"], "--steps 0"),
        (["--config=llama3_70b.toml"], "the layout needs 256 processes"),
        (["--config=debug.toml", "--nproc=3", "--parallel.tp=2"], "start with --nproc 2"),
    ],
)
def test_bad_usage(tmp_path, arguments, expected):
    result = run(tmp_path, "verify", *arguments, module="trainer")
    assert result.returncode == 2 and expected in result.stderr and "Traceback" not in result.stderr
