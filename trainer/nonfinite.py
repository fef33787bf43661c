"""Steps whose loss or gradient is inf or nan: their update is left out (``TrainStep.update``); here is what follows."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch.distributed as dist

from trainer.errors import StoppedRun
from trainer.step import StepResult


class NonFiniteError(StoppedRun):
    """Loss or gradient norm was inf or nan, and the config says to stop, or there were too many of them."""


@dataclass
class NonFiniteGuard:
    """Counts such steps, writes down where each came from, and stops the run. Called by all ranks alike."""

    folder: Path  # the run's
    place: str  # this rank's, as in ``Mesh.place``
    parameter_names: Sequence[str]  # this rank's, in the order of ``StepResult.gradient_norms``
    limit: int  # so many in a row stop the run
    n_skipped: int = 0  # since step 1
    in_a_row: int = 0

    def state(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"skipped_steps": self.n_skipped, "nonfinite_in_a_row": self.in_a_row}

    def judge(self, step: int, skipped: bool, result: StepResult) -> None:
        """Raises ``NonFiniteError``."""
        if not skipped:
            self.in_a_row = 0
            return
        self.n_skipped += 1
        self.in_a_row += 1
        loss, norm = result.loss.item(), result.grad_norm.item()
        where = self._write_down(step, result)
        said = f"step {step}: loss {loss}, gradient norm {norm}, {where}"
        if self.in_a_row < self.limit:
            if dist.get_rank() == 0:
                print(f"warning: {said}; the update is left out", file=sys.stderr, flush=True)
            return
        hint = 'to go on past such steps: training.nonfinite = "skip"'
        if self.limit > 1:
            hint = f"the {self.in_a_row}th in a row, which is training.nonfinite_limit"
        raise NonFiniteError(f"stopped at {said}. The update was not applied; {hint}")

    def _write_down(self, step: int, result: StepResult) -> str:
        """A file with every rank that has seen something, and a line that names the first."""
        norms = {name: norm.item() for name, norm in zip(self.parameter_names, result.gradient_norms)}
        bad = [name for name, norm in norms.items() if not isfinite(norm)]
        share = result.loss_share.item()
        mine = {"place": self.place, "loss_is_finite": isfinite(share), "gradients_not_finite": bad}
        everyone: list = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        seen = [one for one in everyone if one["gradients_not_finite"] or not one["loss_is_finite"]]
        if not seen:
            return "though every rank's own part is finite: the sum overflows"
        path = self.folder / "nonfinite" / f"step-{step:08d}.json"
        if dist.get_rank() == 0:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"step": step, "ranks": seen}, indent=1) + "\n", encoding="utf-8")
        # A loss that is not finite spoils every gradient: where there is one it is the cause.
        first = next((one for one in seen if not one["loss_is_finite"]), seen[0])
        names = first["gradients_not_finite"]
        what = "its loss" if not first["loss_is_finite"] else names[0]
        more = f" and {len(names) - 1} more" if first["loss_is_finite"] and len(names) > 1 else ""
        others = f", {len(seen) - 1} other ranks" if len(seen) > 1 else ""
        return f"from {first['place']}: {what}{more}{others} (all in {path})"
