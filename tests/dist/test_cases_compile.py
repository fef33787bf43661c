"""Compiling under pipelines, with validation in between."""

import pytest
import torch

from tests.dist.runs import records, run_config, run_training

LAYOUTS = {
    "one": (1, {}),
    "pp2_virtual": (2, dict(parallel__pp=2, parallel__schedule="Interleaved1F1B")),
    "dp2_tp2": (4, dict(parallel__tp=2)),
}


def counted(config) -> int:
    """Graphs that this rank compiles in a run."""
    torch._dynamo.utils.counters.clear()
    run_training(config)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b84_no_recompilation_after_the_first_train_and_validation_step(ranks, tmp_path, layout):
    """One graph for the layers, all of one shape, to train with, and one to validate with; losses as without compile."""
    world_size, overrides = LAYOUTS[layout]
    keys = dict(training__steps=8, validation__interval=2, validation__batches=2, checkpoint__enabled=False, **overrides)
    compiled = dict(compile__enabled=True, compile__backend="aot_eager")
    graphs = ranks(world_size, counted, run_config(tmp_path / "compiled", **keys, **compiled), timeout_s=300)
    assert set(ranks(world_size, counted, run_config(tmp_path / "eager", **keys))) == {0}
    seen, eager = records(tmp_path / "compiled/run"), records(tmp_path / "eager/run")
    for key in ("loss", "validation_loss"):
        losses = [[record[key] for record in run if key in record] for run in (seen, eager)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5) and losses[0], key
    assert [record["compiled_graphs"] for record in seen[2:]] == [max(graphs)] * 6  # step 2 has validated
    assert seen[0]["compiled_graphs"] == seen[1]["compiled_graphs"] == 1 and set(graphs) == {2}
    assert "compiled_graphs" not in eager[0]
