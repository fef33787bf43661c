"""``runs``: the table, the states, the comparison, and folders with something wrong in them."""

import fcntl
import importlib
import json
import os
import sys
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.runs_compare import compare

KEYS = {"training": {"steps": 4}, "parallel": {"tp": 1}, "optimizer": {"lr": 0.001}}


def toml(tables: dict) -> str:
    return "\n".join(
        f"[{section}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
        for section, keys in tables.items()
    )


def make_run(folder: Path, losses=(4.0, 3.0, 2.0, 1.0), checkpoint: int | None = None, **changes) -> Path:
    """A run's folder. losses: of steps 1, 2, ...; changes: config keys as parallel__tp=2."""
    tables = {section: dict(keys) for section, keys in KEYS.items()}
    tables["job"] = {"output_dir": str(folder)}
    for key, value in changes.items():
        section, name = key.split("__")
        tables.setdefault(section, {})[name] = value
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(toml(tables), encoding="utf-8")
    records = [{"step": step, "loss": loss, "tokens_per_s": 100.0 * step} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if checkpoint is not None:
        saved = folder / "checkpoints" / f"step-{checkpoint:08d}"
        saved.mkdir(parents=True)
        (saved / "trainer_state.json").write_text("{}")
    return folder


@pytest.fixture
def runs(monkeypatch, capsys, tmp_path):
    def call(*arguments) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["trainer", "runs", *map(str, arguments)])
        code = main()
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def rows(runs):
    """name -> row of the table of a folder, as JSON has it."""

    def call(folder: Path) -> dict[str, dict]:
        code, text, error = runs(folder, "--json")
        assert code == 0 and not error
        return {run["name"]: run for run in json.loads(text)["runs"]}

    return call


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_the_table(runs, tmp_path):
    old = make_run(tmp_path / "outputs" / "old one")
    make_run(tmp_path / "outputs" / "组" / "新", parallel__tp=2, checkpoint=4)
    make_run(tmp_path / "outputs" / "组" / "新" / "inner")  # a run's own subfolders are its own business
    for name in ("config.toml", "metrics.jsonl"):
        os.utime(old / name, (1e9, 1e9))
    before = contents(tmp_path)
    code, text, _ = runs()
    assert code == 0
    head, first, second = text.splitlines()
    assert head.split() == ["name", "state", "step", "loss", "tokens/s", "config"]
    assert first.split() == ["old", "one", "finished", "4/4", "1.000000", "400", "parallel.tp=1"]
    assert second.split() == ["组/新", "finished", "4/4", "1.000000", "400", "parallel.tp=2"]
    assert contents(tmp_path) == before


def test_states(rows, tmp_path):
    make_run(tmp_path / "finished")
    make_run(tmp_path / "stopped", losses=(4.0, 3.0), checkpoint=2)
    make_run(tmp_path / "lost", losses=(4.0,))
    unfinite = make_run(tmp_path / "unfinite", losses=(4.0, 3.0), checkpoint=2)
    hung = make_run(tmp_path / "hung", losses=(4.0,))
    for file in (unfinite / "nonfinite" / "step-00000003.json", hung / "logs" / "stacks-rank-0.txt"):
        file.parent.mkdir()
        file.write_text("{}")
    running = make_run(tmp_path / "running", losses=())
    killed = make_run(tmp_path / "killed", losses=(4.0,))
    (killed / ".lock").write_text("token")
    with (running / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = rows(tmp_path)
    assert {name: row["state"] for name, row in found.items()} == {
        "finished": "finished",
        "stopped": "stopped",
        "lost": "no checkpoint",
        "unfinite": "failed",
        "hung": "failed",
        "running": "running",
        "killed": "no checkpoint",
    }
    assert "step 3" in found["unfinite"]["notes"][0] and "hung" in found["hung"]["notes"][0]
    assert found["stopped"]["checkpoint_step"] == 2 and found["running"]["step"] == 0
    assert rows(running)["."]["state"] == "no checkpoint"  # the lock is gone


def test_a_dump_that_the_run_went_on_from_is_no_failure(rows, tmp_path):
    skips = make_run(tmp_path / "skips", losses=(4.0,), checkpoint=1, training__nonfinite="skip")
    resumed = make_run(tmp_path / "resumed", losses=(4.0, 3.0), checkpoint=2)
    for run, step in ((skips, 2), (resumed, 2)):
        (run / "nonfinite").mkdir()
        (run / "nonfinite" / f"step-{step:08d}.json").write_text("{}")
    assert {row["state"] for row in rows(tmp_path).values()} == {"stopped"}


def test_last_losses(rows, tmp_path):
    run = make_run(tmp_path / "run", losses=())
    records = [{"step": step, "loss": float(step), "tokens_per_s": float(step)} for step in range(1, 9)]
    records[2]["validation_loss"] = 0.5
    records[-1]["loss"] = None  # as the run writes nan
    (run / "metrics.jsonl").write_text("\n".join(json.dumps(record) for record in records) + '\n{"step": 9, "lo')
    row = rows(tmp_path)["run"]
    assert (row["step"], row["loss"], row["loss_is_finite"]) == (8, None, False)
    assert row["validation_loss"] == 0.5 and row["tokens_per_s"] == 7.5 and row["notes"] == []


@pytest.mark.parametrize(
    "file, text, note",
    [
        ("config.toml", "[training\n", "config.toml cannot be read"),
        ("config.toml", b"\xff\xfe\x00", "config.toml cannot be read"),
        ("metrics.jsonl", 'nonsense\n[1]\n{"step": 1, "loss": 2.0}\n', None),
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n{"step": 2, "l\n{"step": "x"}\n' + "\0" * 9, "2 line(s)"),
        ("metrics.jsonl", "", None),
        ("metrics.jsonl", '{"step": 1, "loss": "low", "tokens_per_s": 1e999}\n', None),
        ("metrics.jsonl", "[" * 100_000, None),
        ("metrics.jsonl", f'{{"step": 1{"0" * 400}, "loss": 2.0}}\n' * 2, "1 line(s)"),
    ],
)
def test_a_damaged_file_is_a_note_in_the_row(runs, tmp_path, file, text, note):
    run = make_run(tmp_path / "run")
    (run / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    make_run(tmp_path / "other", parallel__tp=2)
    code, table, error = runs(tmp_path)
    assert code == 0 and not error
    assert note is None or note in table
    assert len(table.splitlines()) == 3
    assert runs(tmp_path, "--json")[0] == 0


def test_a_config_of_another_version(rows, tmp_path):
    make_run(tmp_path / "old", gone__key="x", gone__flag=True)
    make_run(tmp_path / "new", optimizer__betas=[0.9, 0.95])
    found = rows(tmp_path)
    assert found["old"]["config"] == {"gone.key": "x", "gone.flag": True}
    assert found["new"]["config"] == {"optimizer.betas": [0.9, 0.95]}


def test_many_runs_need_no_torch(monkeypatch, capsys, tmp_path):
    for index in range(300):
        make_run(tmp_path / f"run {index}", optimizer__lr=index / 1000)
    for name in [name for name in sys.modules if name.split(".")[0] in ("models", "parallelize", "trainer")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it is now an error
    monkeypatch.setattr(sys, "argv", ["trainer", "runs", str(tmp_path)])
    assert importlib.import_module("trainer.__main__").main() == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 301 and "optimizer.lr=0.299" in text and "\x1b" not in text


def test_nothing_to_list(runs, tmp_path):
    assert runs() == (2, "", "error: outputs is not a folder: give the one that holds the runs, such as outputs\n")
    (tmp_path / "outputs").mkdir()
    code, text, _ = runs()
    assert code == 0 and "no runs below outputs" in text
    assert json.loads(runs("--json")[1])["runs"] == []


def test_compare(runs, tmp_path):
    a = make_run(tmp_path / "outputs" / "名 $a_1$")
    b = make_run(tmp_path / "outputs" / "b", losses=(4.0, 3.0 + 1e-9, 2.1, 1.0, 0.9), parallel__tp=2)
    before = contents(tmp_path / "outputs")
    code, text, error = runs("--compare", a, "b")  # by its name in the table
    assert code == 0 and not error
    assert ["parallel.tp", "1", "2"] in [line.split() for line in text.splitlines()]
    assert "both logged: 4 step(s) from 1 to 4" in text
    assert "first difference: step 2: 3.0 and 3.000000001\n" in text
    assert "first beyond 1e-05 (relative): step 3: 2.0 and 2.1\n" in text
    assert "largest relative difference: 0.0476 at step 3" in text
    assert "final loss: A 1.000000 (step 4), B 0.900000 (step 5)" in text
    assert "validation" not in text
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert contents(tmp_path / "outputs") == before
    code, text, _ = runs("--compare", a, b, "--json", "--tolerance=0.5", "--out", "other")
    result = json.loads(text)
    assert (result["first_different_step"], result["first_step_beyond_tolerance"]) == (2, None)
    assert result["config"] == {"parallel.tp": {"A": 1, "B": 2}}
    assert (tmp_path / "other").is_file()


def test_compare_runs_that_never_differ(runs, tmp_path):
    code, text, _ = runs("--compare", make_run(tmp_path / "a"), make_run(tmp_path / "b"))
    assert code == 0 and "the losses never differ" in text and "config: the same" in text


def test_compare_without_common_steps(runs, tmp_path):
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b", losses=())
    (b / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0, "validation_loss": 2.0}\n')
    (b / "config.toml").write_text("nonsense")
    code, text, _ = runs("--compare", a, b)
    assert code == 0 and "no step has a loss in both: A logged steps 1 to 4, B logged steps 7 to 7" in text
    assert "config: cannot be compared" in text and "final validation loss: A none, B 2.000000 (step 7)" in text
    assert json.loads(runs("--compare", a, b, "--json")[1])["common_steps"] == 0


def test_losses_that_are_not_finite():
    nan = float("nan")
    difference = compare({1: 1.0, 2: nan, 3: nan, 4: 2.0}, {1: 1.0, 2: nan, 3: 5.0, 4: 1.0}, tolerance=1.0)
    assert (difference.first, difference.first_beyond, difference.not_finite) == (3, 3, [2, 3])
    assert (difference.largest, difference.largest_step) == (0.5, 4)


def test_compare_says_what_is_wrong(runs, tmp_path):
    a, empty = make_run(tmp_path / "a"), make_run(tmp_path / "empty", losses=())
    (tmp_path / "other").mkdir()
    for arguments, message in (
        (("--compare", a, tmp_path / "nowhere"), "nowhere is not a folder"),
        (("--compare", a, tmp_path / "other"), "other is not a run: it has no config.toml and no metrics.jsonl"),
        (("--compare", a, empty), "empty has no logged step yet"),
        (("--compare", a, a, "--tolerance=-1"), "--tolerance -1.0: must be a number, 0 or more"),
        (("--compare", a, a, "--out", a / "compare.png"), "which is only read"),
        (("--compare", a, a, "--out", tmp_path / "other" / "no" / "x.png"), "cannot be written"),
        (("--parallel.tp=2",), "runs takes no configuration keys"),
    ):
        code, _, error = runs(*arguments)
        assert code == 2 and message in error and "Traceback" not in error, arguments


def test_without_matplotlib_the_numbers_are_still_said(runs, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    a = make_run(tmp_path / "a")
    code, text, error = runs("--compare", a, a)
    assert code == 2 and "never differ" in text and "[plot]" in error


def test_numbers_that_cannot_be_drawn(runs, tmp_path):
    a, b = make_run(tmp_path / "a", losses=(1e308, -1e308)), make_run(tmp_path / "b", losses=(None, None))
    code, text, error = runs("--compare", a, b)
    assert (
        code == 2
        and "final loss: A -1.000000e+308 (step 2), B not finite" in text
        and error.startswith("error: the curves cannot be drawn")
    )
    assert runs("--compare", b, b)[0] == 0
