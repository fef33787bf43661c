"""``runs --compare``: where two runs part, in numbers and as a picture."""

import argparse
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from trainer.errors import UserError
from trainer.run_folder import (
    check_run,
    differing_keys,
    last_quarter,
    median_rate,
    metrics_lines,
    number_in,
    read_config,
    records_in,
)
from trainer.runs import finite, number_text, print_columns, printable, value_text
from trainer.runs_picture import draw

_NUMBERS = {"loss": "loss", "validation_loss": "validation loss", "tokens_per_s": "tokens/s"}  # key -> title


@dataclass(frozen=True)
class Curves:
    """One run: its config by dotted key (None: cannot be read), and its records by step."""

    folder: Path
    name: str
    config: dict[str, object] | None
    records: dict[int, dict]
    problems: tuple[str, ...]

    def series(self, key: str) -> dict[int, float]:
        """Step -> number, nan where it was not finite."""
        numbers = {step: number_in(record, key) for step, record in self.records.items()}
        return {step: number for step, number in numbers.items() if number is not None}


@dataclass(frozen=True)
class Difference:
    """Between two losses, over the steps that both have logged."""

    steps: list[int]  # these steps
    first: int | None  # the first at which they are not the same number
    first_beyond: int | None  # the first beyond the tolerance
    largest: float  # relative; of the steps where both are finite
    largest_step: int | None
    not_finite: list[int]  # steps at which one of the two, or both, are not


def run(options: argparse.Namespace) -> None:
    """Print the comparison, and draw it. Raises ``UserError``."""
    tolerance, out = options.tolerance, Path(options.out)
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise UserError(f"--tolerance {tolerance}: must be a number, 0 or more")
    pair = tuple(_read(text, Path(options.dir), label) for text, label in zip(options.compare, "AB"))
    for run in pair:
        if out.resolve().is_relative_to(run.folder.resolve()):
            raise UserError(
                f"--out {out} is in the folder of the run {run.folder}, which is only read: name another place"
            )
    keys = [] if None in (pair[0].config, pair[1].config) else differing_keys(run.config for run in pair)
    difference = compare(pair[0].series("loss"), pair[1].series("loss"), tolerance)
    if options.json:
        print(json.dumps(_as_dict(pair, keys, difference, tolerance, out), indent=1, default=str))
    else:
        _print(pair, keys, difference, tolerance)
    panels = {title: [run.series(key) for run in pair] for key, title in _NUMBERS.items()}
    draw([run.name for run in pair], panels, difference.first_beyond, f"first beyond {tolerance:g}", out)
    if not options.json:
        print(f"written: {printable(str(out))}")


def compare(a: dict[int, float], b: dict[int, float], tolerance: float) -> Difference:
    """Two losses by step. One that is not finite differs beyond any tolerance from one that is."""
    steps = sorted(a.keys() & b.keys())
    gaps = {step: _relative(a[step], b[step]) for step in steps}
    finite_gaps = {step: gap for step, gap in gaps.items() if math.isfinite(a[step]) and math.isfinite(b[step])}
    largest_step = max(finite_gaps, key=finite_gaps.get, default=None)
    return Difference(
        steps=steps,
        first=next((step for step in steps if gaps[step] > 0), None),
        first_beyond=next((step for step in steps if gaps[step] > tolerance), None),
        largest=finite_gaps.get(largest_step, 0.0),
        largest_step=largest_step,
        not_finite=[step for step in steps if step not in finite_gaps],
    )


def _relative(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if math.isnan(a) or math.isnan(b):
        return math.inf
    larger = max(abs(a), abs(b))
    return abs(a / larger - b / larger) or math.ulp(0.0)  # they differ, if only in the last bit


def _read(text: str, root: Path, label: str) -> Curves:
    """A run by its folder, or by its name in the table. Raises ``UserError``."""
    folder = Path(text)
    if not os.path.isdir(folder) and os.path.isdir(root / text):
        folder = root / text
    check_run(folder)
    config, problems = None, ()
    try:
        config = read_config(folder)
    except UserError as error:
        problems = error.problems
    records, n_bad = records_in(metrics_lines(folder))
    if not records:
        raise UserError(f"{folder} has no logged step yet: there is nothing to compare")
    if n_bad:
        problems += (f"{folder / 'metrics.jsonl'}: {n_bad} line(s) cannot be read",)
    by_step = {record["step"]: record for record in records}
    return Curves(folder, f"{label}: {printable(text)}", config, dict(sorted(by_step.items())), problems)


def _print(pair: tuple[Curves, Curves], keys: list[str], difference: Difference, tolerance: float) -> None:
    for run in pair:
        print("\n".join([run.name, *(f"  warning: {printable(problem)}" for problem in run.problems)]))
    print()
    if keys:
        rows = [(printable(key), *(_setting(run, key) for run in pair)) for key in keys]
        print_columns(["config", "A", "B"], rows)
    elif None in (pair[0].config, pair[1].config):
        print("config: cannot be compared")
    else:
        print("config: the same")
    print()
    print("\n".join(_loss_lines(pair, difference, tolerance)))


def _setting(run: Curves, key: str) -> str:
    return printable(value_text(run.config[key])) if key in run.config else "(not set)"


def _loss_lines(pair: tuple[Curves, Curves], difference: Difference, tolerance: float) -> list[str]:
    steps = difference.steps
    if steps:
        lines = [f"both logged: {len(steps)} step(s) from {steps[0]} to {steps[-1]}"]
        lines += _difference_lines(pair, difference, tolerance)
    else:
        spans = (f"{run.name[0]} logged steps {min(run.records)} to {max(run.records)}" for run in pair)
        lines = [f"no step has a loss in both: {', '.join(spans)}"]
    for key in _NUMBERS:
        if any(run.series(key) for run in pair):
            lines.append(f"{_title(key)}: " + ", ".join(f"{run.name[0]} {_final_text(run, key)}" for run in pair))
    return lines


def _difference_lines(pair: tuple[Curves, Curves], difference: Difference, tolerance: float) -> list[str]:
    lines = []
    if difference.not_finite:
        lines.append(
            f"not finite in one or both: {len(difference.not_finite)} step(s), first {difference.not_finite[0]}"
        )
    if difference.first is None:
        return [*lines, "the losses never differ, bit for bit"]
    lines.append(f"first difference: {_at(pair, difference.first)}")
    if difference.first_beyond is None:
        lines.append(f"never beyond {tolerance:g} (relative)")
    else:
        lines.append(f"first beyond {tolerance:g} (relative): {_at(pair, difference.first_beyond)}")
    if difference.largest_step is not None:
        lines.append(f"largest relative difference: {difference.largest:.3g} at {_at(pair, difference.largest_step)}")
    return lines


def _at(pair: tuple[Curves, Curves], step: int) -> str:
    """Every digit: the numbers may differ in the last one alone."""
    losses = (run.series("loss")[step] for run in pair)
    return f"step {step}: " + " and ".join("not finite" if math.isnan(loss) else repr(loss) for loss in losses)


def _title(key: str) -> str:
    return "median tokens/s" if key == "tokens_per_s" else f"final {_NUMBERS[key]}"


def _final(run: Curves, key: str) -> tuple[int | None, float | None]:
    """The last step with this number, and the number."""
    series = run.series(key)
    return next(reversed(series.items())) if series else (None, None)


def _final_text(run: Curves, key: str) -> str:
    if key == "tokens_per_s":
        rate = median_rate(last_quarter(list(run.records.values())))
        return "none" if rate is None else f"{rate:,.0f}"
    step, value = _final(run, key)
    return "none" if step is None else f"{number_text(value)} (step {step})"


def _as_dict(pair: tuple[Curves, Curves], keys: list[str], difference: Difference, tolerance: float, out: Path) -> dict:
    """For --json. A config key that a run has not set is missing from its side."""
    steps = difference.steps
    return {
        "runs": [
            {
                "folder": str(run.folder),
                "first_step": min(run.records),
                "last_step": max(run.records),
                **{f"final_{key}": finite(_final(run, key)[1]) for key in ("loss", "validation_loss")},
                **{f"final_{key}_step": _final(run, key)[0] for key in ("loss", "validation_loss")},
                "tokens_per_s": median_rate(last_quarter(list(run.records.values()))),
                "problems": list(run.problems),
            }
            for run in pair
        ],
        "config_compared": None not in (pair[0].config, pair[1].config),
        "config": {key: {run.name[0]: run.config[key] for run in pair if key in run.config} for key in keys},
        "tolerance": tolerance,
        "common_steps": len(steps),
        "first_common_step": steps[0] if steps else None,
        "last_common_step": steps[-1] if steps else None,
        "first_different_step": difference.first,
        "first_step_beyond_tolerance": difference.first_beyond,
        "largest_relative_difference": None if difference.largest_step is None else difference.largest,
        "largest_relative_difference_step": difference.largest_step,
        "not_finite_steps": difference.not_finite,
        "plot": str(out),
    }
