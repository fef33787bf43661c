"""A bench in numbers: each cell's medians and spread, as a table, rows for TensorBoard and a picture."""

import math
import os
import platform
import shutil
import statistics
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from trainer.bench_matrix import Cell
from trainer.config_rules import resolve_config
from trainer.errors import UserError
from trainer.hardware import GIB
from trainer.runs import print_columns, printable


@dataclass(frozen=True)
class Row:
    """A cell and what its runs add up to. numbers: see ``numbers_of``; {} without a run that is done."""

    cell: Cell
    state: str  # "done", "failed", "cannot run", "to do"
    why: str | None
    layout: str | None
    numbers: dict


def row_of(cell: Cell, runs: list[dict]) -> Row:
    done, failed = ([run for run in runs if run["state"] == state] for state in ("done", "failed"))
    if cell.config is None:
        return Row(cell, "cannot run", "; ".join(cell.problems), None, {})
    layout = "auto" if cell.config.parallel.layout == "auto" else str(resolve_config(cell.config, cell.nproc).layout)
    if failed:
        return Row(cell, "failed", failed[-1]["why"], layout, numbers_of(done))
    return Row(cell, "done" if done else "to do", None, layout, numbers_of(done))


def numbers_of(runs: list[dict]) -> dict:
    """Of runs that are done, all their steps together: median and quartiles of what each step has, medians of the rest.

    recompilations: graphs that the worst run compiled after its first step.
    """
    if not runs:
        return {}
    of_steps = {
        key: [value for run in runs for value in run[key]]
        for key in ("tokens_per_s", "step_time_s", "data_time_s", "mfu")
    }
    numbers = {key: quartiles(values) for key, values in of_steps.items() if None not in values}
    numbers["tokens_per_s_by_run"] = [statistics.median(run["tokens_per_s"]) for run in runs]
    for key in ("memory_peak_bytes", "first_step_time_s", "compile_time_s", "compiled_graphs", "wall_s", "loss"):
        values = [run[key] for run in runs if run[key] is not None]
        numbers[key] = statistics.median(values) if values else None
    numbers["recompilations"] = max(run["compiled_graphs"] - run["first_compiled_graphs"] for run in runs)
    return numbers


def quartiles(values: list[float]) -> dict[str, float]:
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0], "n": 1}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3, "n": len(values)}


def run_text(run: dict) -> str:
    """One run on one line."""
    if run["state"] == "failed":
        return run["why"]
    rate, memory = quartiles(run["tokens_per_s"]), run["memory_peak_bytes"] / GIB
    compiled = (
        f", compiled {run['compiled_graphs']:.0f} graph(s) in {run['compile_time_s']:.1f} s"
        if run["compiled_graphs"]
        else ""
    )
    return f"{rate['median']:,.0f} tokens/s ({rate['q1']:,.0f} to {rate['q3']:,.0f}), peak {memory:.2f} GiB{compiled}; {run['wall_s']:.0f} s in all"


def print_rows(rows: list[Row]) -> None:
    """Columns in which no row has anything are left out. "vs first" compares with the first row that is done."""
    first = next((row.numbers["tokens_per_s"]["median"] for row in rows if row.numbers), None)
    columns = {_short(axis): [row.cell.varied[axis] for row in rows] for axis in rows[0].cell.varied}
    if len({row.layout for row in rows} - {None}) > 1:
        columns["layout"] = [row.layout or "" for row in rows]
    for head, cell_text in _COLUMNS.items():
        columns[head] = [cell_text(row.numbers) if row.numbers else "" for row in rows]
    columns["vs first"] = [
        f"{row.numbers['tokens_per_s']['median'] / first:.3f}" if row.numbers else "" for row in rows
    ]
    columns["note"] = ["" if row.state == "done" else ": ".join(filter(None, (row.state, row.why))) for row in rows]
    columns = {head: cells for head, cells in columns.items() if any(cells)}
    print_columns(
        list(columns), [tuple(map(printable, row)) for row in zip(*columns.values())], right=(*_COLUMNS, "vs first")
    )


def _span(numbers: dict, key: str, scale: float, form: str) -> str:
    q1, q3 = (numbers[key][name] * scale for name in ("q1", "q3"))
    return f"{q1:{form}} to {q3:{form}}"


_COLUMNS = {
    "tokens/s": lambda n: f"{n['tokens_per_s']['median']:,.0f}",
    "quartiles": lambda n: _span(n, "tokens_per_s", 1, ",.0f"),
    "step ms": lambda n: f"{1e3 * n['step_time_s']['median']:,.1f}",
    "MFU": lambda n: f"{n['mfu']['median']:.1%}" if "mfu" in n else "",
    "peak GiB": lambda n: f"{n['memory_peak_bytes'] / GIB:.2f}",
    "first step s": lambda n: "" if n["first_step_time_s"] is None else f"{n['first_step_time_s']:.1f}",
    "compile s": lambda n: f"{n['compile_time_s']:.1f}" if n["compiled_graphs"] else "",
    "graphs": lambda n: f"{n['compiled_graphs']:.0f}" if n["compiled_graphs"] else "",
    "recompiled": lambda n: f"{n['recompilations']}" if n["compiled_graphs"] else "",
    "loss": lambda n: "" if n["loss"] is None else f"{n['loss']:.6f}",
}


def _short(axis: str) -> str:
    return axis.rsplit(".", 1)[-1]


def machine() -> dict:
    """What the numbers are of. Found out without torch, which would take memory of the GPU that the runs have to themselves."""
    drivers = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    gpus = [
        line.split(":", 1)[1].strip()
        for path in drivers
        for line in path.read_text().splitlines()
        if line.startswith("Model:")
    ]
    return {
        "torch": version("torch"), "python": platform.python_version(), "platform": platform.platform(),
        "gpus": gpus,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
    }  # fmt: skip


def write_tensorboard(rows: list[Row], folder: Path) -> None:
    """A row each in the table of runs (the tab HParams), which plots throughput against the keys that vary and the layout."""
    from trainer.tensorboard import write_row

    shutil.rmtree(folder, ignore_errors=True)
    for row in rows:
        n = row.numbers
        sets = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in row.cell.sets.items()
        }
        metrics = {
            "throughput/tokens_per_s": n["tokens_per_s"]["median"], "time/step_s": n["step_time_s"]["median"],
            "memory/peak_bytes": n["memory_peak_bytes"], "compile/time_s": n["compile_time_s"],
            "compile/recompilations": n["recompilations"], "throughput/mfu": n["mfu"]["median"] if "mfu" in n else math.nan,
        }  # fmt: skip
        write_row(folder / row.cell.name, sets | {"layout": row.layout, "processes": row.cell.nproc}, metrics)


def draw(rows: list[Row], path: Path) -> None:
    """Bars of throughput with their quartiles, of memory, and of compile time where something was compiled, as a PNG.

    Raises ``UserError``.
    """
    try:
        import matplotlib
    except ImportError:
        raise UserError("a picture needs matplotlib: pip install -e '.[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [", ".join(f"{_short(axis)} {text}" for axis, text in row.cell.varied.items()) for row in rows]
    panels = {
        "tokens/s, median and quartiles": [row.numbers["tokens_per_s"] for row in rows],
        "peak memory, GiB": [row.numbers["memory_peak_bytes"] / GIB for row in rows],
        "compile time, s": [row.numbers["compile_time_s"] for row in rows],
    }
    panels = {title: values for title, values in panels.items() if any(values)}
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(4.5 * len(panels) + 2, 1.2 + 0.35 * len(rows)),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    with matplotlib.rc_context({"text.parse_math": False}):
        for axis, (title, values), color in zip(axes[0], panels.items(), ("#8ab6e8", "#b9d8b0", "#e8c38a")):
            if isinstance(values[0], dict):
                around = [[v["median"] - v["q1"] for v in values], [v["q3"] - v["median"] for v in values]]
                axis.barh(range(len(rows)), [v["median"] for v in values], xerr=around, capsize=3, color=color)
            else:
                axis.barh(range(len(rows)), values, color=color)
            axis.set_title(title, fontsize=10)
            axis.grid(axis="x", alpha=0.3)
        axes[0, 0].set_yticks(range(len(rows)), names, fontsize=8)
        axes[0, 0].invert_yaxis()
        try:
            figure.savefig(path, dpi=120, format="png")
        except OSError as error:
            raise UserError(f"{path} cannot be written: {error}") from None
        finally:
            pyplot.close(figure)
