"""What only a GPU can show. Skipped without one: pytest -m gpu."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.dist.runs import records

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def train(folder: Path, *arguments: str, steps: int = 10) -> list[dict]:
    result = subprocess.run(
        [sys.executable, "-m", "trainer.launch", f"--training.steps={steps}", f"--job.output_dir={folder}", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    return records(folder)


def test_bf16_on_a_gpu_learns_and_knows_its_memory(tmp_path):
    seen = train(tmp_path / "gpu", "--nproc=1", "--lr_schedule.warmup_steps=2")
    assert seen[-1]["loss"] < seen[0]["loss"] - 0.5
    assert seen[-1]["memory_peak_bytes"] > 4 * 4 * 4_885_760  # parameters, gradients and two moments in fp32


def test_resume_on_a_gpu_is_bitwise(tmp_path):
    flags = ["--nproc=1", "--lr_schedule.total_steps=10", "--lr_schedule.warmup_steps=2"]
    straight = train(tmp_path / "straight", *flags)
    train(tmp_path / "resumed", *flags, steps=5)
    resumed = train(tmp_path / "resumed", *flags)
    assert [r["loss"] for r in resumed] == [r["loss"] for r in straight]


def test_all_gpus_together(tmp_path):
    """FSDP over every GPU of the machine, against one of them."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    flags = ["--precision.compute=float32", "--lr_schedule.warmup_steps=2"]
    one = train(tmp_path / "one", "--nproc=1", *flags)
    two = train(tmp_path / "two", "--nproc=2", *flags)
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-4)
