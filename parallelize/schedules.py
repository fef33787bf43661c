"""What each pipeline schedule asks for, and how layers and stages are dealt out. Loads no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ScheduleRule:
    """What a schedule of torch asks of its user.

    stages_per_rank: exact number of virtual stages a rank, None where the user chooses (2 or more).
    v_shaped:        rank r holds stages r and 2 pp - 1 - r, instead of r, r + pp, r + 2 pp, ...
    splits_backward: computes input and weight gradients apart.
    """

    stages_per_rank: int | None
    v_shaped: bool = False
    splits_backward: bool = False


SCHEDULES = {
    "GPipe": ScheduleRule(1),
    "1F1B": ScheduleRule(1),
    "Interleaved1F1B": ScheduleRule(None),
    "LoopedBFS": ScheduleRule(None),
    "InterleavedZeroBubble": ScheduleRule(None, splits_backward=True),
    "ZBVZeroBubble": ScheduleRule(2, v_shaped=True, splits_backward=True),
    "DualPipeV": ScheduleRule(2, v_shaped=True, splits_backward=True),
}


def microbatch_problem(schedule: str, pp: int, n_stages: int, n_microbatches: int) -> str | None:
    """Why ``schedule`` cannot run this many micro-batches, with a number that works; None if it can.

    The rules are those that torch's constructors enforce, asked here before any process starts.
    """
    if schedule in ("1F1B", "DualPipeV") and n_microbatches < n_stages:
        return f"{schedule} needs at least one micro-batch per stage: {n_stages}"
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble"):
        rounds = max(1, n_microbatches // pp)
        if n_microbatches % rounds:
            return f"{schedule} needs a multiple of pp = {pp}: {n_microbatches // pp * pp} or {(n_microbatches // pp + 1) * pp}"
    return None


def balance_uniform(n_layers: int, n_stages: int) -> tuple[int, ...]:
    """Layers per stage, as even as possible. The first stages take the remainder: the last has the head."""
    each, rest = divmod(n_layers, n_stages)
    return tuple(each + (stage < rest) for stage in range(n_stages))


def stages_of_rank(rank: int, pp: int, n_stages: int, v_shaped: bool) -> tuple[int, ...]:
    """Indices of the stages on pipeline rank ``rank``, in the order torch wants them."""
    if v_shaped:
        return (rank, n_stages - 1 - rank)
    return tuple(range(rank, n_stages, pp))
