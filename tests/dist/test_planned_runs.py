"""Plans that are run: ``parallel.layout = "auto"``, stages by measured times, and a plan measured on this machine."""

import json
import math
import re
import shutil

import pytest

from parallelize.planner.hardware import cluster_of
from tests.dist.runs import records, run_config, run_training
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


def test_this_machine_measured_and_the_best_layout_timed(tmp_path):
    hardware = tmp_path / "here.toml"
    shape = ("plan", "--config", "debug", "--gpus-per-node", "2")
    done = run(tmp_path, *shape, "--gpu", "cpu", "--measure", str(hardware), module="trainer")
    assert done.returncode == 0, done.stderr
    cluster = cluster_of(str(hardware), 1, 2)
    assert cluster.calibration.label == "measured here (cpu)"
    assert 1e9 < cluster.gpu.peak_flops < 1e13 and 1e6 < cluster.node_link.bytes_per_s < 1e12
    done = run(tmp_path, *shape, "--gpu", str(hardware), "--top", "1", "--measure-top", "1", module="trainer")
    assert done.returncode == 0, done.stderr
    measured, predicted = re.search(r"measured +([\d.]+) s a step, predicted +([\d.]+): ", done.stdout).groups()
    assert float(measured) > 0 and float(predicted) > 0


def test_only_train_chooses(tmp_path):
    done = run(tmp_path, "verify", "--parallel.layout=auto", module="trainer")
    assert done.returncode == 2
    assert 'parallel.layout = "auto" is for train alone' in done.stderr


def test_stages_by_measured_times_of_the_first_start(tmp_path, ranks):
    keys = dict(parallel__pp=2, model__n_layers=5, training__global_batch_size=4)
    known = ranks(2, run_training, run_config(tmp_path / "known", parallel__balance=(4, 1), **keys))
    config = run_config(tmp_path, parallel__balance="measured", **keys)
    first = ranks(2, run_training, config)
    written = tmp_path / "run" / "unit_times.json"
    times = json.loads(written.read_text())
    assert all(times["seconds"][unit] > 0 for unit in ("embedding", "block", "head"))
    assert "measured    now" in first[0]["console"] and first[1]["console"] == ""

    times["seconds"] = {"embedding": 0.001, "block": 0.01, "head": 0.04}
    written.write_text(json.dumps(times))
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    again = ranks(2, run_training, config)
    assert "measured    at an earlier start" in again[0]["console"] 
    assert "stage 0, 4 layers" in again[0]["console"] and "stage 1, 1 layer," in again[0]["console"]
    assert load_config(str(tmp_path / "run" / "config.toml")).parallel.balance == (4, 1)
    for rank in range(2):  # the same stages, and the measuring has left no trace
        assert again[rank]["weights"].keys() == known[rank]["weights"].keys()
        assert all((again[rank]["weights"][name] == known[rank]["weights"][name]).all() for name in known[rank]["weights"])

    times["seconds"]["block"] = math.inf
    written.write_text(json.dumps(times))  # of no use: measured again
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "measured    now" in ranks(2, run_training, config)[0]["console"]
