"""A pipeline schedule written by hand: a .csv file with one row a pipeline rank. Loads no torch.

The format is torch's own for compute-only schedules. A cell is ``STAGE KIND MICRO-BATCH`` without spaces, such
as ``0F3``; an empty one is idle time. Kinds: F forward, B full backward, or apart: I backward of the input, W
of the weights. ``(0F4;3B1)OVERLAP_F_B`` runs two together. Sends and receives are added by torch.
"""

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Action(NamedTuple):
    stage: int
    kind: str  # F, B, I or W
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


@dataclass(frozen=True)
class ScheduleFile:
    """A schedule from a file, checked to run to its end. It fixes pp, the stages' ranks and the micro-batches."""

    path: str
    cells: tuple[tuple[str, ...], ...]  # rank -> its actions in torch's notation; "" is idle time
    stages: tuple[int, ...]  # stage -> its pipeline rank
    n_microbatches: int
    splits_backward: bool

    @property
    def pp(self) -> int:
        return len(self.cells)

    def virtual_stages(self, pp: int, asked: int | None) -> int:
        return asked or len(self.stages) // self.pp

    def stages_problem(self, pp: int, virtual_stages: int) -> str | None:
        if self.pp != pp:
            return f"has {self.pp} rows, one a pipeline rank: use parallel.pp = {self.pp}"
        if virtual_stages * pp != len(self.stages):
            return f"has {len(self.stages)} stages, {len(self.stages) // pp} a rank"
        return None

    def microbatch_problem(self, pp: int, n_stages: int, n_microbatches: int) -> str | None:
        return None if n_microbatches == self.n_microbatches else f"runs {self.n_microbatches}"

    def stage_ranks(self, pp: int, n_stages: int) -> tuple[int, ...]:
        return self.stages


@functools.cache
def read_schedule(path: str) -> ScheduleFile:
    """Read and check a schedule. Raises ``ValueError`` that names the file, the row and the cell."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            cells = [tuple(cell.strip() for cell in row) for row in csv.reader(file) if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"schedule file {path} cannot be read: {error}") from None
    rows = []
    for number, row in enumerate(cells, 1):
        try:
            rows.append([action for cell in row for action in _parse(cell)])
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from None
    try:
        stages, n_microbatches = _placed(rows)
        _check_complete(rows, len(stages), n_microbatches)
        _check_order(rows, len(stages))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    splits = any(action.kind == "W" for row in rows for action in row)
    return ScheduleFile(path, tuple(cells), stages, n_microbatches, splits)


def _parse(cell: str) -> list[Action]:
    if not cell:
        return []
    if match := re.fullmatch(r"(\d+)([FBIW])(\d+)", cell):
        return [Action(int(match[1]), match[2], int(match[3]))]
    if match := re.fullmatch(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B", cell):
        pair = [action for part in match.groups() for action in _parse(part.strip())]
        if [action.kind for action in pair] == ["F", "B"]:
            return pair
        raise ValueError(f"{cell!r} must pair a forward with a full backward, as in (0F4;3B1)OVERLAP_F_B")
    raise ValueError(
        f"{cell!r} is not an action: write STAGE, then F, B, I or W, then MICRO-BATCH, as in 0F3 "
        "(computation only: sends, receives and the like are added)"
    )


def _placed(rows: list[list[Action]]) -> tuple[tuple[int, ...], int]:
    """The rank of each stage, and the number of micro-batches."""
    if not rows:
        raise ValueError("no actions in it: write one row a pipeline rank, such as 0F0,0F1,0B0,0B1")
    ranks: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if ranks.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"stage {action.stage} is in row {ranks[action.stage] + 1} and in row {rank + 1}: keep one"
                )
    n_stages = max(ranks) + 1
    if missing := sorted(set(range(n_stages)) - ranks.keys()):
        raise ValueError(f"stage {missing[0]} has no action, but there is a stage {n_stages - 1}: number them from 0")
    if n_stages % len(rows):
        raise ValueError(f"{n_stages} stages in {len(rows)} rows: torch wants a multiple of the rows")
    return tuple(ranks[stage] for stage in range(n_stages)), max(
        action.microbatch for row in rows for action in row
    ) + 1


def _check_complete(rows: list[list[Action]], n_stages: int, n_microbatches: int) -> None:
    """Each stage runs each micro-batch forward once, and backward once: B, or I and W."""
    actions = [action for row in rows for action in row]
    seen = set(actions)
    if len(seen) < len(actions):
        twice = next(action for action in actions if actions.count(action) > 1)
        raise ValueError(f"{twice} is there twice")
    for stage in range(n_stages):
        for microbatch in range(n_microbatches):
            kinds = "".join(kind for kind in "FBIW" if (stage, kind, microbatch) in seen)
            if kinds not in ("FB", "FIW"):
                raise ValueError(
                    f"stage {stage} has {' and '.join(kinds) or 'nothing'} of micro-batch {microbatch}: "
                    "it needs F, and B or both I and W"
                )


def _check_order(rows: list[list[Action]], n_stages: int) -> None:
    """Run it on paper: every rank waits for what its next action needs; nobody may wait forever."""
    done: set[Action] = set()
    position = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row) and _ready(row[position[rank]], done, n_stages):
                done.add(row[position[rank]])
                position[rank] += 1
                moved = True
    stuck = [f"row {rank + 1} before {row[at]}" for rank, (row, at) in enumerate(zip(rows, position)) if at < len(row)]
    if stuck:
        raise ValueError(f"the ranks wait for each other forever: {', '.join(stuck)}")


def _ready(action: Action, done: set[Action], n_stages: int) -> bool:
    stage, kind, microbatch = action
    if kind == "F":
        return stage == 0 or (stage - 1, "F", microbatch) in done
    if kind == "W":
        return (stage, "I", microbatch) in done
    gradient_is_there = stage == n_stages - 1 or any((stage + 1, k, microbatch) in done for k in "BI")
    return (stage, "F", microbatch) in done and gradient_is_there
