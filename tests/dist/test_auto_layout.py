"""``parallel.layout = "auto"``: chosen on rank 0, the same everywhere, written down, and the same run."""

import pytest

from tests.dist.runs import records
from tests.dist.test_command import assert_same_curve, run
from trainer.config_load import load_config

STEPS = ("--training.steps=3", "--metrics.tensorboard=false", "--checkpoint.interval=0")


def test_a_planned_run_is_the_same_run(tmp_path):
    one, planned = tmp_path / "one", tmp_path / "planned"
    assert run(tmp_path, f"--job.output_dir={one}", *STEPS).returncode == 0
    done = run(tmp_path, "--nproc", "2", "--parallel.layout=auto", f"--job.output_dir={planned}", *STEPS)
    assert done.returncode == 0, done.stderr
    assert "planned     --parallel.tp=" in done.stdout
    written = load_config(str(planned / "config.toml"))
    parallel = written.parallel
    assert parallel.layout == "manual"
    assert parallel.tp * parallel.pp * parallel.dp_shard * parallel.dp_replicate == 2
    assert len(records(planned)) == 3
    assert_same_curve(planned, one)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--model.dim=65536", "--model.n_heads=512", "--model.n_layers=64"), "No layout fits"),
        (("--model.size=none",), "model.size"),
    ],
)
def test_what_cannot_be_planned_is_said(tmp_path, arguments, message):
    done = run(tmp_path, "--nproc", "2", "--parallel.layout=auto", f"--job.output_dir={tmp_path / 'run'}", *STEPS, *arguments)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
    assert "Traceback" not in done.stderr


def test_only_train_chooses(tmp_path):
    done = run(tmp_path, "verify", "--parallel.layout=auto", module="trainer")
    assert done.returncode == 2
    assert 'parallel.layout = "auto" is for train alone' in done.stderr
