"""A pipeline schedule written by hand: a .csv file with one row a pipeline rank. Loads no torch.

The format is torch's own for compute-only schedules. A cell is ``STAGE KIND MICRO-BATCH`` without spaces, such
as ``0F3``; an empty one is idle time. Kinds: F forward, B full backward, or apart: I backward of the input, W
of the weights. ``(0F4;3B1)OVERLAP_F_B`` runs two together. Sends and receives are added by torch.
"""

import csv
import functools
import re
from collections import Counter
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

    @property
    def orders(self) -> "tuple[tuple[Action, ...], ...]":
        """Rank -> its actions one after another; a pair as its forward, then its backward."""
        return tuple(tuple(action for cell in row for action in _parse(cell)) for row in self.cells)

    def virtual_stages(self, pp: int, asked: int | None) -> int:
        return asked or len(self.stages) // self.pp

    def stages_problem(self, pp: int, virtual_stages: int) -> str | None:
        if self.pp != pp:
            return f"has {self.pp} rows, one a pipeline rank: use parallel.pp = {self.pp}"
        if virtual_stages * pp != len(self.stages):
            return f"has {len(self.stages)} stages, {len(self.stages) // pp} a rank: leave parallel.virtual_stages out"
        return None

    def microbatch_problem(self, pp: int, n_stages: int, n_microbatches: int) -> str | None:
        if n_microbatches == self.n_microbatches:
            return None
        if n_microbatches % self.n_microbatches == 0:
            return f"runs {self.n_microbatches}: set parallel.schedule_microbatches = {self.n_microbatches}"
        return f"runs {self.n_microbatches}: use as many, or a multiple with parallel.schedule_microbatches"

    def stage_ranks(self, pp: int, n_stages: int) -> tuple[int, ...]:
        return self.stages


Cell = tuple[Action, ...]  # one action, two that run together, or none


@functools.cache
def read_schedule(path: str) -> ScheduleFile:
    """Read and check a schedule. Raises ``ValueError`` that names the file, the row and the cell."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            cells = [tuple(cell.strip() for cell in row) for row in csv.reader(file) if any(map(str.strip, row))]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    rows: list[list[Cell]] = []
    for number, row in enumerate(cells, 1):
        try:
            rows.append([_parse(cell) for cell in row])
        except ValueError as error:
            raise ValueError(f"{path}, row {number}: {error}") from None
    actions = [[action for cell in row for action in cell] for row in rows]
    try:
        stages, n_microbatches = _placed(actions)
        _check_complete(actions, len(stages), n_microbatches)
        _check_order(rows, len(stages))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    splits = any(action.kind == "W" for row in actions for action in row)
    return ScheduleFile(path, tuple(cells), stages, n_microbatches, splits)


def _parse(cell: str) -> Cell:
    if not cell:
        return ()
    if match := re.fullmatch(r"([0-9]{1,6})([FBIW])([0-9]{1,6})", cell):
        return (Action(int(match[1]), match[2], int(match[3])),)
    if match := re.fullmatch(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B", cell):
        pair = _parse(match[1].strip()) + _parse(match[2].strip())
        if [action.kind for action in pair] == ["F", "B"]:
            return pair
        raise ValueError(f"{cell!r} must pair a forward with a full backward, as in (0F4;3B1)OVERLAP_F_B")
    raise ValueError(
        f"{cell!r} is not an action: write STAGE, then F, B, I or W in capitals, then MICRO-BATCH, as in 0F3, with commas "
        "between actions (computation only: sends, receives and the like are added)"
    )


def _placed(rows: list[list[Action]]) -> tuple[tuple[int, ...], int]:
    """The rank of each stage, and the number of micro-batches."""
    if not rows:
        raise ValueError("no actions in it: write one row a pipeline rank, such as 0F0,0F1,0B0,0B1")
    if len(rows) == 1:
        raise ValueError("only one row with actions: a pipeline has two ranks or more, one a row")
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
    """Each stage runs each micro-batch forward once, and backward once: B, or I and W. The last one in order."""
    counts = Counter(action for row in rows for action in row)
    if twice := [action for action, count in counts.items() if count > 1]:
        raise ValueError(f"{twice[0]} is there twice")
    for stage in range(n_stages):
        for microbatch in range(n_microbatches):
            kinds = "".join(kind for kind in "FBIW" if (stage, kind, microbatch) in counts)
            if kinds not in ("FB", "FIW"):
                raise ValueError(
                    f"stage {stage} has {' and '.join(kinds) or 'nothing'} of micro-batch {microbatch}: "
                    "it needs F, and B or both I and W"
                )
    forwards = [a.microbatch for row in rows for a in row if a.stage == n_stages - 1 and a.kind == "F"]
    if forwards != sorted(forwards):
        # Torch 2.13 stores losses as they come and looks them up by micro-batch: gradients would be silently wrong.
        raise ValueError(f"the last stage, {n_stages - 1}, must run its forwards in the order of the micro-batches")


def _check_order(rows: list[list[Cell]], n_stages: int) -> None:
    """Run it on paper: every rank waits for what its next cell needs; nobody may wait forever."""
    done: set[Action] = set()
    position = [0] * len(rows)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row) and _ready(row[position[rank]], done, n_stages):
                done.update(row[position[rank]])
                position[rank] += 1
                moved = True
    stuck = [
        f"row {rank + 1} before {'+'.join(map(str, row[at]))}"
        for rank, (row, at) in enumerate(zip(rows, position))
        if at < len(row)
    ]
    if stuck:
        raise ValueError(f"the ranks wait for each other forever: {', '.join(stuck)}")


def _ready(cell: Cell, done: set[Action], n_stages: int) -> bool:
    """Whether all that comes from elsewhere is there; of a pair, the backward may use the forward beside it."""
    for stage, kind, microbatch in cell:
        if kind == "F":
            ready = stage == 0 or (stage - 1, "F", microbatch) in done
        elif kind == "W":
            ready = (stage, "I", microbatch) in done
        else:
            forward = Action(stage, "F", microbatch)
            gradient_is_there = stage == n_stages - 1 or any((stage + 1, k, microbatch) in done for k in "BI")
            ready = (forward in done or forward in cell) and gradient_is_there
        if not ready:
            return False
    return True
