"""Running a pipeline schedule on paper: the order of every rank's actions, and when each would start and end."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from parallelize.schedule_file import Action, ScheduleFile
from parallelize.schedules import Schedule

Orders = tuple[tuple[Action, ...], ...]  # pipeline rank -> its actions, one after another


@dataclass(frozen=True)
class StageTime:
    """Seconds of one micro-batch on one stage: forward, and backward for the input and for the weights."""

    forward_s: float
    input_s: float
    weight_s: float

    def of(self, kind: str) -> float:
        return {
            "F": self.forward_s, "I": self.input_s, "W": self.weight_s, "B": self.input_s + self.weight_s,
        }[kind]  # fmt: skip


@dataclass(frozen=True)
class Replay:
    """spans: pipeline rank -> (action, start, end) in seconds. end_s: of the last action."""

    spans: tuple[tuple[tuple[Action, float, float], ...], ...]

    @property
    def end_s(self) -> float:
        return max(spans[-1][2] for spans in self.spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        return tuple(sum(end - start for _, start, end in spans) for spans in self.spans)

    @property
    def idle_share(self) -> float:
        """The part of all ranks' time, from the first action to the last, in which they run none: the bubble."""
        return 1 - sum(self.busy_s) / (self.end_s * len(self.spans))


@functools.lru_cache(maxsize=4096)
def action_orders(schedule: Schedule, pp: int, virtual_stages: int, n_microbatches: int) -> Orders:
    """What each pipeline rank runs, in order. An overlapped pair becomes its forward and then its backward."""
    if isinstance(schedule, ScheduleFile):
        return schedule.orders
    if schedule.name == "GPipe":
        return tuple(
            tuple(Action(rank, kind, mb) for kind in "FB" for mb in range(n_microbatches)) for rank in range(pp)
        )
    if schedule.name == "1F1B":
        return tuple(_one_forward_one_backward(rank, pp, n_microbatches) for rank in range(pp))
    return _torch_orders(schedule.name, pp, virtual_stages, n_microbatches)


def _one_forward_one_backward(rank: int, pp: int, n_microbatches: int) -> tuple[Action, ...]:
    # What torch runs. What it would list (pipeline_order) puts one forward less before the first backward,
    # a number too high on the last rank, and would never end.
    ahead = min(n_microbatches, pp - rank)
    actions = [Action(rank, "F", mb) for mb in range(ahead)]
    for mb in range(n_microbatches):
        actions.append(Action(rank, "B", mb))
        if ahead + mb < n_microbatches:
            actions.append(Action(rank, "F", ahead + mb))
    return tuple(actions)


def _torch_orders(name: str, pp: int, virtual_stages: int, n_microbatches: int) -> Orders:
    """The lists of torch's own schedule class. Private in 2.11 to 2.13.

    Its constructor wants real stages and plans every send, in seconds for large pipelines: the lists alone
    need no more than these numbers.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    schedule_class = get_schedule_class(name)
    bare = object.__new__(schedule_class)
    rounds = max(1, n_microbatches // pp)
    numbers = dict(
        pp_group_size=pp, n_local_stages=virtual_stages, _stages=[None] * virtual_stages, _n_microbatches=n_microbatches,
        _num_stages=pp * virtual_stages, num_stages=pp * virtual_stages,
        number_of_rounds=rounds, microbatches_per_round=n_microbatches // rounds,
    )  # fmt: skip
    bare.__dict__.update(numbers)
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    orders = []
    for rank in range(pp):
        bare.rank = rank
        listed = (action for action in bare._calculate_single_rank_operations(rank) if action is not None)
        flat = [part for action in listed for part in action.sub_actions or (action,)]
        orders.append(
            tuple(
                Action(part.stage_index, kinds[part.computation_type.name], part.microbatch_index)
                for part in flat
                if part.computation_type.name in kinds
            )
        )
    return tuple(orders)


_GATHERED = 3  # stages of a rank whose parameters torch's runtime holds gathered, at most


@functools.lru_cache(maxsize=1024)
def orders_with_gathers(schedule: Schedule, pp: int, virtual_stages: int, n_microbatches: int) -> Orders:
    """``action_orders`` with the stages' parameters gathered ("U") and freed ("R") in between, micro-batch -1.

    As torch's runtime places them, without its copies of all that is to come, whose time grows with the square.
    """
    orders = action_orders(schedule, pp, virtual_stages, n_microbatches)
    if getattr(schedule, "name", None) in ("GPipe", "1F1B"):  # by FSDP2 itself, at the first forward, for good
        return tuple((Action(actions[0].stage, "U", -1), *actions) for actions in orders)
    return tuple(map(_with_gathers, orders))


def _with_gathers(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    result: list[Action] = []
    gathered: list[int] = []
    frees = len({action.stage for action in actions}) >= _GATHERED
    for action, needed in zip(actions, _stages_ahead(actions)):
        for stage in [stage for stage in gathered if frees and stage not in needed]:
            gathered.remove(stage)
            result.append(Action(stage, "R", -1))
        for stage in [stage for stage in needed if stage not in gathered]:
            gathered.append(stage)
            result.append(Action(stage, "U", -1))
        result.append(action)
    return (*result, *(Action(stage, "R", -1) for stage in gathered))


def count_gathers(actions: tuple[Action, ...], frees: bool) -> dict[int, tuple[int, int]]:
    """Stage -> how often FSDP2 gathers a unit in a run of ``actions`` (with gathers), and one that forwards never free.

    frees: parameters are freed after each forward, for which the backward gathers them again. A backward frees none:
    the pipeline's runtime forbids it, and the next forward finds them.
    """
    counts: dict[int, list[int]] = {action.stage: [0, 0] for action in actions}
    here: tuple[set[int], set[int]] = set(), set()  # stages whose units of either kind are gathered
    for stage, kind, _ in actions:
        for which, stages in enumerate(here):
            if kind == "R":
                stages.discard(stage)
            elif stage not in stages:
                stages.add(stage)
                counts[stage][which] += 1
        if kind == "F" and frees:
            here[0].discard(stage)
    return {stage: (often, once) for stage, (often, once) in counts.items()}


def _stages_ahead(actions: tuple[Action, ...]) -> list[tuple[int, ...]]:
    """For each action its stage and the next others to come, as many as are held gathered."""
    result: list[tuple[int, ...]] = []
    ahead: tuple[int, ...] = ()
    for action in reversed(actions):
        ahead = (action.stage, *(stage for stage in ahead if stage != action.stage))[:_GATHERED]
        result.append(ahead)
    return result[::-1]


def replay(orders: Orders, stage_times: Sequence[StageTime], send_s: float = 0.0) -> Replay:
    """When each action runs, if a rank starts the next of its own as soon as its inputs are there.

    stage_times: by stage. send_s: seconds of an activation, or its gradient, to the neighbouring rank.
    Raises ``ValueError`` if the actions wait for each other without end.
    """
    owner = {action.stage: rank for rank, actions in enumerate(orders) for action in actions}
    last_stage = len(stage_times) - 1
    # Arrival of a micro-batch's activation at a stage, and of its gradient. The last stage makes its own.
    activation: dict[tuple[int, int], float] = {}
    gradient: dict[tuple[int, int], float] = {}
    durations = [{kind: time.of(kind) for kind in "FBIW"} for time in stage_times]
    spans: list[list] = [[] for _ in orders]
    clock = [0.0] * len(orders)
    position = [0] * len(orders)
    ready = list(range(len(orders)))
    waiting: dict[tuple, int] = {}  # what a rank waits for -> the rank
    while ready:
        rank = ready.pop()
        actions, now, index = orders[rank], clock[rank], position[rank]
        while index < len(actions):
            action = actions[index]
            stage, kind, mb = action
            start = now
            if kind == "F" and stage > 0:
                arrived = activation.get((stage, mb))
                if arrived is None:
                    waiting["F", stage, mb] = rank
                    break
                start = max(now, arrived)
            elif kind in "BI" and stage < last_stage:
                arrived = gradient.get((stage, mb))
                if arrived is None:
                    waiting["B", stage, mb] = rank
                    break
                start = max(now, arrived)
            now = start + durations[stage][kind]
            spans[rank].append((action, start, now))
            index += 1
            if kind == "F" and stage < last_stage:
                activation[stage + 1, mb] = now + (send_s if owner[stage + 1] != rank else 0.0)
                woken = waiting.pop(("F", stage + 1, mb), None)
            elif kind in "BI" and stage > 0:
                gradient[stage - 1, mb] = now + (send_s if owner[stage - 1] != rank else 0.0)
                woken = waiting.pop(("B", stage - 1, mb), None)
            else:
                woken = None
            if woken is not None and woken != rank:
                ready.append(woken)
        clock[rank], position[rank] = now, index
    stuck = [str(actions[position[rank]]) for rank, actions in enumerate(orders) if position[rank] < len(actions)]
    if stuck:
        raise ValueError(f"the schedule never ends: {', '.join(stuck)} wait for each other")
    return Replay(tuple(map(tuple, spans)))


def in_flight(orders: Orders) -> tuple[dict[int, int], ...]:
    """Pipeline rank -> stage -> most micro-batches whose activations are held at once, over the rank's own worst moment.

    Held from the forward until the backward for the weights.
    """
    result = []
    for actions in orders:
        held: dict[int, int] = {}
        worst: dict[int, int] = {}
        for stage, kind, _ in actions:
            if kind == "F":
                held[stage] = held.get(stage, 0) + 1
                if sum(held.values()) > sum(worst.values()):
                    worst = dict(held)
            elif kind in "BW":
                held[stage] -= 1
        result.append(worst)
    return tuple(result)
