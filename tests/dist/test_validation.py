"""Validation in the middle of training: the same batches each time, and nothing that training sees."""

import json
import math

import numpy as np
import pytest

from tests.dist.runs import records, run_config, run_training
from tests.dist.test_command import SMALL, run
from tests.tiny import tiny_config
from trainer.checkpoint_folder import best_checkpoint, complete_checkpoints
from trainer.data.rows import IGNORED
from trainer.data.samples import load_validation_rows

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
        training__steps=2, validation__interval=1, validation__batches=50, metrics__log_interval=10,
        validation__sets={"held_out": str(tmp_path / "held_out.txt")},
    )  # fmt: skip
    seen = {}
    for layout, (world_size, overrides) in LAYOUTS.items():
        ranks(world_size, run_training, run_config(tmp_path / layout, **keys, **overrides))
        seen[layout] = [record["validation_loss"] for record in records(tmp_path / layout / "run")]
    assert len(seen["one"]) == 2 and all(seen[layout] == pytest.approx(seen["one"], rel=1e-5) for layout in seen)
    own = {key: value for key, value in keys.items() if key != "validation__sets"}
    ranks(1, run_training, run_config(tmp_path / "own", **own))
    assert records(tmp_path / "own/run")[0]["validation_loss"] != pytest.approx(seen["one"][0], rel=1e-3)


def test_several_sets_each_and_all_together_token_by_token(ranks, tmp_path):
    texts = {"short": "It was the best of times. " * 20, "long": "Call me Ishmael. Some years ago, never mind. " * 60}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "lines.jsonl").write_text('{"text": "One."}\n{"text": "Another line, somewhat longer than the first."}\n' * 5)
    paths = {name: str(tmp_path / f"{name}.txt") for name in texts} | {"lines": str(tmp_path / "lines.jsonl")}
    keys = dict(training__steps=2, validation__interval=2, validation__batches=50)

    def losses(name: str, world_size: int = 1, **more) -> dict:
        ranks(world_size, run_training, run_config(tmp_path / name, **keys, **more))
        return records(tmp_path / name / "run")[-1]

    each = {name: losses(name, validation__sets={name: path}) for name, path in paths.items()}
    together = losses("together", validation__sets=paths)
    by_set = together["validation_loss_by_set"]
    assert by_set == {name: record["validation_loss"] for name, record in each.items()}
    weights = {name: n_valid(path) for name, path in paths.items()}
    mean = sum(by_set[name] * weights[name] for name in by_set) / sum(weights.values())
    assert together["validation_loss"] == pytest.approx(mean, rel=1e-9)
    assert together["validation_perplexity"] == pytest.approx(math.exp(mean), rel=1e-9)
    apart = losses("apart", 4, validation__sets=paths, parallel__pp=2)["validation_loss_by_set"]
    assert apart == pytest.approx(by_set, rel=1e-5)


def n_valid(path: str, seq_len: int = 32) -> int:
    """Labels that count, in the whole rows of a file in bytes, ends of documents included."""
    rows = load_validation_rows(tiny_config(data__path=path, training__seq_len=seq_len), 300)[""]
    return sum(int((rows[index]["labels"] != IGNORED).sum()) for index in range(len(rows)))


def test_a_checkpoint_is_evaluated_alone_by_its_runs_own_config(tmp_path):
    """Sets, tokenizer and lengths of the run; at any layout; and other data where it is asked for."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"Chapter {name}. It was the best of times. " * 30)
    sets = [f"--validation.sets.{name}={tmp_path / name}.txt" for name in ("a", "b")]
    keys = ["--validation.interval=2", "--validation.batches=99", "--job.output_dir=run", "--training.steps=2"]
    assert run(tmp_path, *SMALL, *sets, *keys).returncode == 0
    trained = records(tmp_path / "run")[-1]
    command = ["evaluate", "--checkpoint=run/checkpoints/step-00000002", "--json"]
    for layout in ([], ["--parallel.pp=2", "--nproc=2"]):
        result = run(tmp_path, *command, *layout, module="trainer")
        assert result.returncode == 0, result.stderr
        seen = json.loads(result.stdout)
        assert seen["loss"] == pytest.approx(trained["validation_loss"], rel=1e-5)
        by_set = {name: of_set["loss"] for name, of_set in seen["by_set"].items()}
        assert by_set == pytest.approx(trained["validation_loss_by_set"], rel=1e-5)
    other = run(tmp_path, *command, "--data.source=text", f"--data.path={tmp_path}/a.txt", module="trainer")
    assert json.loads(other.stdout)["loss"] == pytest.approx(by_set["a"], rel=1e-5) and "by_set" not in other.stdout


@pytest.mark.parametrize("async_save", [False, True])
def test_the_best_checkpoint_stays(ranks, tmp_path, async_save):
    """A learning rate that ruins the model from step 5 on: the best is neither the first nor the last."""
    keys = dict(
        training__steps=10, checkpoint__interval=2, checkpoint__keep_latest=1, checkpoint__keep_best=True,
        checkpoint__async_save=async_save, validation__interval=1, validation__batches=2,
        lr_schedule__decay="constant", lr_schedule__total_steps=20,
    )  # fmt: skip
    ranks(2, run_training, run_config(tmp_path, **keys | dict(training__steps=4)))
    ranks(2, run_training, run_config(tmp_path, **keys, optimizer__lr=1.0))
    saved = {r["step"]: r["validation_loss"] for r in records(tmp_path / "run") if r["step"] % 2 == 0}
    best = min(saved, key=saved.get)
    assert best == 4, saved
    left = [int(folder.name.split("-")[1]) for folder in sorted((tmp_path / "run/checkpoints").iterdir())]
    assert left == sorted({best, 10}), saved
    assert best_checkpoint(complete_checkpoints(tmp_path / "run/checkpoints"))[1] == saved[best]


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--validation.sets.a=none.txt"], "validation.sets is set, but validation.interval = 0 never validates"),
        (["--validation.sets.a=none.txt", "--validation.interval=2"], "validation.sets.a = 'none.txt': no such file"),
        (["--validation.sets=none.txt"], "validation.sets = \"none.txt\" (from --validation.sets=none.txt): expected a table"),
        (["--validation.sets.a=1", "--validation.interval=2"], "expected a table of names"),
        (["--validation.sets={'a b'='x'}"], "expected a table of names"),
        (["--checkpoint.keep_best=true"], "checkpoint.keep_best needs the validation loss of every checkpoint"),
        (["--checkpoint.keep_best=true", "--validation.interval=3"], "validation.interval must divide it, and is 3"),
        (["--validation.interval=-1"], "validation.interval"),
        (["--validation.batches=0"], "validation.batches"),
    ],
)
def test_wrong_values_are_named(tmp_path, flags, said):
    result = run(tmp_path, *SMALL, *flags)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr, result.stderr
