"""Validation in the middle of training: the same batches each time, and nothing that training sees."""

import numpy as np
import pytest

from tests.dist.runs import records, run_config, run_training
from tests.dist.test_command import SMALL, run

LAYOUTS = {
    "one": (1, {}),
    "dp2_tp2": (4, dict(parallel__tp=2)),
    "pp2_dp2": (4, dict(parallel__pp=2)),
    "v_shaped": (2, dict(parallel__pp=2, parallel__schedule="ZBVZeroBubble")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_b37_validation_changes_nothing_that_training_sees(ranks, tmp_path, layout):
    world_size, overrides = LAYOUTS[layout]
    keys = dict(training__steps=6, checkpoint__interval=3, **overrides)
    without = ranks(world_size, run_training, run_config(tmp_path / "without", **keys))
    validating = keys | dict(validation__interval=2, validation__batches=3)
    seen = ranks(world_size, run_training, run_config(tmp_path / "with", **validating))
    for ours, theirs in zip(seen, without):
        assert all(np.array_equal(ours["weights"][name], weight) for name, weight in theirs["weights"].items())
    got, want = records(tmp_path / "with/run"), records(tmp_path / "without/run")
    for key in ("step", "loss", "grad_norm", "lr"):
        assert [record[key] for record in got] == [record[key] for record in want], key
    assert [record["step"] for record in got if "validation_loss" in record] == [2, 4, 6]
    # The same batches each time, whatever was trained before it: a resume in between sees them too.
    ranks(world_size, run_training, run_config(tmp_path / "resumed", **validating | dict(training__steps=3)))
    ranks(world_size, run_training, run_config(tmp_path / "resumed", **validating))
    losses = [[r.get("validation_loss") for r in records(tmp_path / name / "run")] for name in ("with", "resumed")]
    assert losses[1][2] is not None  # the first part's last step
    assert [losses[0][i] for i in (1, 3, 5)] == [losses[1][i] for i in (1, 3, 5)]


def test_validation_is_the_same_at_any_layout_and_of_its_own_text(ranks, tmp_path):
    (tmp_path / "held_out.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    keys = dict(
        training__steps=2, validation__interval=1, validation__batches=50, validation__source="text",
        validation__path=str(tmp_path / "held_out.txt"), metrics__log_interval=10,
    )  # fmt: skip
    seen = {}
    for layout, (world_size, overrides) in LAYOUTS.items():
        ranks(world_size, run_training, run_config(tmp_path / layout, **keys, **overrides))
        seen[layout] = [record["validation_loss"] for record in records(tmp_path / layout / "run")]
    assert len(seen["one"]) == 2 and all(seen[layout] == pytest.approx(seen["one"], rel=1e-5) for layout in seen)
    own = {key: value for key, value in keys.items() if key not in ("validation__source", "validation__path")}
    ranks(1, run_training, run_config(tmp_path / "own", **own))
    assert records(tmp_path / "own/run")[0]["validation_loss"] != pytest.approx(seen["one"][0], rel=1e-3)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--validation.path=none.txt"], "validation.source is not set"),
        (["--validation.source=text", "--validation.path=none.txt"], "validation.path = 'none.txt': no such file"),
        (["--validation.interval=-1"], "validation.interval"),
        (["--validation.batches=0"], "validation.batches"),
    ],
)
def test_wrong_values_are_named(tmp_path, flags, said):
    result = run(tmp_path, *SMALL, *flags)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr, result.stderr
