"""B65: isolated documents at any layout: every stage needs the borders, under every schedule, and every tp rank."""

import json

import pytest

from tests.dist.draws import SCHEDULES
from tests.dist.parity import check_parity
from tests.dist.runs import records, refused, run_config, run_training

ISOLATED = dict(data__isolate_documents=True)
LAYOUTS = {
    "one_by_one": (1, dict(training__micro_batch_size=1)),
    "dp2": (2, {}),
    "tp2": (2, dict(parallel__tp=2)),
    "tp2_no_sp": (2, dict(parallel__tp=2, parallel__sequence_parallel=False)),
    "pp2": (2, dict(parallel__pp=2)),
    "dp2_tp2_pp2": (8, dict(parallel__tp=2, parallel__pp=2)),
    "tp4_replicated_kv": (4, dict(parallel__tp=4, parallel__replicate_kv_heads=True)),
    "pp2_compiled": (2, dict(parallel__pp=2, compile__enabled=True, compile__backend="aot_eager")),
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


def test_b26_b30_b32_whole_runs_of_packed_documents(ranks, tmp_path):
    """Batches, losses and validation at 2 x 2 x 2 as on one process, and from a checkpoint on with other data ranks."""
    path = tmp_path / "documents.jsonl"
    texts = [chr(97 + i % 26) * (3 + i * 7 % 45) for i in range(300)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    keys = dict(
        data__source='"jsonl"', data__path=f'"{path}"', data__tokenizer='"bytes"', data__packing='"best_fit"',
        data__isolate_documents=True, validation__interval=2, validation__batches=99, training__steps=6,
    )  # fmt: skip

    def run(name: str, world_size: int, **more):
        config = run_config(tmp_path / name, **(keys | more))
        seen = ranks(world_size, run_training, config)
        assert all(rank["finished"] for rank in seen)
        shares = {rank["dp_index"]: rank["batches"] for rank in seen}
        batches = [sum(step, []) for step in zip(*(shares[index] for index in sorted(shares)))]
        return batches, records(tmp_path / name / "run"), seen[0]["console"]

    batches, expected, console = run("one", 1)
    assert "of their positions hold a token; documents isolated" in console
    run("three_axes", 8, parallel__tp=2, parallel__pp=2, training__steps=4)
    after, seen, _ = run("three_axes", 4, parallel__schedule='"ZBVZeroBubble"', parallel__pp=2)
    assert after == batches[4:]
    for key in ("loss", "validation_loss"):
        want = {record["step"]: record[key] for record in expected if key in record}
        got = {record["step"]: record[key] for record in seen if key in record}
        assert got == pytest.approx(want, rel=1e-5)
    other = run_config(tmp_path / "one", **(keys | dict(data__packing='"concatenate"', training__steps=8)))
    assert "data.packing was 'best_fit', is 'concatenate'" in ranks(1, refused, other)[0]
