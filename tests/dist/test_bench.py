"""Benches of real runs."""

import json
import signal
import time

import pytest

from tests.dist.test_command import SMALL, kill_job, processes_left, run, start
from tests.dist.test_observability import curves_in

MODEL = [flag for flag in SMALL if not flag.startswith(("--checkpoint", "--training.global_batch_size"))]
FLAGS = [*MODEL, "--steps=2", "--warmup-steps=1", "--out=b"]
SLOW = 20_000  # sequences of a step that nobody waits for


def vary(*sizes: int) -> list[str]:
    return ["bench", *FLAGS, f"--vary=training.global_batch_size={list(sizes)}", "--vary=compile.backend=['aot_eager', 'eager']"]


def interrupt(tmp_path, n_done: int, number: signal.Signals) -> int:
    """The exit code of a bench that is sent a signal while it trains the slow cell, with ``n_done`` runs done."""
    process = start(tmp_path, *vary(8, SLOW), "--compile.enabled=true", module="trainer")
    try:
        deadline = time.monotonic() + 240
        while not any(f"={SLOW}" in path.parent.name for path in (tmp_path / "b/cells").glob("*/config.toml")):
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.1)
        done = [cell for cell in json.loads((tmp_path / "b/bench.json").read_text())["cells"] if cell["state"] == "done"]
        assert len(done) == n_done
        process.send_signal(number)
        code = process.wait(60)
        assert not processes_left(process)
        return code
    finally:
        kill_job(process)


def test_a_bench_is_stopped_killed_and_gone_on_with(tmp_path):
    """Ctrl-C and kill -9 lose the run under way, leave no process, and keep what is done."""
    assert interrupt(tmp_path, 2, signal.SIGINT) == 75
    before = json.loads((tmp_path / "b/bench.json").read_text())
    assert not [path for path in (tmp_path / "b/cells").iterdir() if f"={SLOW}" in path.name]
    assert interrupt(tmp_path, 2, signal.SIGKILL) == -signal.SIGKILL

    result = run(tmp_path, *vary(8, 16, 9), "--compile.enabled=true", "--json", module="trainer")
    assert result.returncode == 0, result.stderr
    assert "2 of 4 runs are done" in result.stderr
    cells = json.loads(result.stdout)["cells"]
    assert [cell["state"] for cell in cells] == ["done"] * 4 + ["cannot run"] * 2
    assert [cell["runs"] for cell in cells[:2]] == [cell["runs"] for cell in before["cells"][:2]]
    assert "training.global_batch_size = 9 is not a multiple" in cells[4]["why"] and cells[4]["runs"] == []

    for cell in cells[:4]:
        assert cell["tokens_per_s"]["n"] == 2 and cell["tokens_per_s"]["q1"] <= cell["tokens_per_s"]["median"]
        assert cell["compiled_graphs"] == 1 and cell["recompilations"] == 0 and cell["compile_time_s"] > 0
        assert cell["memory_peak_bytes"] > 2**26 and cell["first_step_time_s"] > cell["compile_time_s"] / 2
    assert cells[0]["loss"] == pytest.approx(cells[1]["loss"], rel=1e-5) and cells[0]["key"] != cells[1]["key"]
    rates, times = (cells[0]["runs"][0][key] for key in ("tokens_per_s", "step_time_s"))
    assert [rate * time_s for rate, time_s in zip(rates, times)] == pytest.approx([8 * 32] * 2)
    row = curves_in(tmp_path / "b/hparams" / cells[0]["name"])
    assert row["throughput/tokens_per_s"] == [(0, pytest.approx(sum(rates) / 2, rel=1e-5))]
    assert (tmp_path / "b/bench.png").read_bytes().startswith(b"\x89PNG")
    assert not list((tmp_path / "b").rglob("step-*")), "a cell saves nothing"


def test_layouts_and_a_run_that_fails(tmp_path):
    """A layout gets its processes; what a run says when it fails is in the table, the other cells run, and the exit code is 1."""
    flags = [*FLAGS, "--vary=parallel=[{tp = 1}, {tp = 2}]", "--vary=optimizer.lr=[0.01, 1e38]"]
    result = run(tmp_path, "bench", *flags, "--training.nonfinite=stop", module="trainer", timeout_s=400)
    assert result.returncode == 1, result.stdout + result.stderr
    cells = json.loads((tmp_path / "b/bench.json").read_text())["cells"]
    assert [(cell["varied"]["parallel"], cell["state"], cell["nproc"]) for cell in cells] == [
        ("tp=1", "done", 1), ("tp=1", "failed", 1), ("tp=2", "done", 2), ("tp=2", "failed", 2)
    ]  # fmt: skip
    assert all("not finite" in cell["why"] and "console.log" in cell["why"] for cell in cells[1::2]), cells[1]["why"]
    assert cells[2]["loss"] == pytest.approx(cells[0]["loss"], rel=1e-5)
    heads = result.stdout.splitlines()
    assert any("tokens/s" in line and "layout" in line and "vs first" in line for line in heads), result.stdout


def test_nothing_runs_where_nothing_can(tmp_path):
    result = run(tmp_path, *vary(9, 11), module="trainer")
    assert result.returncode == 2 and "cannot run" in result.stdout and "Traceback" not in result.stderr
    result = run(tmp_path, "bench", "--vary=training.micro_batch_sise=[1]", module="trainer")
    assert result.returncode == 2 and "did you mean training.micro_batch_size?" in result.stderr
