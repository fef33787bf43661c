"""A bench's matrix, and what its numbers add up to."""

import argparse
import json
from pathlib import Path

import pytest
from torch import nn

from parallelize.apply import Treatment, _prepare_block
from parallelize.layout import Layout
from trainer import bench as bench_command
from trainer.bench import Results, measured
from trainer.bench_matrix import cells_of, read_bench
from trainer.bench_report import row_of
from trainer.build import treatment_of
from trainer.config_load import CONFIG_DIR, load_config, split_overrides
from trainer.errors import UserError


def bench(*vary: str, config: str | None = None, overrides=(), **numbers):
    flags = dict(steps=None, warmup_steps=None, repeat=None, nproc=None) | numbers
    return read_bench(argparse.Namespace(config=config, vary=list(vary), **flags), split_overrides(list(overrides))[1])


def cells(tmp_path, *vary: str, **options):
    return cells_of(bench(*vary, **options), tmp_path / "out")


def test_every_combination_is_a_cell(tmp_path):
    seen = cells(
        tmp_path,
        "training.micro_batch_size=[1, 2]",
        "compile=[{enabled = false}, {enabled = true, backend = 'aot_eager'}]",
    )
    assert [cell.varied for cell in seen] == [
        {"training.micro_batch_size": size, "compile": text}
        for size in ("1", "2")
        for text in ("enabled=false", "enabled=true, backend=aot_eager")
    ]
    last = seen[-1]
    assert (last.config.training.micro_batch_size, last.config.compile.enabled, last.config.compile.backend) == (
        2,
        True,
        "aot_eager",
    )
    assert last.sets == {"training.micro_batch_size": 2, "compile.enabled": True, "compile.backend": "aot_eager"}
    assert last.config.training.steps == 13 and not last.config.checkpoint.enabled and last.nproc == 1
    assert len({cell.key for cell in seen}) == len({cell.name for cell in seen}) == 4
    # What is printed as its command is the cell.
    again = load_config(None, split_overrides([*last.command[2:], f"--job.output_dir={tmp_path / 'out'}"])[1])
    assert again == last.config


def test_a_cell_that_cannot_run_says_why(tmp_path):
    keys = ["parallel=[{tp = 2}, {tp = 3}, {pp = 2, schedule = '1F1B'}]", "activation_checkpoint.mode=['none', 'half']"]
    seen = {tuple(cell.varied.values()): cell for cell in cells(tmp_path, *keys)}
    assert seen["tp=2", "none"].nproc == 2 and not seen["tp=2", "none"].problems
    assert "parallel.tp = 3 does not divide n_heads" in "\n".join(seen["tp=3", "none"].problems)
    assert (
        'activation_checkpoint.mode = "half"' in seen["tp=2", "half"].problems[0]
        and "full" in seen["tp=2", "half"].problems[0]
    )
    assert seen["pp=2, schedule=1F1B", "none"].config.parallel.pp == 2
    row = row_of(seen["tp=3", "none"], [])
    assert row.state == "cannot run" and "n_heads" in row.why


def test_a_file_its_overrides_and_flags(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "debug.toml"\nsteps = 5\nrepeat = 2\n[model]\nn_layers = 2\n[training]\nseq_len = 64\n'
        '[matrix]\n"optimizer.lr" = [0.1]\ntraining.micro_batch_size = [1, 2]\n'
    )
    made = bench(config=str(path), overrides=["--training.seq_len=32"], repeat=3)
    assert (made.base, made.steps, made.warmup_steps, made.repeat) == ("debug.toml", 5, 3, 3)
    seen = cells_of(made, tmp_path / "out")
    assert len(seen) == 2 and seen[1].config.training.micro_batch_size == 2
    config = seen[0].config
    assert (config.model.n_layers, config.training.seq_len, config.optimizer.lr) == (2, 32, 0.1)
    assert config.lr_schedule.warmup_steps == 20 and config.lr_schedule.total_steps == 100  # as the base has it
    assert [cell.config.optimizer.lr for cell in cells(tmp_path, "optimizer.lr=[1.0, 2.0]", config=str(path))] == [
        1.0,
        1.0,
        2.0,
        2.0,
    ]


def test_the_key_is_of_what_is_run(tmp_path):
    def key(*vary, **options):
        return cells(tmp_path, *vary, **options)[0].key

    plain = key("training.micro_batch_size=[1, 2]")
    assert plain == key("training.micro_batch_size=[1]", "compile.enabled=[false]")  # the same config by another way
    assert plain != key("training.micro_batch_size=[1]", overrides=["--optimizer.lr=0.5"])
    assert plain != key("training.micro_batch_size=[1]", steps=11)
    assert (
        len({plain, key("training.micro_batch_size=[1]", steps=11, warmup_steps=2)}) == 2
    )  # as many steps, others count


@pytest.mark.parametrize(
    "text, flags, said",
    [
        ("[matrix]\n\"training.micro_batch\" = [1]", [], "training.micro_batch (bench.toml:2): unknown key; did you mean training.micro_batch_size?"),
        ("[matrix]\ncompile = [{enable = true}]", [], "compile.enable (bench.toml:2): unknown key; did you mean compile.enabled?"),
        ("[matrix]\n\"training.seq_len\" = 1", [], "training.seq_len = 1 (bench.toml:2): expected a list"),
        ("[matrix]\n\"training.seq_len\" = []", [], "expected a list"),
        ("[matrix]\ncompile = [true]", [], "compile is a section"),
        ("matrix = 3", [], "must be a table"),
        ("steps = 0\n[matrix]\n\"training.seq_len\" = [1]", [], "steps = 0: expected an integer, at least 1"),
        ("[matrix]\n\"training.steps\" = [1]", [], "a bench sets it itself (--steps)"),
        ("[matrix]\ntraining = [{steps = 1}]", [], "a bench sets it itself (--steps)"),
        ("[matrix]\n\"compile.mode\" = [\"default\"]\ncompile = [{mode = \"default\"}]", [], "compile.mode varies twice"),
        ("[modell]\ndim = 3\n[matrix]\n\"training.seq_len\" = [1]", [], "modell (bench.toml:1): expected a section"),
        ("[model]\ndimm = 3\n[matrix]\n\"training.seq_len\" = [1]", [], "unknown key model.dimm (bench.toml:2); did you mean model.dim?"),
        ("[model]\ndim = 64", [], "has no [matrix], and no --vary"),
        ("base = 3\n[matrix]\n\"training.seq_len\" = [1]", [], "base = 3: expected the name or path"),
        ("[matrix", [], "not valid TOML"),
        ("[matrix]\n\"training.seq_len\" = [1]", ["--training.seq_len=8"], "the key varies in the matrix"),
        ("[matrix]\n\"training.seq_len\" = [1]", ["--job.output_dir=x"], "use --out"),
    ],
)  # fmt: skip
def test_wrong_files_are_explained(tmp_path, text, flags, said):
    (tmp_path / "bench.toml").write_text(text)
    with pytest.raises(UserError) as error:
        bench(config=str(tmp_path / "bench.toml"), overrides=flags)
    assert said in error.value.message()


@pytest.mark.parametrize(
    "flag", ["training.seq_len", "training.seq_len=[1", "training.seq_len=1", "training.seqlen=[1]"]
)
def test_wrong_flags_are_explained(flag):
    with pytest.raises(UserError, match="--vary"):
        bench(flag)


def test_only_records_behind_the_warm_up_count(tmp_path):
    def record(step, graphs, **more):
        rate = 1000.0 / step
        return {"step": step, "step_time_s": 1 / rate, "tokens_per_s": rate, "data_time_s": 0.0, "mfu": None, "loss": 9.0 - step,
                "memory_peak_bytes": step, "compiled_graphs": graphs, "compile_time_s": 1.5, **more}  # fmt: skip

    records = [record(1, 2, first_step_time_s=7.0), record(2, 2), record(4, 2), record(6, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    seen = measured(tmp_path, warmup_steps=3)
    assert seen["tokens_per_s"] == [1000 / 6]  # that of step 4 is a mean of steps 3 and 4
    assert seen["first_step_time_s"] == 7.0 and seen["memory_peak_bytes"] == 6 and seen["loss"] == 3.0
    assert measured(tmp_path, warmup_steps=2)["tokens_per_s"] == [250, 1000 / 6]
    with pytest.raises(UserError, match="no record lies behind the warm-up"):
        measured(tmp_path, warmup_steps=5)

    cell = cells(tmp_path, "optimizer.lr=[0.1]")[0]
    runs = [
        {"state": "done", "wall_s": 1.0, **measured(tmp_path, 2)},
        {"state": "done", "wall_s": 3.0, **measured(tmp_path, 1)},
    ]
    numbers = row_of(cell, runs).numbers
    assert numbers["tokens_per_s"] == {"median": 250, "q1": pytest.approx(1000 / 6), "q3": 250, "n": 5}
    assert numbers["recompilations"] == 1 and numbers["wall_s"] == 2.0 and "mfu" not in numbers


def test_what_is_done_is_kept_and_what_failed_is_not(tmp_path):
    path = tmp_path / "bench.json"
    run = {"state": "done", "wall_s": 1.0, "step_time_s": [1.0], "tokens_per_s": [5.0], "data_time_s": [0.0], "mfu": [None],
           "first_compiled_graphs": 0, "first_compile_time_s": 0, "compiled_graphs": 0, "compile_time_s": 0, "first_step_time_s": 1.0,
           "memory_peak_bytes": 1, "loss": 1.0}  # fmt: skip
    one, two = cells(tmp_path, "optimizer.lr=[0.1, 0.2]")
    results = Results(path, [one, two])
    results.add(one, run)
    results.add(two, {"state": "failed", "why": "exit code 1", "wall_s": 1.0})
    assert [cell["state"] for cell in json.loads(path.read_text())["cells"]] == ["done", "failed"]
    again = Results(path, [two])  # a smaller matrix forgets nothing
    assert again.runs == {two.key: []}
    assert Results(path, [one, two]).runs == {one.key: [run], two.key: []}
    path.write_text("{}")
    with pytest.raises(UserError, match="is not a bench's"):
        Results(path, [one])


def test_rounds_alternate_and_a_failure_is_not_repeated(tmp_path, monkeypatch):
    ran = []

    def run(bench, cell, out, stop):
        ran.append(cell.varied["optimizer.lr"])
        state = "failed" if ran[-1] == "0.2" else "done"
        return {"state": state, "why": "", "wall_s": 1.0, "tokens_per_s": [1.0, 2.0], "step_time_s": [1.0, 2.0], "mfu": [None, None],
                "data_time_s": [0.0, 0.0], "first_compiled_graphs": 0, "compiled_graphs": 0, "compile_time_s": 0, "loss": 1.0,
                "first_step_time_s": 1.0, "memory_peak_bytes": 1}  # fmt: skip

    monkeypatch.setattr(bench_command, "_run", run)
    asked = bench("optimizer.lr=[0.1, 0.2, 0.3]", repeat=3)
    made = cells_of(asked, tmp_path / "out")
    results, said = Results(tmp_path / "bench.json", made), []
    bench_command._run_all(asked, made, results, tmp_path, argparse.Namespace(requested=False), said.append)
    assert ran == ["0.1", "0.2", "0.3", "0.3", "0.1", "0.1", "0.3"]
    assert [row_of(cell, results.runs[cell.key]).state for cell in made] == ["done", "failed", "done"]
    assert row_of(made[0], results.runs[made[0].key]).numbers["tokens_per_s_by_run"] == [1.5] * 3


def test_shipped_benches(tmp_path):
    paths = sorted(CONFIG_DIR.glob("bench_*.toml"))
    assert paths
    for path in paths:
        seen = cells(tmp_path, config=path.name)
        assert len(seen) > 1 and not [cell.problems for cell in seen if cell.problems], path


class Block(nn.Linear):
    def compile(self, **options):
        self.options = options


def test_the_mode_reaches_the_compiler():
    keys = ["--compile.enabled=true", "--compile.mode=reduce-overhead"]
    treatment = treatment_of(load_config(None, split_overrides(keys)[1]), Layout(), "cpu")
    assert isinstance(treatment, Treatment)
    options = _prepare_block(Block(1, 1), "none", treatment).options
    assert options == {"backend": "inductor", "mode": "reduce-overhead", "fullgraph": True}


def test_the_folder_of_a_cell_is_a_name(tmp_path):
    cell = cells(
        tmp_path, "job.gc_interval=[7]", "validation.sets=[{a = '../x y'}]", overrides=["--validation.interval=2"]
    )[0]
    assert Path(cell.name).name == cell.name and " " not in cell.name
