"""Reading what runs have left in their folders, whole or damaged. Loads no torch, writes nothing."""

import json
import math
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time
from pathlib import Path

import tomli

from trainer.errors import UserError
from trainer.run_state import changed_s, saved_steps, state_of

_FILES = ("config.toml", "metrics.jsonl")
_STEPS = 2**53  # what is beyond was never a step
_OWN_KEY = "job.output_dir"  # differs between any two runs, and says nothing that the name does not


@dataclass(frozen=True)
class RunSummary:
    """A run in one row. Numbers are None where nothing was logged, and nan where what was is not finite."""

    folder: Path
    name: str  # below the folder that was searched
    state: str  # of ``STATES``
    step: int  # the last logged one; 0: none yet
    steps: int | None  # of the whole run, as its config says
    loss: float | None  # at ``step``
    validation_loss: float | None  # the last one
    tokens_per_s: float | None  # median of the last quarter of the logged steps
    checkpoint_step: int | None  # of the newest complete checkpoint
    changed_s: float  # when config or metrics were written last, in seconds since 1970
    config: dict[str, object]  # dotted keys
    notes: tuple[str, ...]  # what is wrong with the folder, or went wrong


def is_run(folder: Path) -> bool:
    return all(os.path.isfile(folder / name) for name in _FILES)  # where it may not be looked at: no


def check_run(folder: Path) -> None:
    """Raise ``UserError`` unless the folder is a run's."""
    if not os.path.isdir(folder):
        raise UserError(f"{folder} is not a folder: give one that a run has written, such as outputs/debug")
    missing = [name for name in _FILES if not os.path.isfile(folder / name)]
    if missing:
        raise UserError(f"{folder} is not a run: it has no {' and no '.join(missing)}")


def find_runs(root: Path) -> Iterator[Path]:
    """The folders of runs at and below ``root``. Links and names with a leading dot are not followed."""
    for place, folders, files in os.walk(root):
        here = Path(place)
        if {*_FILES} <= {*files} and is_run(here):
            yield here
            folders.clear()
        folders[:] = [name for name in folders if not name.startswith(".")]


def read_config(folder: Path) -> dict[str, object]:
    """The keys of ``config.toml`` by dotted name, whichever version wrote them. Raises ``UserError``."""
    path = folder / "config.toml"
    try:
        tables = tomli.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # decoding errors are ValueErrors
        raise UserError(f"{path} cannot be read: {_one_line(error)}") from None
    keys = dict(_flat(tables))
    keys.pop(_OWN_KEY, None)
    return keys


def differing_keys(configs: Iterable[dict[str, object]]) -> list[str]:
    """The keys that are not the same in all of them, in the order of the configs; a key that is missing differs."""
    configs = list(configs)
    every = dict.fromkeys(key for config in configs for key in config)
    return [key for key in every if any(key not in config or config[key] != configs[0].get(key) for config in configs)]


def metrics_lines(folder: Path) -> list[bytes]:
    """The lines of ``metrics.jsonl`` without the last if it is torn, as a kill leaves it. Raises ``UserError``."""
    path = folder / "metrics.jsonl"
    try:
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    except OSError as error:
        raise UserError(f"{path} cannot be read: {_one_line(error)}") from None
    return lines[:-1] if lines and _record(lines[-1]) is None else lines


def records_in(lines: list[bytes]) -> tuple[list[dict], int]:
    """The records, each with a whole number as "step", and the number of lines that hold none."""
    records = [record for line in lines if (record := _record(line)) is not None]
    return records, len(lines) - len(records)


def number_in(record: dict, key: str) -> float | None:
    """A logged number; nan where it was not finite (null in the file), None where there is none."""
    value = record.get(key, "nothing")
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:  # a whole number beyond floating point
        return math.nan


def last_quarter(items: list) -> list:
    return items[-math.ceil(len(items) / 4) :]  # of none: none


def median_rate(records: list[dict]) -> float | None:
    """The median of their tokens/s."""
    rates = [rate for record in records if (rate := number_in(record, "tokens_per_s")) is not None and rate == rate]
    return statistics.median(rates) if rates else None


def summarize(folder: Path, root: Path) -> RunSummary:
    """One row. What cannot be read becomes a note in it."""
    config, config_problems = _or_empty(read_config, folder, {})
    lines, metrics_problems = _or_empty(metrics_lines, folder, [])
    records, n_bad = records_in(last_quarter(lines))  # parsing is what takes the time, with hundreds of runs
    if not records:
        everything, n_bad = records_in(lines)
        records = last_quarter(everything)
    bad = (f"metrics.jsonl: {n_bad} line(s) cannot be read",) if n_bad else ()
    last = records[-1] if records else {"step": 0}
    saved = saved_steps(folder)
    steps = config.get("training.steps")
    steps = steps if type(steps) is int else None
    state, why = state_of(folder, config, last["step"], steps, saved)
    return RunSummary(
        folder=folder,
        name=str(folder.relative_to(root)),
        state=state,
        step=last["step"],
        steps=steps,
        loss=number_in(last, "loss"),
        validation_loss=_last_validation_loss(lines),
        tokens_per_s=median_rate(records),
        checkpoint_step=max(saved, default=None),
        changed_s=max(changed_s(folder / name) for name in _FILES),
        config=config,
        notes=(*config_problems, *metrics_problems, *bad, *why),
    )


def _or_empty(read, folder: Path, empty):
    """What ``read`` finds in the folder, or ``empty`` and what is wrong."""
    try:
        return read(folder), ()
    except UserError as error:
        return empty, error.problems


def _last_validation_loss(lines: list[bytes]) -> float | None:
    for line in reversed(lines):
        if b'"validation_loss"' in line and (record := _record(line)) is not None:
            return number_in(record, "validation_loss")
    return None


def _record(line: bytes) -> dict | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < _STEPS else None


def _flat(table: dict, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Dotted keys and values; what JSON cannot hold (dates, inf, nan) as text, so that equal ones are equal."""
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            is_odd = isinstance(value, (date, datetime, time)) or (
                isinstance(value, float) and not math.isfinite(value)
            )
            yield f"{prefix}{key}", str(value) if is_odd else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
