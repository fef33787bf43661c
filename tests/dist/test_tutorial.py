"""docs/tutorial.md, as printed, in a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.dist.runs import records
from tests.dist.test_command import ROOT

NEEDED = ("assets", "models", "parallelize", "trainer", "train_configs", "*.sh", "*.py", "pyproject.toml", "constraints.txt")


def test_the_tutorial_as_printed(tmp_path):
    for pattern in NEEDED:
        for path in ROOT.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    page = (ROOT / "docs/tutorial.md").read_text()
    for name, text in re.findall(r"```toml\n# (\S+)\n(.*?)```", page, re.S):
        (tmp_path / name).write_text(text)
    commands = re.findall(r"```sh\n(.*?)\n```", page, re.S)
    assert len(commands) == 10
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = []
    for command in commands:
        result = subprocess.run(
            command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        # The doctor may find something on the machine of the tests.
        assert result.returncode == 0 or "doctor" in command, (command, result.stdout, result.stderr)
        said.append(result.stdout)
    one, two = (records(tmp_path / f"outputs/{name}") for name in ("first", "first-tp2"))
    assert [f"{record['loss']:.5f}" for record in one] == [f"{record['loss']:.5f}" for record in two]
    assert one[0]["loss"] - one[-1]["loss"] > 0.5
    second = records(tmp_path / "outputs/second")
    assert second[0]["loss"] - second[-1]["loss"] > 0.5
    assert (tmp_path / "exported/model.safetensors").is_file() and "loss" in said[9]
