"""The dependency arrows of the design, read off the source."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a trainer file other than build.py may take from the other two packages: numbers, the mesh, helpers.
# Never a model class or a plan.
TRAINER_MAY = {
    "models", "models.decoder_config", "models.hugging_face", "models.names", "parallelize.layout", "parallelize.schedules", "parallelize.mesh",
    "parallelize.grad_norm", "parallelize.local_model", "parallelize.balance",
}  # fmt: skip


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module)
    return names


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", sources("models"), ids=str)
def test_models_import_only_torch(path):
    for name in imported(path):
        top = name.split(".")[0]
        assert top in ("models", "torch") or top in sys.stdlib_module_names, f"{path.name} imports {name}"
        assert not name.startswith("torch.distributed"), f"{path.name} imports {name}"


@pytest.mark.parametrize("path", sources("parallelize"), ids=str)
def test_parallelize_knows_no_model_and_no_trainer(path):
    for name in imported(path):
        top = name.split(".")[0]
        assert top in ("parallelize", "torch", "torchao", "tomli") or top in sys.stdlib_module_names, (
            f"{path.name} imports {name}"
        )


@pytest.mark.parametrize("path", sources("trainer"), ids=str)
def test_only_the_composition_root_sees_models_and_plans(path):
    if path.name == "build.py":
        return
    for name in imported(path):
        if name.split(".")[0] in ("models", "parallelize"):
            assert name in TRAINER_MAY or name.startswith("parallelize.planner."), f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "path", [p for package in ("models", "parallelize", "trainer", "tests") for p in sources(package)], ids=str
)
def test_files_stay_readable(path):
    assert path.read_text().count("\n") <= 400


def test_pytest_collects_every_folder(pytestconfig):
    """By default pytest passes over folders called "dist", without a word."""
    assert "dist" not in pytestconfig.getini("norecursedirs")


def test_the_table_of_cases_names_every_test_of_one():
    """tests/README.md."""
    tests = ROOT / "tests"
    named = set(re.findall(r"`(test_b\d+_\w+)`", (tests / "README.md").read_text()))
    there = {
        name for path in tests.rglob("test_*.py") for name in re.findall(r"def (test_b\d+_\w+)\(", path.read_text())
    }
    assert named == there, named ^ there
