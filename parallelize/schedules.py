"""What each pipeline schedule asks for, and where layers and stages go. Loads no torch."""

from dataclasses import dataclass

from parallelize.schedule_file import ScheduleFile, read_schedule


@dataclass(frozen=True)
class TorchSchedule:
    """A schedule that torch brings, and what it asks of its user.

    stages_per_rank: exact number of virtual stages a rank, None where the user chooses (2 or more).
    v_shaped:        rank r holds stages r and 2 pp - 1 - r, instead of r, r + pp, r + 2 pp, ...
    splits_backward: computes input and weight gradients apart.
    """

    name: str
    stages_per_rank: int | None
    v_shaped: bool = False
    splits_backward: bool = False

    def virtual_stages(self, pp: int, asked: int | None) -> int:
        """Stages a rank: as asked, else what the schedule takes."""
        return asked or self.stages_per_rank or 2

    def stages_problem(self, pp: int, virtual_stages: int) -> str | None:
        """Why the schedule cannot run so many stages a rank; None if it can."""
        if self.stages_per_rank is None and virtual_stages < 2:
            return "takes 2 or more stages a rank; for 1 use 1F1B or GPipe"
        if self.stages_per_rank not in (None, virtual_stages):
            more = "; for more use Interleaved1F1B" if self.stages_per_rank == 1 else ""
            return f"takes exactly {self.stages_per_rank} stage{'s' * (self.stages_per_rank > 1)} a rank{more}"
        return None

    def microbatch_problem(self, pp: int, n_stages: int, n_microbatches: int) -> str | None:
        """Why the schedule cannot run this many micro-batches, with a number that works; None if it can.

        The rules are those that torch's constructors enforce, asked here before any process starts.
        """
        if self.name in ("1F1B", "DualPipeV") and n_microbatches < n_stages:
            return f"needs at least one micro-batch per stage: {n_stages}"
        if self.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
            rounds = max(1, n_microbatches // pp)
            if n_microbatches % rounds:
                below = n_microbatches // pp * pp
                return f"runs them in rounds of pp = {pp} or a little more, all alike: use {below} or {below + pp}"
        return None

    def stage_ranks(self, pp: int, n_stages: int) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        if self.v_shaped:
            return (*range(pp), *reversed(range(pp)))
        return tuple(stage % pp for stage in range(n_stages))


_TORCH = {
    schedule.name: schedule
    for schedule in (
        TorchSchedule("GPipe", 1),
        TorchSchedule("1F1B", 1),
        TorchSchedule("Interleaved1F1B", None),
        TorchSchedule("LoopedBFS", None),
        TorchSchedule("InterleavedZeroBubble", None, splits_backward=True),
        TorchSchedule("ZBVZeroBubble", 2, v_shaped=True, splits_backward=True),
        TorchSchedule("DualPipeV", 2, v_shaped=True, splits_backward=True),
    )
}


Schedule = TorchSchedule | ScheduleFile


def schedule_of(name_or_path: str) -> Schedule:
    """A schedule of torch by its name, or the one written in a .csv file.

    Raises ``ValueError`` for a file that cannot be read or run.
    """
    return _TORCH.get(name_or_path) or read_schedule(name_or_path)


def balance_uniform(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible. The first stages take the remainder: the last has the head."""
    each, rest = divmod(n_layers, n_stages)
    return tuple(each + (stage < rest) for stage in range(n_stages))
