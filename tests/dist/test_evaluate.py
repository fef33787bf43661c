"""The loss without training: the training loss of the same tokens, at every layout, and no trace left behind."""

import pytest
import torch

from parallelize.grad_norm import local_tensor
from tests.dist.draws import SCHEDULES
from tests.dist.parity import CPU
from tests.dist.pool import mesh_of
from tests.tiny import make_batch, tiny_config
from trainer.build import build_model, build_train_step
from trainer.config_rules import resolve_config
from trainer.data.rows import IGNORED


def evaluate_between_steps(config, world_size: int, evaluates: bool) -> dict:
    """Train two steps; before each, evaluate its batch, and a partial batch of step 9, if asked to."""
    resolved = resolve_config(config, world_size)
    mesh = mesh_of(resolved.layout)
    step = build_train_step(resolved, build_model(resolved, mesh, CPU), mesh, CPU)
    share = config.training.global_batch_size // resolved.layout.dp
    rows = slice(mesh.dp_index * share, (mesh.dp_index + 1) * share)

    def batch(number: int):
        tokens, labels, *positions = make_batch(config, number, "empty_rows" if number == 2 else "unequal")
        if number == 9:  # the last batch of a validation set: rows beyond its end are padding
            labels[-3:] = IGNORED
        return [tensor[rows] for tensor in (tokens, labels, *positions)]

    seen = {"training": [], "evaluated": [], "two": []}
    for number in (1, 2):
        if evaluates:
            seen["evaluated"].append(step.evaluate([batch(number)]))
            seen["two"].append(step.evaluate([batch(number), batch(9)]))
        seen["training"].append(step(*batch(number)).loss.item())
    kept = [stage.fwd_cache for stage in getattr(step.micro_batches, "stages", [])]
    if evaluates:
        step.evaluate([batch(9)])
        assert not any(kept), "outputs are kept for a backward that is not to come"
    seen["weights"] = [local_tensor(p.detach()).clone().numpy() for p in step.parameters]
    seen["empty"] = step.evaluate([])
    return seen


LAYOUTS = {
    "one": (1, {}),
    "one_batch": (1, dict(training__micro_batch_size=8)),
    "dp2": (2, {}),
    "dp2_tp2": (4, dict(parallel__tp=2)),
    "tp2_no_loss_parallel": (2, dict(parallel__tp=2, parallel__loss_parallel=False)),
    "pp2_two_runs": (2, dict(parallel__pp=2, parallel__schedule_microbatches=2)),
    "pp2_dp2_tp2": (8, dict(parallel__pp=2, parallel__tp=2, model__tie_embeddings=True)),
    "pp2_recompute": (2, dict(parallel__pp=2, activation_checkpoint__mode="full")),
    "pp2_compile": (2, dict(parallel__pp=2, compile__enabled=True, compile__backend="aot_eager")),
    "pp2_dp2_tp2_pieces": (8, dict(parallel__pp=2, parallel__tp=2, training__loss_chunk_tokens=10)),
    "dp2_tp2_pp2_isolated": (8, dict(parallel__pp=2, parallel__tp=2, data__isolate_documents=True)),
    **{f"pp2_{name}": (2, dict(parallel__pp=2, parallel__schedule=name, training__micro_batch_size=1)) for name in SCHEDULES},
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_b17_validation_loss_is_the_training_loss_of_the_same_tokens(ranks, name):
    world_size, overrides = LAYOUTS[name]
    config = tiny_config(**overrides)
    seen = ranks(world_size, evaluate_between_steps, config, world_size, True)
    untouched = ranks(world_size, evaluate_between_steps, config, world_size, False)
    for rank, other in zip(seen, untouched):
        assert rank["training"] == other["training"], "evaluating changed training"
        assert all((a == b).all() for a, b in zip(rank["weights"], other["weights"]))
        assert rank["evaluated"] == seen[0]["evaluated"] and rank["two"] == seen[0]["two"] and rank["empty"] == (0.0, 0)
        for (loss, n_tokens), training, number in zip(rank["evaluated"], rank["training"], (1, 2)):
            mask = "empty_rows" if number == 2 else "unequal"
            assert n_tokens == (make_batch(config, number, mask)[1] != IGNORED).sum()
            assert loss == pytest.approx(training, rel=1e-6)
    # Token-weighted over batches of unequal count, not a mean of means.
    (first, n_first), (both, n_both) = seen[0]["evaluated"][0], seen[0]["two"][0]
    of_the_model = {key: value for key, value in overrides.items() if key in ("model__tie_embeddings", "data__isolate_documents")}
    rest = ranks(1, evaluate_alone, tiny_config(**of_the_model))[0]
    assert n_both == n_first + rest[1]
    assert both == pytest.approx((first * n_first + rest[0] * rest[1]) / n_both, rel=1e-6)


def evaluate_alone(config) -> tuple[float, int]:
    """The partial batch by itself, on one process, at the initial weights."""
    resolved = resolve_config(config, 1)
    mesh = mesh_of(resolved.layout)
    step = build_train_step(resolved, build_model(resolved, mesh, CPU), mesh, CPU)
    return step.evaluate([[tensor[:-3] for tensor in make_batch(config, 9, "unequal")]])
