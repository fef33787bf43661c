"""One run, any layout: each equals one process in initial weights, loss, gradient norm and every gradient."""

import pytest

from tests.dist.draws import SCHEDULES
from tests.dist.parity import check_parity

LAYOUTS = {
    "dp2": (2, {}),
    "tp2": (2, dict(parallel__tp=2)),
    "pp2": (2, dict(parallel__pp=2)),
    "dp2_tp2": (4, dict(parallel__tp=2)),
    "dp2_pp2": (4, dict(parallel__pp=2)),
    "tp2_pp2": (4, dict(parallel__tp=2, parallel__pp=2)),
    "dp2_tp2_pp2": (8, dict(parallel__tp=2, parallel__pp=2)),
    "hsdp2x2": (4, dict(parallel__dp_replicate=2)),
    "hsdp2x2_tp2": (8, dict(parallel__dp_replicate=2, parallel__tp=2)),
    "pp4": (4, dict(parallel__pp=4)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(ranks, name):
    world_size, overrides = LAYOUTS[name]
    check_parity(ranks, world_size, **overrides)


def test_one_rank_is_the_reference(ranks):
    check_parity(ranks, 1)


PIPELINES = {
    "pp2": (2, dict(parallel__pp=2)),
    "pp4": (4, dict(parallel__pp=4, model__n_layers=9)),
    "pp2_dp2_tp2": (8, dict(parallel__pp=2, parallel__tp=2)),
}


@pytest.mark.parametrize("layout", PIPELINES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule(ranks, schedule, layout):
    world_size, overrides = PIPELINES[layout]
    check_parity(
        ranks, world_size, n_steps=3, mask="unequal", parallel__schedule=schedule, training__micro_batch_size=1,
        training__global_batch_size=16 if world_size == 8 else 8, **overrides,
    )  # fmt: skip


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_accumulation_outside_the_pipeline(ranks, schedule):
    """Three runs of the schedule a step, 4 micro-batches each, on 2 data ranks."""
    check_parity(
        ranks, 4, n_steps=3, mask="unequal", parallel__pp=2, parallel__schedule=schedule,
        parallel__schedule_microbatches=4, training__global_batch_size=24, training__micro_batch_size=1,
    )  # fmt: skip


WRITTEN = {
    # Stages 0 1 1 0, blank lines and idle cells.
    "v": "0F0,0F1,3F0,3B0,3F1,3B1,,0B0,0B1\n\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n",
    # Three stages here and one there, the backward split for some micro-batches only.
    "three_and_one": "0F0,1F0,2F0,0F1,1F1,2F1,2I0,2W0,1B0,0B0,2B1,1B1,0B1\n3F0,3B0,3F1,3I1,3W1\n",
    # The last rank comes first.
    "reversed": "1F0,1B0,1F1,1B1\n0F0,0F1,0B0,0B1\n",
    "last_stage_overlaps_itself": "0F0,0F1,0B0,0B1\n(1F0;1B0)OVERLAP_F_B,(1F1;1B1)OVERLAP_F_B\n",
    "backwards_out_of_order": "0F1,0F0,0B1,0B0\n1F0,1F1,1B1,1B0\n",
    "overlapped": "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,(1F1;2B0)OVERLAP_F_B,2F1,1B0,2B1,1B1\n",
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
def test_schedule_from_a_file(ranks, tmp_path, name, tied):
    path = tmp_path / f"{name}.csv"
    path.write_text(WRITTEN[name])
    check_parity(
        ranks, 4, n_steps=3, parallel__pp=2, parallel__schedule=f'"{path}"', training__global_batch_size=4,
        training__micro_batch_size=1, model__tie_embeddings=tied,
    )  # fmt: skip


PIECES = {
    "one": (1, {}),
    "dp2_recompute": (2, dict(activation_checkpoint__mode="full")),
    "dp2_tp2": (4, dict(parallel__tp=2)),
    "tp4_odd_vocabulary": (4, dict(parallel__tp=4, model__n_kv_heads=4, model__vocab_size=254)),
    "tp2_no_loss_parallel": (2, dict(parallel__tp=2, parallel__loss_parallel=False)),
    "pp2_dp2_tp2_tied": (8, dict(parallel__pp=2, parallel__tp=2, model__tie_embeddings=True)),
    **{f"pp2_{name}": (2, dict(parallel__pp=2, parallel__schedule=name, training__micro_batch_size=1)) for name in SCHEDULES},
}  # fmt: skip


@pytest.mark.parametrize("name", PIECES)
def test_loss_in_pieces(ranks, name):
    """Of 10 tokens, which do not divide a micro-batch."""
    world_size, overrides = PIECES[name]
    check_parity(ranks, world_size, n_steps=2, mask="unequal", training__loss_chunk_tokens=10, **overrides)


@pytest.mark.parametrize("world_size, micro_batch_size", [(1, 8), (1, 2), (2, 4), (2, 1)])
def test_accumulation(ranks, world_size, micro_batch_size):
    check_parity(ranks, world_size, training__micro_batch_size=micro_batch_size)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("overrides", [{}, dict(parallel__tp=2), dict(parallel__pp=2)], ids=["dp2", "tp2", "pp2"])
def test_recompute(ranks, mode, overrides):
    check_parity(ranks, 2, n_steps=2, activation_checkpoint__mode=mode, **overrides)


def test_recompute_of_some_blocks(ranks):
    check_parity(
        ranks, 4, n_steps=2, activation_checkpoint__mode="full", activation_checkpoint__every=2, parallel__tp=2,
        parallel__pp=2,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("overrides", [dict(parallel__tp=2), dict(parallel__pp=2)], ids=["dp2_tp2", "dp2_pp2"])
def test_compile(ranks, mode, overrides):
    check_parity(
        ranks, 4, n_steps=2, compile__enabled=True, compile__backend="aot_eager", activation_checkpoint__mode=mode,
        timeout_s=300, **overrides,
    )  # fmt: skip


@pytest.mark.parametrize("switch", ["sequence_parallel", "loss_parallel"])
def test_tensor_parallel_without(ranks, switch):
    check_parity(ranks, 4, parallel__tp=2, **{f"parallel__{switch}": False})


@pytest.mark.parametrize("reshard", ["always", "never"])
def test_reshard_after_forward(ranks, reshard):
    check_parity(ranks, 4, n_steps=2, parallel__tp=2, parallel__reshard_after_forward=reshard)


TIED = {
    "dp2": (2, {}),
    "tp2": (2, dict(parallel__tp=2)),
    "pp2": (2, dict(parallel__pp=2)),
    "pp2_dp2": (4, dict(parallel__pp=2)),
    "pp4": (4, dict(parallel__pp=4)),
    "interleaved": (2, dict(parallel__pp=2, parallel__schedule="Interleaved1F1B")),
    "v_shaped": (4, dict(parallel__pp=2, parallel__schedule="ZBVZeroBubble")),
    "dp2_tp2_pp2": (8, dict(parallel__tp=2, parallel__pp=2)),
}


@pytest.mark.parametrize("name", TIED)
def test_b12_b13_tied_embeddings(ranks, name):
    """Ten steps; the copies of a pipeline stay the same bits, and are one parameter to the norm."""
    world_size, overrides = TIED[name]
    # At a rate at which ten steps do not make 1e-4 of what CPUs round differently.
    seen = check_parity(ranks, world_size, n_steps=10, model__tie_embeddings=True, optimizer__lr=0.003, **overrides)
    copies = [rank.copies["tok_embeddings.weight"] for rank in seen if rank.copies]
    originals = [rank.final["tok_embeddings.weight"] for rank in seen if "tok_embeddings.weight" in rank.final]
    assert bool(copies) == ("parallel__pp" in overrides) 
    assert all((copy == originals[0]).all() for copy in copies)


@pytest.mark.parametrize("overrides", [{}, dict(parallel__sequence_parallel=False)], ids=["sp", "no_sp"])
def test_kv_heads_fewer_than_tp(ranks, overrides):
    """2 kv heads on 4 tensor-parallel ranks; each projection's gradient is the sum of all ranks'."""
    check_parity(ranks, 4, parallel__tp=4, parallel__replicate_kv_heads=True, **overrides)


QWEN_LIKE = dict(model__qkv_bias=True, model__wo_bias=True, model__qk_norm=True, model__head_dim=32)


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        (2, {}),
        (2, dict(parallel__tp=2)),
        (4, dict(parallel__tp=2, parallel__sequence_parallel=False)),
        (4, dict(parallel__tp=4, parallel__replicate_kv_heads=True)),
        (8, dict(parallel__tp=2, parallel__pp=2)),
    ],
    ids=["dp2", "tp2", "dp2_tp2_no_sp", "tp4_replicated_kv", "2x2x2"],
)
def test_biases_and_qk_norm(ranks, world_size, overrides):
    check_parity(ranks, world_size, **QWEN_LIKE, **overrides)
