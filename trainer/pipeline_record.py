"""Timing a pipeline's actions: on logged steps for the bubble, on chosen steps into files, one a step and pipeline rank."""

import json
import sys
from collections.abc import Collection
from pathlib import Path

from parallelize.mesh import Mesh
from parallelize.planner.replay import Action, Replay
from trainer.errors import UserError
from trainer.output_folder import write_whole


class PipelineRecord:
    """Times the actions of this rank; of ``steps``, the first tensor and data rank of each pipeline rank writes them down.

    pipeline: what runs a step; not looked at without pipeline ranks.
    """

    def __init__(self, pipeline, steps: Collection[int], folder: Path, mesh: Mesh):
        self._pipeline = pipeline if mesh.layout.pp > 1 else None
        writes = mesh.dp_index == 0 and mesh.index("tp") == 0
        self._steps = frozenset(steps) if writes else frozenset()
        self._folder, self._rank = folder, mesh.index("pp")
        self._times = False
        # Of the last step that was timed, in seconds from its start:
        self.busy_s = self.begin_s = self.end_s = 0.0

    def begin(self, step: int, reported: bool) -> None:
        self._times = self._pipeline is not None and (reported or step in self._steps)
        if self._times:
            self._pipeline.time_next()

    def end(self, step: int) -> None:
        """Where a chosen step's actions cannot be written, the run goes on."""
        if not self._times:
            return
        times = self._pipeline.times
        actions = times.read()
        self.busy_s = sum(end - start for *_, start, end in actions)
        self.begin_s = min(start for *_, start, _ in actions) - times.started_at
        self.end_s = max(end for *_, end in actions) - times.started_at
        if step not in self._steps:
            return
        try:
            self._folder.mkdir(exist_ok=True)
            write_whole(_file(self._folder, step, self._rank), json.dumps(actions))
        except (OSError, UserError) as error:
            print(f"warning: the pipeline's record of step {step} is lost: {error}", file=sys.stderr, flush=True)


def _file(folder: Path, step: int, rank: int) -> Path:
    return folder / f"pipeline-{step:08}-rank-{rank}.json"


def read_record(folder: Path, pp: int) -> tuple[int, Replay]:
    """The last step that every pipeline rank has noted, and its spans from the step's first action on, in seconds.

    Raises ``UserError``.
    """
    steps = [
        {int(path.name.split("-")[1]) for path in folder.glob(f"pipeline-*-rank-{rank}.json")} for rank in range(pp)
    ]
    complete = set.intersection(*steps)
    if not complete:
        raise UserError(
            f"{folder} has no record of a step of all {pp} pipeline ranks: train with --metrics.pipeline_steps=[5], for example"
        )
    step = max(complete)
    try:
        ranks = [json.loads(_file(folder, step, rank).read_text(encoding="utf-8")) for rank in range(pp)]
        began = min(start for actions in ranks for *_, start, _ in actions)
        spans = tuple(
            tuple(
                (Action(stage, kind, mb), start - began, end - began)
                for stage, kind, mb, start, end in sorted(actions, key=lambda action: action[3])
            )
            for actions in ranks
        )
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"the record of step {step} in {folder} cannot be read: {error}") from None
    return step, Replay(spans)
