"""Cases about loss and gradients: each layout against one process, per parameter, before and after clipping."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from parallelize.grad_norm import local_tensor

from tests.dist.parity import CPU, check_parity
from tests.dist.pool import mesh_of
from tests.tiny import make_batch, tiny_config
from trainer.build import build_model, build_train_step
from trainer.config_rules import resolve_config

CUTS = {
    "accum1": (1, dict(training__micro_batch_size=8)),
    "accum4": (1, dict(training__micro_batch_size=2)),
    "dp2": (2, dict(training__micro_batch_size=2)),
    "tp2": (2, dict(parallel__tp=2)),
    "pp2": (2, dict(parallel__pp=2)),
    "dp2_pp2": (4, dict(parallel__pp=2)),
    "hsdp2x2": (4, dict(parallel__dp_replicate=2)),
}


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("mask", ["unequal", "empty_rows"])
def test_b01_b16_unequal_and_empty_masks(ranks, cut, mask):
    """Very unequal valid tokens between sequences; then micro-batches and a whole data rank with none."""
    world_size, overrides = CUTS[cut]
    check_parity(ranks, world_size, n_steps=3, mask=mask, **overrides)


@pytest.mark.parametrize("cut", ["accum4", "dp2", "tp2", "pp2"])
def test_b16_a_step_without_any_valid_label(ranks, cut):
    world_size, overrides = CUTS[cut]
    seen = check_parity(ranks, world_size, n_steps=2, mask="all", **overrides)
    assert seen[0].losses == [0.0, 0.0] and seen[0].grad_norms == [0.0, 0.0]
    assert all(np.isfinite(weight).all() for weight in seen[0].final.values())


@pytest.mark.parametrize("pp", [2, 4])
@pytest.mark.parametrize("micro_batch_size", [1, 2])
def test_b02_b03_b04_pipeline_gradients_without_clipping(ranks, pp, micro_batch_size):
    """4 and 8 micro-batches; every layer of every stage at ratio 1, with clipping off."""
    check_parity(
        ranks, pp, n_steps=3, parallel__pp=pp, training__micro_batch_size=micro_batch_size, training__max_grad_norm=0
    )


@pytest.mark.parametrize("overrides", [{}, dict(parallel__schedule="Interleaved1F1B")], ids=["1F1B", "Interleaved1F1B"])
def test_b05_one_norm_over_stages_and_chunks(ranks, overrides):
    """Clipping active: the same norm on every rank, and the reference's gradients after the clip."""
    seen = check_parity(ranks, 2, parallel__pp=2, training__max_grad_norm=0.1, **overrides)
    assert min(seen[0].grad_norms) > 0.1


def test_b06_clipping_with_parameters_on_different_meshes(ranks):
    """Without sequence parallel the norms are not on the tp mesh."""
    seen = check_parity(ranks, 4, parallel__tp=2, parallel__sequence_parallel=False, training__max_grad_norm=0.1)
    assert min(seen[0].grad_norms) > 0.1


@pytest.mark.parametrize("cut", ["accum1", "accum4", "dp2", "pp2"])
def test_b08_one_clip_per_step_whatever_the_accumulation(ranks, cut):
    world_size, overrides = CUTS[cut]
    check_parity(ranks, world_size, training__max_grad_norm=0.01, **overrides)


@pytest.mark.parametrize(
    "overrides",
    [{}, dict(parallel__tp=2), dict(parallel__pp=2), dict(parallel__tp=4, model__n_kv_heads=4)],
    ids=["dp4", "dp2_tp2", "dp2_pp2", "tp4"],
)
def test_b09_scaled_by_tokens_never_by_world_size(ranks, overrides):
    check_parity(ranks, 4, n_steps=2, training__max_grad_norm=0, **overrides)


@pytest.mark.parametrize("pair", list(itertools.combinations(["dp_shard", "dp_replicate", "tp", "pp"], 2)), ids="_".join)
def test_b14_b71_every_rank_has_the_global_loss_for_every_pair_of_axes(ranks, pair):
    """check_parity compares the loss of every rank, with and without the last stage, to one process."""
    check_parity(ranks, 4, n_steps=1, mask="unequal", **{f"parallel__{axis}": 2 for axis in pair})


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_b71_loss_wherever_the_last_stage_lives(ranks, schedule):
    check_parity(ranks, 2, n_steps=1, parallel__pp=2, parallel__schedule=schedule)


@pytest.mark.parametrize("cut", ["accum4", "dp2", "hsdp2x2", "dp2_pp2"])
def test_b18_every_micro_batch_contributes(ranks, cut):
    """Random tokens give each micro-batch ids that no other has; their embedding rows must get gradient."""
    world_size, overrides = CUTS[cut]
    seen = check_parity(ranks, world_size, n_steps=1, **overrides)
    tokens, _ = make_batch(tiny_config(), 1)
    rows = [set(row.tolist()) for row in tokens]
    gradient = next(rank.gradients["tok_embeddings.weight"] for rank in seen if "tok_embeddings.weight" in rank.gradients)
    for index, row in enumerate(rows):
        own = row.difference(*rows[:index], *rows[index + 1 :])
        assert own and (np.abs(gradient[sorted(own)]).max(axis=1) > 0).all()


@pytest.mark.parametrize("tp", [2, 4])
def test_b57_vocabulary_that_tp_does_not_divide(ranks, tp):
    check_parity(ranks, tp, n_steps=3, parallel__tp=tp, model__vocab_size=257, model__n_kv_heads=4)


@pytest.mark.parametrize(
    "world_size, overrides",
    [
        (2, dict(parallel__pp=2, model__n_layers=5)),
        (4, dict(parallel__pp=4, model__n_layers=6)),
        (2, dict(parallel__pp=2, model__n_layers=5, parallel__schedule="Interleaved1F1B")),
        (2, dict(parallel__pp=2, parallel__balance=(1, 3))),
    ],
    ids=["5_on_2", "6_on_4", "5_on_2x2", "1_and_3"],
)
def test_b59_uneven_stages(ranks, world_size, overrides):
    check_parity(ranks, world_size, n_steps=2, **overrides)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"])
@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 5, 6])
def test_b60_any_number_of_micro_batches_works_or_is_refused(ranks, schedule, n_microbatches):
    from trainer.errors import UserError

    keys = dict(
        parallel__pp=2, parallel__schedule=schedule, training__micro_batch_size=1,
        training__global_batch_size=n_microbatches,
    )  # fmt: skip
    try:
        resolve_config(tiny_config(**keys), 2)
    except UserError as error:
        assert "training.global_batch_size" in error.message() and schedule in error.message()
        assert (schedule, n_microbatches) in {("1F1B", 1), ("Interleaved1F1B", 3), ("Interleaved1F1B", 5)}
        return
    check_parity(ranks, 2, n_steps=1, **keys)


def replicated_parameters_after(config, world_size: int, n_steps: int) -> bool:
    """On each rank: are parameters and gradients that tp replicates the same bits on both tp ranks?"""
    resolved = resolve_config(config, world_size)
    mesh = mesh_of(resolved.layout)
    model = build_model(resolved, mesh, CPU)
    step = build_train_step(resolved, model, mesh, CPU)
    group = mesh.axis("tp").get_group()

    def same_on_all(tensor: torch.Tensor) -> bool:
        copies = [torch.empty_like(tensor) for _ in range(resolved.layout.tp)]
        dist.all_gather(copies, tensor.contiguous(), group=group)
        return all(torch.equal(copy, tensor) for copy in copies)

    replicated = {name: p for name, p in model.named.items() if "norm" in name}
    assert len(replicated) == 9
    for number in range(1, n_steps + 1):
        share = step.forward_backward(*make_batch(config, number))
        assert all(same_on_all(local_tensor(p.grad)) for p in replicated.values()), f"gradients at step {number}"
        loss, norm, _ = step.total_and_clip(share, stop_requested=False)
        step.update(loss, norm)
        assert all(same_on_all(local_tensor(p).detach()) for p in replicated.values()), f"weights after step {number}"
    return True


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_b10_norm_weights_stay_the_same_on_tp_ranks(ranks, sequence_parallel):
    config = tiny_config(parallel__tp=2, parallel__sequence_parallel=sequence_parallel)
    assert ranks(2, replicated_parameters_after, config, 2, 5) == [True, True]
