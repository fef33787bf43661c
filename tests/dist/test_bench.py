"""Benches of real runs."""

import json
import signal
import time

import pytest

from tests.dist.test_command import SMALL, kill_job, processes_left, run, start
from tests.dist.test_observability import curves_in

MODEL = [flag for flag in SMALL if not flag.startswith(("--checkpoint", "--training.global_batch_size"))]
FLAGS = ["bench", *MODEL, "--steps=2", "--warmup-steps=1", "--out=b", "--compile.enabled=true", "--compile.backend=eager"]
SLOW = 20_000  # sequences of a step that nobody waits for


def interrupt(tmp_path, number: signal.Signals) -> int:
    """The exit code of a bench that is sent a signal while it trains its second cell."""
    process = start(tmp_path, *FLAGS, f"--vary=training.global_batch_size=[8, {SLOW}]", module="trainer")
    try:
        deadline = time.monotonic() + 400
        while not any(f"={SLOW}" in path.parent.name for path in (tmp_path / "b/cells").glob("*/config.toml")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        cells = json.loads((tmp_path / "b/bench.json").read_text())["cells"]
        assert [cell["state"] for cell in cells] == ["done", "to do"]
        process.send_signal(number)
        code = process.wait(60)
        assert not processes_left(process)
        return code
    finally:
        kill_job(process)


def test_a_bench_is_stopped_killed_and_gone_on_with(tmp_path):
    """Ctrl-C and kill -9 lose the run under way, leave no process, and keep what is done. Then, with another matrix: what is
    done is not done again, what fails leaves its last words, what cannot run is explained."""
    assert interrupt(tmp_path, signal.SIGINT) == 75
    before = json.loads((tmp_path / "b/bench.json").read_text())["cells"][0]
    assert not [path for path in (tmp_path / "b/cells").iterdir() if f"={SLOW}" in path.name]
    assert interrupt(tmp_path, signal.SIGKILL) == -signal.SIGKILL

    axes = ["--vary=training.global_batch_size=[8, 9]", "--vary=optimizer.lr=[0.001, 1e38]"]
    result = run(tmp_path, *FLAGS, *axes, "--json", module="trainer")
    assert result.returncode == 1 and "1 of 2 runs are done" in result.stderr, result.stderr
    cells = json.loads(result.stdout)["cells"]
    assert [cell["state"] for cell in cells] == ["done", "failed", "cannot run", "cannot run"]
    assert cells[0]["key"] == before["key"] and cells[0]["runs"] == before["runs"]
    assert "stopped at step 2" in cells[1]["why"] and "nan" in cells[1]["why"] and "console.log" in cells[1]["why"]
    assert "training.global_batch_size = 9 is not a multiple" in cells[2]["why"] and cells[2]["runs"] == []

    (seen,) = cells[0]["runs"]
    assert [rate * time_s for rate, time_s in zip(seen["tokens_per_s"], seen["step_time_s"])] == pytest.approx([8 * 32] * 2)
    assert cells[0]["tokens_per_s"]["n"] == 2 and cells[0]["memory_peak_bytes"] > 2**26
    assert cells[0]["compiled_graphs"] == 1 and cells[0]["recompilations"] == 0 and cells[0]["compile_time_s"] > 0
    row = curves_in(tmp_path / "b/hparams" / before["name"].replace("8-", "8,optimizer.lr=0.001-"))
    assert row["throughput/tokens_per_s"] == [(0, pytest.approx(sum(seen["tokens_per_s"]) / 2, rel=1e-5))]
    assert (tmp_path / "b/bench.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "b").rglob("checkpoints")), "a cell saves nothing"


def test_a_layout_gets_its_processes(tmp_path):
    result = run(tmp_path, *FLAGS, "--vary=parallel=[{tp = 1}, {tp = 2}]", module="trainer", timeout_s=300)
    assert result.returncode == 0, result.stdout + result.stderr
    cells = json.loads((tmp_path / "b/bench.json").read_text())["cells"]
    assert [(cell["state"], cell["nproc"], cell["layout"]) for cell in cells] == [("done", 1, "one process"), ("done", 2, "tp 2")]
    assert cells[1]["loss"] == pytest.approx(cells[0]["loss"], rel=1e-5)
    assert any("tokens/s" in line and "layout" in line and "vs first" in line for line in result.stdout.splitlines())


def test_nothing_runs_where_nothing_can(tmp_path):
    result = run(tmp_path, *FLAGS, "--vary=training.global_batch_size=[9, 11]", module="trainer")
    assert result.returncode == 2 and "cannot run" in result.stdout and "Traceback" not in result.stderr
    result = run(tmp_path, "bench", "--vary=training.micro_batch_sise=[1]", module="trainer")
    assert result.returncode == 2 and "did you mean training.micro_batch_size?" in result.stderr
