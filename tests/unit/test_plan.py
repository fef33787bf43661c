"""The plan command: what it prints, chooses and refuses."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from parallelize.planner.hardware import cluster_of
from trainer.__main__ import main
from trainer.config_load import load_config
from trainer.config_rules import architecture_of, resolve_config
from trainer.planner import Planner


def plan(monkeypatch, capsys, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["trainer", "plan", *arguments])
    code = main()
    printed = capsys.readouterr()
    return code, printed.out, printed.err


SMALL = ("--config", "llama3_8b", "--model.n_layers=8", "--training.seq_len=1024", "--training.global_batch_size=64")


@pytest.fixture(scope="module")
def found():
    """The planner and its plan for a small model on a small cluster."""
    config = load_config("llama3_8b")
    config = config.model_copy(
        update={
            "model": config.model.model_copy(update={"n_layers": 8}),
            "training": config.training.model_copy(update={"seq_len": 1024, "global_batch_size": 64}),
            "precision": config.precision.model_copy(update={"compute": "bfloat16"}),
        }
    )
    planner = Planner(config, architecture_of(config), cluster_of("a100", 2, 4))
    return planner, planner.search(top=4)


def test_every_layout_found_fits_and_runs(found):
    planner, plan = found
    assert len(plan.best) == 4
    for prediction in plan.best:
        assert prediction.peak_bytes <= planner.usable_bytes
        resolved = resolve_config(prediction.choice.config, 8)
        assert resolved.layout == prediction.choice.layout
        assert resolved.layers_per_stage == prediction.job.layers_per_stage
        assert prediction.choice.layout.tp <= 4


def test_the_search_misses_nothing(found):
    """Every allowed choice predicted one by one: the same best, in the same order, and as many rejected."""
    planner, plan = found
    allowed = [choice for choice in planner._choices() if not any(planner._problems(choice))]
    times = []
    for choice in allowed:
        job = planner.job_of(choice)
        if planner._fits(job):
            times.append(planner.predict(choice, job).time.total_s)
    assert [prediction.time.total_s for prediction in plan.best] == pytest.approx(sorted(times)[:4])


def test_a_second_search_is_the_same(found):
    planner, plan = found
    again = planner.search(top=4)
    assert [str(p.choice.layout) for p in again.best] == [str(p.choice.layout) for p in plan.best]
    assert again.rejected == plan.rejected


def faster(cluster, part: str, **factors: float):
    changed = {name: getattr(getattr(cluster, part), name) * factor for name, factor in factors.items()}
    return replace(cluster, **{part: replace(getattr(cluster, part), **changed)})


@pytest.mark.parametrize(
    "part, factors",
    [
        ("gpu", {"peak_flops": 1.5}),
        ("gpu", {"memory_bytes_per_s": 1.5}),
        ("gpu", {"peak_flops": 3, "memory_bytes_per_s": 2}),
        ("node_link", {"bytes_per_s": 2}),
        ("network_link", {"bytes_per_s": 2}),
        ("network_link", {"bytes_per_s": 1.1, "latency_s": 0.5}),
    ],
)
def test_no_step_is_slower_on_faster_hardware(found, part, factors):
    planner, _ = found
    other = Planner(planner.config, planner.architecture, faster(planner.cluster, part, **factors))
    other.units = planner.units
    jobs = [planner.job_of(choice) for choice in planner._choices() if not any(planner._problems(choice))]
    before, after = ([its._time(job).total_s for job in jobs[::5]] for its in (planner, other))
    assert all(new <= old * (1 + 1e-9) for old, new in zip(before, after))
    assert sum(new < old for old, new in zip(before, after)) > len(before) / 4


def test_more_memory_loses_no_layout(found):
    planner, plan = found
    less = Planner(planner.config, planner.architecture, faster(planner.cluster, "gpu", memory_bytes=0.3))
    less.units = planner.units
    jobs = [planner.job_of(choice) for choice in planner._choices() if not any(planner._problems(choice))][::3]
    fitted, fits = ({job for job in jobs if its._fits(job)} for its in (less, planner))
    assert fitted and fitted < fits
    assert less.search(top=1).best[0].time.total_s >= plan.best[0].time.total_s


def test_a_bound_is_below_the_time_and_often_close_to_it(found):
    planner, _ = found
    jobs = [planner.job_of(choice) for choice in planner._choices() if not any(planner._problems(choice))][::3]
    shares = [planner._least_s(job) / planner._time(job).total_s for job in jobs]
    assert max(shares) <= 1 + 1e-9
    assert sorted(shares)[len(shares) // 2] > 0.9


def test_text_json_config_and_picture(monkeypatch, capsys, tmp_path):
    arguments = (*SMALL, "--nodes", "1", "--gpus-per-node", "4", "--gpu", "h100", "--top", "2")
    files = ("--write", str(tmp_path / "out.toml"), "--plot", str(tmp_path / "out.png"))
    code, text, _ = plan(monkeypatch, capsys, *arguments, *files)
    assert code == 0
    for word in ("4 x h100", "calibrated", "gradients", "optimizer", "bubble", "choices", "others are slower"):
        assert word in text
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    code, text, _ = plan(monkeypatch, capsys, *arguments, "--json")
    first = json.loads(text)["layouts"][0]
    written = resolve_config(load_config(str(tmp_path / "out.toml")), 4)
    assert (written.layout.tp, written.layout.pp, written.layout.dp_shard) == (
        first["tp"],
        first["pp"],
        first["dp_shard"],
    )
    assert written.config.training.micro_batch_size == first["micro_batch_size"]
    parts = [value for key, value in first["time_s"].items() if key != "total_s"]
    assert sum(parts) == pytest.approx(first["time_s"]["total_s"])


def test_explain_one_layout_and_trace_it(monkeypatch, capsys):
    layout = "tp=2,pp=2,dp_shard=1,micro_batch_size=2,recompute=full,schedule=1f1b"
    arguments = (*SMALL, "--model.n_layers=2", "--training.global_batch_size=8", "--gpus-per-node", "4")
    code, text, _ = plan(monkeypatch, capsys, *arguments, "--explain", layout, "--trace")
    assert code == 0
    assert "pp 2 x tp 2, 1F1B, micro-batch 2, recompute full" in text
    assert "all 2 groups inside a node" in text
    assert text.count("traced: peak") == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--gpu", "h900"), "h900"),
        (("--gpu", "/none.toml"), "none.toml"),
        (("--nodes", "0"), "--nodes 0: at least 1"),
        (("--gpus-per-node", "-2"), "--gpus-per-node -2: at least 1"),
        (("--top", "0"), "--top 0"),
        (("--measure-top", "-1"), "--measure-top -1"),
        (("--measure-top", "2", "--nodes", "2"), "only this one machine"),
        (("--measure", "x.toml", "--gpu", "y.toml"), "by name"),
        (("--explain", "tp"), "'tp' is not KEY=VALUE"),
        (("--explain", "tpp=2"), "parallel.tpp"),
        (("--gpus-per-node", "3", "--explain", "tp=3"), "parallel.tp = 3 does not divide n_heads"),
        (("--explain", "tp=16"), "start with --nodes x --gpus-per-node of 16"),
        (("--explain", "pp=2,balance=[9,9,9]"), "parallel.balance"),
        (("--model.vocab_size=256",), "data.tokenizer"),
        (("--explain", "tp=2,pp=2,schedule=ZBVZeroBubble,recompute=full"), "once more for each of its weights"),
        (("--explain", "tp=2,tp=1"), "tp is given twice"),
        (("--trace",), "give --explain too"),
        (("--explain", "tp=2", "--measure-top", "1"), "do not go together"),
        (("--explain", "tp=2", "--measure", "x.toml"), "do not go together"),
        (("--write", "/none/out.toml"), "/none/out.toml cannot be written"),
        (("--plot", "/tmp"), "/tmp cannot be written"),
        (("--model.size=9B",), "model.size"),
        (("--write", "/none/out.toml", "--explain", "tp=2"), "/none/out.toml cannot be written"),
        (("--plot", "/none/out.png", "--explain", "tp=2"), "/none/out.png"),
    ],
)
def test_wrong_input(monkeypatch, capsys, arguments, message):
    code, _, error = plan(monkeypatch, capsys, "--config", "llama3_8b", "--parallel.dp_shard=-1", *arguments)
    assert code == 2
    assert message in error


def test_what_is_not_looked_at_is_said_and_json_stays_json(monkeypatch, capsys):
    code, text, error = plan(monkeypatch, capsys, *SMALL, "--parallel.tp=2", "--compile.enabled=true", "--json")
    assert code == 0 and json.loads(text)["layouts"]
    assert "--parallel.tp=2 is not looked at" in error and "compile.enabled = true" in error
    layout = "tp=2,dp_shard=1,micro_batch_size=1"
    arguments = (*SMALL, "--model.n_layers=2", "--gpus-per-node", "2", "--explain", layout, "--trace", "--json")
    code, text, error = plan(monkeypatch, capsys, *arguments)
    assert code == 0 and len(json.loads(text)["traced_peak_bytes"]) == 1 and "not looked at" not in error


def test_nothing_fits(monkeypatch, capsys):
    code, _, error = plan(monkeypatch, capsys, "--config", "llama3_405b", "--gpus-per-node", "1")
    assert code == 2
    assert "No layout fits" in error and "more memory than a GPU has" in error


def test_planning_leaves_no_process_group_behind():
    code = (
        "import sys; sys.argv = ['t', 'plan', '--explain', 'tp=1', '--gpus-per-node', '1']; from trainer.__main__ import main; main(); "
        "import torch.distributed as dist; assert not dist.is_initialized()"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
