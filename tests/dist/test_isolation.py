"""B65: isolated documents at any layout: every stage needs the borders, under every schedule, and every tp rank."""

import pytest

from tests.dist.draws import SCHEDULES
from tests.dist.parity import check_parity

ISOLATED = dict(data__isolate_documents=True)
LAYOUTS = {
    "one_by_one": (1, dict(training__micro_batch_size=1)),
    "dp2": (2, {}),
    "tp2": (2, dict(parallel__tp=2)),
    "tp2_no_sp": (2, dict(parallel__tp=2, parallel__sequence_parallel=False)),
    "pp2": (2, dict(parallel__pp=2)),
    "dp2_tp2_pp2": (8, dict(parallel__tp=2, parallel__pp=2)),
    "tp4_replicated_kv": (4, dict(parallel__tp=4, parallel__replicate_kv_heads=True)),
    "qwen_like": (4, dict(parallel__tp=2, parallel__pp=2, model__qkv_bias=True, model__qk_norm=True)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_b65_layout(ranks, name):
    world_size, overrides = LAYOUTS[name]
    check_parity(ranks, world_size, n_steps=3, **ISOLATED, **overrides)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_b65_schedule(ranks, schedule):
    """Two runs of the schedule a step, 4 micro-batches each, on 2 data ranks."""
    check_parity(
        ranks, 4, n_steps=3, mask="unequal", parallel__pp=2, parallel__schedule=schedule,
        parallel__schedule_microbatches=4, training__global_batch_size=16, training__micro_batch_size=1, **ISOLATED,
    )  # fmt: skip


def test_b65_schedule_from_a_file(ranks, tmp_path):
    path = tmp_path / "v.csv"
    path.write_text("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    check_parity(
        ranks, 2, n_steps=2, parallel__pp=2, parallel__schedule=f'"{path}"', training__global_batch_size=2,
        training__micro_batch_size=1, **ISOLATED,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_b65_recompute_and_compile(ranks, mode, compiled):
    """2 x tp 2, and a row without a border in the batch."""
    check_parity(
        ranks, 4, n_steps=2, parallel__tp=2, activation_checkpoint__mode=mode, compile__enabled=compiled,
        compile__backend="aot_eager", timeout_s=300, **ISOLATED,
    )  # fmt: skip
