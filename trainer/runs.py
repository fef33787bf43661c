"""The ``runs`` command: the runs below a folder as a table, or two of them against each other."""

import argparse
import json
import math
import os
import sys
import unicodedata
from datetime import datetime
from pathlib import Path

from trainer.errors import UserError
from trainer.run_folder import RunSummary, differing_keys, find_runs, summarize
from trainer.run_state import STATES

STATES_HELP = "\n".join(
    [
        "states:",
        *(f"  {state:<14} {meaning}" for state, meaning in STATES.items()),
        "",
        "The run that changed last comes last. step is the last logged one; tokens/s the median of the last quarter of",
        "the logged steps; config holds the keys in which the listed runs differ. With --compare, a relative difference",
        "is |a - b| / max(|a|, |b|), over the steps that both runs have logged. Nothing is written into a run's folder.",
    ]
)
_WIDE = 100_000  # columns: a file or a pipe cuts no line
_STYLES = {"running": "cyan", "finished": "green", "failed": "bold red", "not finite": "bold red", "unknown": "yellow"}
_UNPRINTABLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories of Unicode


def main(options: argparse.Namespace) -> int:
    """Exit code 0; raises ``UserError``."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding has not
    try:
        if options.compare:
            from trainer import runs_compare

            runs_compare.run(options)
        else:
            _list(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough, as "head" has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _list(options: argparse.Namespace) -> None:
    runs = list_runs(Path(options.dir))
    keys = differing_keys(run.config for run in runs if run.config)
    if options.json:
        print(json.dumps({"dir": options.dir, "runs": [_as_dict(run, keys) for run in runs]}, indent=1, default=str))
    elif runs:
        print_table(runs, keys)
    else:
        print(f"no runs below {options.dir}: a run is a folder with config.toml and metrics.jsonl")


def list_runs(root: Path) -> list[RunSummary]:
    """The runs at and below ``root``, the one that changed last at the end. Raises ``UserError``."""
    if not os.path.isdir(root):
        raise UserError(f"{root} is not a folder: give the one that holds the runs, such as outputs")
    try:
        os.scandir(root).close()
    except OSError as error:
        raise UserError(f"{root} cannot be read: {error.strerror}") from None
    return sorted((summarize(folder, root) for folder in find_runs(root)), key=lambda run: (run.changed_s, run.name))


def print_table(runs: list[RunSummary], keys: list[str]) -> None:
    """Columns in which no run has anything are left out."""
    columns = {
        "name": [printable(run.name) for run in runs],
        "state": [run.state for run in runs],
        "step": [f"{run.step}/{run.steps or '?'}" for run in runs],
        "loss": [number_text(run.loss) for run in runs],
        "validation": [number_text(run.validation_loss) for run in runs],
        "tokens/s": ["" if run.tokens_per_s is None else f"{run.tokens_per_s:,.0f}" for run in runs],
        "config": [printable(_config_text(run, keys)) for run in runs],
        "note": [printable("; ".join(run.notes)) for run in runs],
    }
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    print_columns(list(columns), list(zip(*columns.values())), right=("step", "loss", "validation", "tokens/s"))


def print_columns(heads: list[str], rows: list[tuple[str, ...]], right: tuple[str, ...] = ()) -> None:
    """In a terminal as wide as it is; else one line a row, however long, without colours."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    in_terminal = sys.stdout.isatty()
    table = Table(box=box.SIMPLE_HEAD if in_terminal else None, pad_edge=False, header_style="bold")
    for head in heads:
        is_number = head in right
        table.add_column(head, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    if in_terminal:
        Console().print(table)
        return
    console = Console(width=_WIDE, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    print("\n".join(line.rstrip() for line in capture.get().splitlines()))


def number_text(value: float | None) -> str:
    if value is None:
        return ""
    if math.isnan(value):
        return "not finite"
    return f"{value:.6f}" if abs(value) < 1e6 else f"{value:.6e}"


def value_text(value) -> str:
    """A value of the config, as on the command line."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def printable(text: str) -> str:
    """Without what moves the cursor, and without the surrogates that stand for bytes that are no UTF-8."""
    return "".join("?" if unicodedata.category(char) in _UNPRINTABLE else char for char in text)


def finite(value: float | None) -> float | None:
    """For JSON, which has no nan."""
    return None if value is None or math.isnan(value) else value


def _config_text(run: RunSummary, keys: list[str]) -> str:
    return " ".join(f"{key}={value_text(run.config[key])}" for key in keys if key in run.config)


def _as_dict(run: RunSummary, keys: list[str]) -> dict:
    return {
        "name": run.name,
        "folder": str(run.folder),
        "state": run.state,
        "step": run.step,
        "steps": run.steps,
        "loss": finite(run.loss),
        "loss_is_finite": None if run.loss is None else not math.isnan(run.loss),
        "validation_loss": finite(run.validation_loss),
        "tokens_per_s": run.tokens_per_s,
        "checkpoint_step": run.checkpoint_step,
        "changed": datetime.fromtimestamp(run.changed_s).astimezone().isoformat(timespec="seconds"),
        "config": {key: run.config[key] for key in keys if key in run.config},
        "notes": list(run.notes),
    }
