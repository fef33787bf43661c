"""docs/api.md as printed: the loop equals the command; the model, loss and hook of the file equal plain torch at tp 2 x pp 2."""

import functools
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from models.initialize import draw_slice
from tests.dist.parity import check_parity
from tests.dist.runs import records
from tests.dist.test_command import kill_job, run, start_job
from tests.tiny import reference
from trainer.extend import extension_of

ROOT = Path(__file__).resolve().parents[2]
LOOP, MODEL = re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(), re.DOTALL)
OURS = ["--model.family=normed", "--model.size=tiny"]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return str(path)


def build_plainly(resolved):
    """The model of the file on one device, and each parameter drawn by its rule."""
    family = extension_of(resolved.config.job.imports).families["normed"]
    model = family.model(resolved.architecture, resolved.config.training.seq_len)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape, start = tuple(parameter.shape), (0,) * parameter.dim()
            std = family.model.initial_std(resolved.architecture, name)
            parameter.copy_(draw_slice(resolved.config.job.seed, name, std, shape, start, shape))
    return model


def test_own_family_loss_and_hook_equal_one_process(ranks, file):
    expect = functools.partial(
        reference, build=build_plainly, betas=(0.9, 0.99), loss=functools.partial(F.cross_entropy, label_smoothing=0.1)
    )
    own = dict(job__imports=(file,), model__family='"normed"', model__size='"tiny"', parallel__tp=2, parallel__pp=2)
    seen = check_parity(ranks, 4, n_steps=3, mask="unequal", expect=expect, **own)
    assert any("post_norm" in name for rank in seen for name in rank.gradients)


def test_the_loop_as_printed_is_the_command(tmp_path):
    (tmp_path / "my_loop.py").write_text(LOOP)
    process = start_job(tmp_path, ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "my_loop.py"])
    try:
        out, err = process.communicate(timeout=120)
    finally:
        kill_job(process)
    assert process.returncode == 0, err
    printed = [[float(word) for word in line.split()] for line in out.splitlines()]
    flags = ["--lr_schedule.warmup_steps=0", "--lr_schedule.decay=constant", "--training.steps=3", "--job.output_dir=run"]
    assert run(tmp_path, *flags).returncode == 0
    for (step, loss, grad_norm), record in zip(printed, records(tmp_path / "run"), strict=True):
        assert step == record["step"] and loss == pytest.approx(record["loss"], rel=1e-5)
        assert grad_norm == pytest.approx(record["grad_norm"], rel=1e-4)


def test_every_rank_of_a_real_run_imports_it(tmp_path, file):
    """From the launcher to the ranks and back from config.toml: a run, and its loss evaluated from the checkpoint."""
    flags = [*OURS, "--parallel.tp=2", "--training.steps=2", "--job.output_dir=run"]
    result = run(tmp_path, "--import", file, *flags, "--nproc=2")
    assert result.returncode == 0, result.stderr
    assert "normed tiny" in result.stdout and len(records(tmp_path / "run")) == 2
    again = run(tmp_path, "inspect-data", "--config", "run/config.toml", "--samples=1", module="trainer")
    assert again.returncode == 0, again.stderr


def test_the_planner_knows_it(tmp_path, file):
    """With a dataclass of its own, on all cores."""
    keys = ["--training.global_batch_size=64", "--gpu=h100", "--gpus-per-node=8", "--top=1"]
    result = run(tmp_path, "plan", "--import", file, *OURS, *keys, module="trainer")
    assert result.returncode == 0 and "others are slower" in result.stdout, result.stderr
