"""Answers and files of the wizard, in this process. At a terminal: tests/dist/test_wizard.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import __main__
from trainer.config_load import Override, load_config
from trainer.errors import UserError
from trainer.wizard_answers import DataAnswer, Goal, read_data, read_goal, read_hardware, read_method, read_model
from trainer.wizard_files import config_text, slurm_text

TEXT, CHAT = DataAnswer({}, "", False), DataAnswer({}, "", True)


@pytest.mark.parametrize(
    "text, family, size",
    [("llama 3-8B", "llama", "3-8B"), ("qwen/3-8b", "qwen", "3-8B"), ("SmolLM2-135M", "llama", "smollm2-135M")],
)
def test_models_by_name(text, family, size):
    answer = read_model(text)
    assert answer.keys == {"model.family": family, "model.size": size}
    assert answer.tables["model"]["size"] == size  # its shipped config


def test_data_is_looked_at(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"id": "1", "body": "It is a truth"}) + "\n")
    (tmp_path / "b.txt").write_text("It is a truth")
    found = read_data(str(tmp_path / "a.jsonl"))
    assert (
        found.keys == {"data.path": str(tmp_path / "a.jsonl"), "data.text_field": "body"} and "id, body" in found.text
    )
    assert "1 file of plain text" in read_data(str(tmp_path / "b.txt")).text
    chat = read_data("assets/novel_questions.jsonl")
    assert chat.is_chat and "conversations" in chat.text and "data.text_field" not in chat.keys
    assert read_data("bundled").keys == {"data.source": "bundled"}


@pytest.mark.parametrize(
    "text, goal",
    [
        ("1000", Goal(1000)),
        ("1,000 steps", Goal(1000)),
        ("2K steps", Goal(2000)),
        ("1.5B tokens", Goal(tokens=1_500_000_000)),
    ],
)
def test_goals(text, goal):
    assert read_goal(text) == goal


def test_hardware():
    answer = read_hardware("4x8 H100")
    assert answer.shown == "4 x 8 h100" and not answer.is_here
    assert read_hardware("2 cpu").shown == "1 x 2 cpu"


@pytest.mark.parametrize(
    "read, text, words",
    [
        (read_model, "gpt-4", "debug"), (read_model, "3-8B", "llama 3-8B or qwen 3-8B"), (read_model, "llama 7", "3.1-8B"),
        (read_model, "/usr", "config.json"), (read_data, "no/such/*.txt", "no such file"), (read_data, __file__ + "x", "no such file"),
        (read_goal, "soon", "1000 steps"), (read_goal, "0 steps", "at least 1"), (read_goal, "20B", "20B tokens"),
        (read_goal, "1.5 steps", "whole number"), (read_hardware, "8", "4x8 h100"), (read_hardware, "8 potato", "h200"),
        (read_hardware, "0x8 h100", "0 nodes"), (lambda text: read_method(text, TEXT), "rlhf", "pretrain"),
        (lambda text: read_method(text, CHAT), "pretrain", "conversations"),
    ],
)  # fmt: skip
def test_wrong_answers_say_what_would_work(read, text, words):
    with pytest.raises(UserError) as caught:
        read(text)
    assert words in caught.value.message(), caught.value.message()


def test_a_config_is_read_back_with_what_was_in_it(tmp_path):
    overrides = [
        Override("data.sources", '{a = {path = "x\\"y.txt", weight = 2.0}}'),
        Override("parallel.balance", "[1, 2]"),
        Override("optimizer.lr", "3e-4"),
    ]
    config = load_config(None, overrides)
    path = tmp_path / "c.toml"
    path.write_text(config_text(config, ["a heading " * 30], {"training.steps"}))
    read = load_config(str(path))
    assert read.model_copy(update={"job": config.job}) == config and "steps = 100" in path.read_text()


def test_the_slurm_script_is_the_shipped_one_for_this_config(tmp_path):
    script = tmp_path / "my run.sh"
    script.write_text(slurm_text(tmp_path / "my run.toml", 4, 2))
    text = script.read_text()
    assert (
        "#SBATCH --nodes=4\n" in text
        and "#SBATCH --gpus-per-node=2\n" in text
        and "#SBATCH --job-name=my-run\n" in text
    )
    head = text[: text.index("# Slurm runs a copy")] + 'printf "%s|" "$MESHLOOM_REPOSITORY" "$@"'
    done = subprocess.run(["bash", "-c", head, "x", "--training.steps=1"], capture_output=True, text=True, check=True)
    root = Path(__file__).resolve().parents[2]
    assert done.stdout == f"{root}|--config|{tmp_path}/my run.toml|--training.steps=1|"


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--model", "gpt-4"], "--model gpt-4: "), (["--data", "nothing.txt"], "--data nothing.txt: "), (["--goal", "much"], "--goal much: "),
        (["--hardware", "a"], "--hardware a: "), (["--tokenizer", "none"], "--tokenizer none: "), (["--method", "x"], "--method x: "),
        (["--model", "llama 3-8B", "--hardware", "1 a100", "--training.seq_len=131072"], "No layout fits"), (["--training.stpes=3"], "did you mean training.steps"),
        (["--training.steps=3"], "--goal"), (["--training.seq_len=100000000"], "training.seq_len"),
    ],
)  # fmt: skip
def test_wrong_flags_are_errors_and_write_nothing(monkeypatch, capsys, tmp_path, flags, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainer", "wizard", "--yes", *flags])
    assert __main__.main() == 2
    assert words in capsys.readouterr().err and not os.listdir(tmp_path)


def test_the_end_of_input_is_an_error_that_names_the_flag(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainer", "wizard", "--model", "llama debug", "--data", "bundled"])
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        assert __main__.main() == 2
    assert "--tokenizer" in capsys.readouterr().err and not os.listdir(tmp_path)
