"""Score the planner's time and memory models against published A100 runs, and write docs/planner_accuracy.md.

    python benchmarks/planner_accuracy.py --published DIR [--write docs/planner_accuracy.md]   # about 5 minutes

DIR holds CSV files with the columns of their sources: Hagemann et al. 2023, "Efficient Parallelization Layouts for
Large-Scale Distributed Model Training" (LLaMA, ZeRO-1), and Bang et al. 2024, "vTrain" (GPT, Megatron-LM). More
models in the same columns are scored too. The files are others' and not part of this repository.
"""

import argparse
import sys
from collections import defaultdict
from dataclasses import dataclass, fields, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from benchmarks.calibrate import CALIBRATED, Constants, fit  # noqa: E402
from benchmarks.foreign_trainers import Kernels, memory_bytes  # noqa: E402
from benchmarks.published_runs import Row, read_folder  # noqa: E402
from parallelize.planner.hardware import A100_CALIBRATION, GIB  # noqa: E402

NAMES = [*sorted(CALIBRATED - {"label"}), *(field.name for field in fields(Kernels))]
# Of all files: LLaMA's and several nodes' rows matter, the many of one node less.
WEIGHTS = {"llama": 1.0, "gpt": 3.0, "gpt, one node": 0.1}


def drained(row: Row) -> Row:
    """LLaMA 13B with flash-attention 2 at 2k tokens: its pipelines run as if the batch were eight of 256 sequences.

    Read off the rows' bubbles: with pp 2, time grows by the same part per micro-batch size that 8 drains give,
    while older rows of the same layouts (flash-attention 1) follow the whole batch.
    """
    run = row.run
    if (run.model, run.seq_len, run.kernel) == ("llama 13B", 2048, "flash2"):
        return replace(row, run=replace(run, drains=8))
    return row


@dataclass(frozen=True)
class Score:
    n_rows: int
    error: float  # mean absolute relative error of time, every row
    undisturbed: float  # without disturbed rows
    rank: float  # Spearman, mean over groups of 4 layouts or more
    regret: float  # mean over groups of 2 or more
    worst_regret: float
    n_groups: int


def _ranks(values) -> np.ndarray:
    ranks = np.empty(len(values))
    ranks[np.argsort(values, kind="stable")] = np.arange(len(values))
    return ranks


def score(rows: list[Row], constants: Constants) -> Score:
    """rows: that have a measured time."""
    measured = np.array([row.run.measured_s for row in rows])
    predicted = np.array([constants.step_seconds(row.run) for row in rows])
    errors = np.abs(predicted / measured - 1)
    groups = defaultdict(list)
    for index, row in enumerate(rows):
        groups[row.group].append(index)
    ranks, regrets = [], []
    for indexes in groups.values():
        ours, theirs = predicted[indexes], measured[indexes]
        if len(indexes) >= 4:
            ranks.append(np.corrcoef(_ranks(ours), _ranks(theirs))[0, 1])
        if len(indexes) >= 2:
            regrets.append(theirs[np.argmin(ours)] / theirs.min() - 1)
    calm = [not row.disturbed for row in rows]
    return Score(
        len(rows), errors.mean(), errors[calm].mean(), np.mean(ranks or [np.nan]),
        np.mean(regrets or [np.nan]), np.max(regrets or [np.nan]), len(regrets),
    )  # fmt: skip


def time_splits(rows: list[Row]) -> list[tuple[str, list[Row], list[Row]]]:
    """(name, rows to fit, rows to score): each model held out; on one node, every other model, and each width."""
    splits = []
    for family in ("llama", "gpt", "gpt, one node"):
        ours = [row for row in rows if row.family == family]
        models = sorted({row.run.model for row in ours}, key=lambda model: (len(model), model))
        if len(models) < 2:
            continue
        if family == "gpt, one node":
            held_out = [(f"{family}: every other (hidden, layers)", models[1::2])]
            for width in sorted({row.run.hidden for row in ours}):
                held_out.append((f"{family}: hidden {width}", [m for m in models if m.startswith(f"gpt {width} ")]))
        else:
            held_out = [(f"{family}: {model}", [model]) for model in models]
        for name, names in held_out:
            fitted = [row for row in ours if row.run.model not in names]
            splits.append((name, fitted, [row for row in ours if row.run.model in names]))
    return splits


def fit_rows(rows: list[Row], step: int = 1, weights=1.0) -> Constants:
    rows = [row for row in rows if not row.disturbed]
    return fit([row.run for row in rows], NAMES, weights=weights)


def percent(value: float) -> str:
    return "" if np.isnan(value) else f"{100 * value:.1f}%"


def score_line(name: str, fitted: str, result: Score) -> str:
    cells = [
        name, result.n_rows, fitted, percent(result.error), percent(result.undisturbed), f"{result.rank:.3f}",
        f"{percent(result.regret)} ({percent(result.worst_regret)}, {result.n_groups})",
    ]  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


TIME_HEAD = """| scored | rows | fitted, on the other rows | held out | without disturbed rows | rank correlation | regret (worst, groups) |
|---|---|---|---|---|---|---|"""


def time_table(rows: list[Row]) -> list[str]:
    lines = [TIME_HEAD]
    for name, to_fit, to_score in time_splits(rows):
        constants = fit_rows(to_fit)
        lines.append(score_line(name, percent(score(to_fit, constants).undisturbed), score(to_score, constants)))
    return lines


def fit_all(rows: list[Row]) -> Constants:
    calm = [row for row in rows if not row.disturbed]
    return fit_rows(calm, weights=np.array([WEIGHTS[row.family] for row in calm]))


def all_table(rows: list[Row], constants: Constants) -> list[str]:
    lines = [TIME_HEAD.replace("fitted, on the other rows | held out", "constants | error")]
    for label, its in (("fitted on all", constants), ("shipped", Constants(A100_CALIBRATION, constants.kernels))):
        for family in WEIGHTS:
            ours = [row for row in rows if row.family == family]
            if ours:
                lines.append(score_line(family, label, score(ours, its)))
    return lines


def threshold(rows: list[Row]) -> float:
    """Bytes that tell the rows that ran from those out of memory best; the middle of equally good ones."""
    sizes = np.array([memory_bytes(row.run) for row in rows])
    failed = np.array([row.run.measured_s is None for row in rows])
    limits = np.sort(sizes)
    limits = (limits[1:] + limits[:-1]) / 2
    right = np.array([np.mean((sizes > limit) == failed) for limit in limits])
    return float(np.median(limits[right == right.max()]))


def memory_table(rows: list[Row]) -> list[str]:
    lines = ["| scored | rows | limit fitted on the others | right | wrongly said to fit | wrongly said not to |"]
    lines.append("|---|---|---|---|---|---|")
    rows = [row for row in rows if row.family == "llama"]
    for model in sorted({row.run.model for row in rows}):
        others, ours = ([row for row in rows if (row.run.model == model) == held] for held in (False, True))
        if not others:
            continue
        limit = threshold(others)
        told = [(memory_bytes(row.run) > limit, row.run.measured_s is None) for row in ours]
        right = sum(said == failed for said, failed in told) / len(told)
        missed, refused = (sum(said == kind != failed for said, failed in told) for kind in (False, True))
        lines.append(f"| {model} | {len(ours)} | {limit / GIB:.1f} GiB | {percent(right)} | {missed} | {refused} |")
    return lines


def report(rows: list[Row]) -> str:
    rows = [drained(row) for row in rows]
    timed = [row for row in rows if row.run.measured_s]
    constants = fit_all(timed)
    shown = [f"| {name} | {constants.value(name):.3g} |" for name in NAMES]
    plain = [replace(row, run=replace(row.run, drains=1)) for row in timed if row.family == "llama"]
    parts = [
        ["## Time, held out", ""], time_table(timed), ["", "LLaMA with no correction of the batch:", ""],
        time_table(plain), ["", "## Time, fitted on all files", ""], all_table(timed, constants),
        ["", "| constant | value |", "|---|---|"], shown, ["", "## Memory", ""], memory_table(rows),
    ]  # fmt: skip
    return "\n".join(line for part in parts for line in part) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", type=Path, required=True, metavar="DIR", help="folder of the CSV files")
    parser.add_argument("--write", type=Path, metavar="PATH", help="also write the report there")
    arguments = parser.parse_args()
    try:
        rows = read_folder(arguments.published)
    except ValueError as error:
        sys.exit(str(error))
    text = report(rows)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


if __name__ == "__main__":
    main()
