"""What a user's own file adds: ``--import my_model.py`` (``job.imports``). Loads no torch.

The file is run once a process, on every rank, and calls the functions below. What it registers counts for the configs
that import it, and for no other.
"""

import functools
import importlib.util
import sys
import traceback
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from models import FAMILIES
from trainer.errors import UserError


@dataclass(frozen=True)
class Family:
    """sizes: by name. model, plan: see ``register_family``."""

    sizes: Mapping
    model: Callable | None = None
    plan: Callable | None = None


@dataclass
class Extension:
    """Everything that the imported files register."""

    families: dict[str, Family] = field(default_factory=dict)
    loss: Callable | None = None
    optimizer_hooks: list[Callable] = field(default_factory=list)


_loading: list[Extension] = []


def register_family(name: str, sizes: Mapping, model: Callable | None = None, plan: Callable | None = None) -> None:
    """A family for ``model.family``.

    sizes: name -> ``DecoderConfig``, or a dataclass that extends it.
    model: the class, called with (config, n_positions); a ``Decoder`` by default, and best one that extends it, whose modules
        keep their names. Its static method ``initial_std(config, parameter_name)``, if any, gives the standard deviation
        of each parameter's start (None: ones), in place of ``models.initialize.initial_std``.
    plan: called with the decoder's ``Plan`` and whether norms see a part of the sequence; returns the plan of this model.
    """
    if name in FAMILIES or name in _current().families:
        raise UserError(f"register_family({name!r}): the name is taken")
    _current().families[name] = Family(sizes, model, plan)


def register_loss(function: Callable) -> Callable:
    """The loss, called with logits fp32 [N, V] and labels int64 [N] (``IGNORED``, -100, does not count).

    Returns the *sum* over the labels that count, a scalar: it is divided by their number in the global batch, at any layout.
    """
    if _current().loss is not None:
        raise UserError("register_loss: there is one already; one loss trains a model")
    _current().loss = function
    return function


def register_optimizer_hook(function: Callable) -> Callable:
    """Called on every rank with the optimizer, once it is built, and its parameters by name (this rank's)."""
    _current().optimizer_hooks.append(function)
    return function


def _current() -> Extension:
    if not _loading:
        raise UserError("register_...: call it in a file that --import names")
    return _loading[-1]


@functools.lru_cache(maxsize=64)
def extension_of(imports: tuple[str, ...]) -> Extension:
    """What the files register. Raises ``UserError`` that names file and line."""
    extension = Extension()
    _loading.append(extension)
    try:
        for path in imports:
            _run(path)
    finally:
        _loading.pop()
    return extension


def families_of(imports: tuple[str, ...]) -> dict[str, Mapping]:
    """Family -> its sizes: ours and those of the files."""
    return FAMILIES | {name: family.sizes for name, family in extension_of(imports).families.items()}


def _run(path: str) -> None:
    shown = f"job.imports: {path}"
    if not Path(path).is_file() or not path.endswith(".py"):
        raise UserError(f"{shown}: is not a Python file")
    name = f"meshloom_import_{Path(path).stem}_{zlib.crc32(str(Path(path).resolve()).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where the planner's processes, forks of this one, find its classes
    try:
        spec.loader.exec_module(module)
    except UserError as error:
        raise UserError(*(f"{shown}: {problem}" for problem in error.problems)) from None
    except SyntaxError as error:
        raise UserError(f"{shown}, line {error.lineno}: {error.msg}") from None
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename.endswith(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise UserError(f"{shown}{where}: {type(error).__name__}: {error}") from error
