"""What a bench runs: a base config, the keys that vary, and every combination of them as a cell."""

import argparse
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import tomli

from trainer.config import Config
from trainer.config_load import Override, find_config, key_schemas, line_of, load_config, suggestion, toml_text
from trainer.errors import UserError
from trainer.launch import check_start, count_gpus

# Below what the bench's file and the command line say. A cell is thrown away: nothing is saved, nothing resumed.
_DEFAULTS = {
    "metrics.log_interval": 1, "metrics.tensorboard": False, "checkpoint.enabled": False, "checkpoint.resume": "never",
    "checkpoint.keep_best": False, "validation.interval": 0, "validation.sets": {},
}  # fmt: skip
_NUMBERS = {"steps": (10, 1), "warmup_steps": (3, 1), "repeat": (1, 1), "nproc": (None, 1)}  # default, least
_OWN = {"training.steps": "--steps", "job.output_dir": "--out"}  # keys that a bench sets itself


@dataclass(frozen=True)
class Axis:
    """What varies: a key with its values, or a section with tables of its keys."""

    name: str
    values: tuple[tuple[Override, ...], ...]  # what each value sets


@dataclass(frozen=True)
class Bench:
    """base: a config's name or path, None for the defaults. steps: those that count, after warmup_steps. repeat: rounds."""

    base: str | None
    overrides: tuple[Override, ...]
    axes: tuple[Axis, ...]
    steps: int
    warmup_steps: int
    repeat: int
    nproc: int | None

    def combinations(self) -> Iterator[dict[str, tuple[Override, ...]]]:
        """By axis, what it sets; the last axis changes fastest."""
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield dict(zip((axis.name for axis in self.axes), values))


@dataclass(frozen=True)
class Cell:
    """One config of the matrix, checked. config, nproc and command are None where it cannot run, for ``problems``."""

    key: str  # the same for the same resolved config, processes, steps, torch and kind of device
    name: str  # of its folder
    varied: dict[str, str]  # axis -> value, as shown
    sets: dict[str, object]  # key -> value, of all axes
    config: Config | None
    nproc: int | None
    command: tuple[str, ...] | None  # the arguments of run_train.sh, but for the output folder
    problems: tuple[str, ...]


def read_bench(options: argparse.Namespace, overrides: list[Override]) -> Bench:
    """From a bench's file or a config, ``--vary`` and other flags. Raises ``UserError``."""
    path = find_config(options.config) if options.config is not None else None
    tables, text = _read(path)
    is_bench = "matrix" in tables
    if not is_bench:
        base, tables = options.config, {}
    else:
        base = tables.pop("base", None)
        if not (base is None or isinstance(base, str)):
            raise UserError(f"{path}: base = {toml_text(base)}: expected the name or path of a config")
    matrix = tables.pop("matrix", {})
    numbers = {name: tables.pop(name, default) for name, (default, _) in _NUMBERS.items()}
    numbers |= {name: value for name in _NUMBERS if (value := getattr(options, name)) is not None}
    _check_numbers(numbers, path)
    axes = _axes(
        matrix, f"{path}: [matrix] ", lambda name: f" ({path.name}:{_line_in_matrix(text, name)})" if path else ""
    )
    axes = {axis.name: axis for axis in [*axes, *_vary(options.vary or [])]}  # a flag's instead of the file's
    if not axes:
        said = f"{options.config} has no [matrix]" if path else "there is no --config"
        raise UserError(
            f"{said}, and no --vary: nothing varies. Try --config bench_compile.toml, or --vary 'training.micro_batch_size=[1, 2]'"
        )
    shared = [*_set_by(tables, path, text), *overrides]
    _check_clashes(shared, list(axes.values()))
    return Bench(base, tuple(shared), tuple(axes.values()), **numbers)


def cells_of(bench: Bench, out: Path) -> list[Cell]:
    """Every combination, checked against this machine before anything runs. Raises ``UserError`` for the base's problems."""
    base = load_config(bench.base, list(bench.overrides))
    schedule_steps = base.lr_schedule.total_steps or base.training.steps
    n_steps = bench.warmup_steps + bench.steps
    own = {"training.steps": n_steps, "lr_schedule.total_steps": max(schedule_steps, n_steps)}
    cells = [_cell(bench, combination, own, out) for combination in bench.combinations()]
    return list({cell.key: cell for cell in cells}.values())


def _cell(bench: Bench, combination: dict[str, tuple[Override, ...]], own: dict, out: Path) -> Cell:
    varied = {
        axis: ", ".join(_value_text(axis, override) for override in sets) or "as it is"
        for axis, sets in combination.items()
    }
    chosen = [override for sets in combination.values() for override in sets]
    overrides = [*_as_overrides(_DEFAULTS), *bench.overrides, *chosen, *_as_overrides(own)]
    config = nproc = command = None
    problems: tuple[str, ...] = ()
    try:
        config = load_config(bench.base, [*overrides, Override("job.output_dir", str(out))])
        nproc = check_start(config, bench.nproc, 1)
    except UserError as error:
        config, problems = None, error.problems
    identity = [sorted((o.key, o.text) for o in overrides)] if config is None else [_resolved(config), nproc]
    device = "GPU" if count_gpus() else "CPU"
    key = hashlib.sha256(json.dumps([*identity, bench.warmup_steps, version("torch"), device]).encode()).hexdigest()[
        :12
    ]
    if config is not None:
        source = [] if bench.base is None else ["--config", bench.base]
        command = (*source, "--nproc", str(nproc), *(override.shown for override in overrides))
    shown = re.sub(r"[^\w.,=+-]", "", ",".join(f"{axis}={text}" for axis, text in varied.items()))
    sets = {override.key: override.value for override in chosen}
    return Cell(key, f"{shown[:80]}-{key[:8]}", varied, sets, config, nproc, command, problems)


def _resolved(config: Config) -> dict:
    tables = config.model_dump(mode="json")
    tables["job"].pop("output_dir")
    return tables


def _value_text(axis: str, override: Override) -> str:
    text = override.text.strip('"')
    return text if override.key == axis else f"{override.key.split('.', 1)[1]}={text}"


def _read(path: Path | None) -> tuple[dict, str]:
    if path is None:
        return {}, ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return tomli.loads(text), text
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    except tomli.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _check_numbers(numbers: dict, path: Path | None) -> None:
    problems = []
    for name, (default, least) in _NUMBERS.items():
        value = numbers[name]
        if not (type(value) is int and value >= least) and not (value is None and default is None):
            problems.append(
                f"{name} = {value}: expected an integer, at least {least} (of {path}, or --{name.replace('_', '-')})"
            )
    if problems:
        raise UserError(*problems)


def _vary(flags: list[str]) -> list[Axis]:
    """``--vary 'KEY=[VALUE, ...]'``."""
    matrix = {}
    for flag in flags:
        name, _, text = flag.partition("=")
        try:
            matrix[name.strip()] = tomli.loads(f"values = {text}")["values"]
        except tomli.TOMLDecodeError:
            raise UserError(
                f"--vary {flag}: expected KEY=[VALUE, ...] with values as in TOML, such as --vary 'compile.enabled=[false, true]' "
                "or --vary 'parallel=[{tp = 2}, {pp = 2}]'"
            ) from None
    return _axes(matrix, "--vary ", lambda name: "")


def _axes(matrix, source: str, where) -> list[Axis]:
    """Raises ``UserError`` with every problem."""
    if not isinstance(matrix, dict):
        raise UserError(f"{source}must be a table of keys and lists of values")
    problems, axes = [], []
    # An unquoted training.micro_batch_size in TOML is a table in a table.
    matrix = {key: values for name, value in matrix.items() for key, values in _dotted(name, value)}
    for name, values in matrix.items():
        is_section = name in _sections()
        if not is_section and name not in key_schemas():
            problems.append(f"{source}{name}{where(name)}: unknown key{suggestion(name)}")
        elif name in _OWN:
            problems.append(f"{source}{name}{where(name)}: a bench sets it itself ({_OWN[name]})")
        elif not (isinstance(values, list) and values):
            problems.append(f"{source}{name} = {toml_text(values)}{where(name)}: expected a list of the values to try")
        elif is_section and not all(isinstance(value, dict) for value in values):
            problems.append(
                f"{source}{name} = {toml_text(values)}{where(name)}: {name} is a section: expected a list of tables of its keys, such as [{{...}}, {{...}}]"
            )
        else:
            sets = [
                {f"{name}.{key}": entry for key, entry in value.items()} if is_section else {name: value}
                for value in values
            ]
            unknown = dict.fromkeys(key for value in sets for key in value if key not in key_schemas())
            problems += [f"{source}{key}{where(name)}: unknown key{suggestion(key)}" for key in unknown]
            axes.append(Axis(name, tuple(tuple(_as_overrides(value)) for value in sets)))
    if problems:
        raise UserError(*problems)
    return axes


def _line_in_matrix(text: str, name: str) -> int:
    return max(line_of(text, f"matrix.{written}") for written in (name, f'"{name}"', f"'{name}'"))


def _dotted(name: str, value) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and "." not in name:
        for key, entry in value.items():
            yield f"{name}.{key}", entry
    else:
        yield name, value


def _set_by(tables: dict, path: Path | None, text: str) -> Iterator[Override]:
    """What the sections of a bench's file set for every cell. Raises ``UserError`` for unknown ones."""
    problems = []
    for section, keys in tables.items():
        if section not in _sections() or not isinstance(keys, dict):
            own = f"; a bench's own keys: base, matrix, {', '.join(_NUMBERS)}" if section not in _sections() else ""
            problems.append(f"{section} ({path.name}:{line_of(text, section)}): expected a section of the config{own}")
            continue
        for key, value in keys.items():
            if f"{section}.{key}" not in key_schemas():
                problems.append(
                    f"unknown key {section}.{key} ({path.name}:{line_of(text, f'{section}.{key}')}){suggestion(f'{section}.{key}')}"
                )
            yield Override(f"{section}.{key}", toml_text(value))
    if problems:
        raise UserError(*problems)


def _check_clashes(shared: list[Override], axes: list[Axis]) -> None:
    """Raises ``UserError`` where a key is set twice, or is the bench's own."""
    varied: dict[str, str] = {}
    problems = []
    for axis in axes:
        for key in dict.fromkeys(override.key for value in axis.values for override in value):
            if key in varied:
                problems.append(f"{key} varies twice: in {varied[key]} and in {axis.name}")
            if key in _OWN:
                problems.append(f"{key} varies in {axis.name}, but a bench sets it itself ({_OWN[key]})")
            varied[key] = axis.name
    for override in shared:
        if override.key in _OWN:
            problems.append(f"{override.shown}: a bench sets it itself: use {_OWN[override.key]}")
        if override.key in varied:
            problems.append(
                f"{override.shown}, but the key varies in the matrix ({varied[override.key]}): give its values with --vary"
            )
    if problems:
        raise UserError(*problems)


def _sections() -> dict:
    return Config.model_fields


def _as_overrides(keys: dict) -> list[Override]:
    return [Override(key, toml_text(value)) for key, value in keys.items()]
