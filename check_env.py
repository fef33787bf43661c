"""Exit 0 if this interpreter has what pyproject.toml asks for. Standard library only; loads none of it."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def numbers(text: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)"""
    return tuple(int(part) for part in re.match(r"[\d.]+", text)[0].strip(".").split("."))


def problem(requirement: str) -> str | None:
    """Why a requirement such as "torch>=2.11,<3" is not met; None if it is."""
    name, low, high = re.fullmatch(r"([\w-]+)>=([\d.]+),<([\d.]+)", requirement).groups()
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} is not installed"
    return None if numbers(low) <= numbers(found) < numbers(high) else f"{name} {found} is not {requirement}"


def requirements(purpose: str) -> list[str]:
    """The dependencies in pyproject.toml, read line by line: tomllib needs Python 3.11."""
    text = (Path(__file__).parent / "pyproject.toml").read_text(encoding="utf-8")
    lists = [re.search(r"^dependencies = \[(.*?)^\]", text, re.M | re.S)[1]]
    if purpose == "test":
        lists.append(re.search(r"^test = \[(.*?)\]$", text, re.M | re.S)[1])
    return [requirement for entry in lists for requirement in re.findall(r'"([^"]+)"', entry)]


if __name__ == "__main__":
    problems = [text for requirement in requirements(sys.argv[1]) if (text := problem(requirement))]
    print("\n".join(problems))
    sys.exit(bool(problems))
