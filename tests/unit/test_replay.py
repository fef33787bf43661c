"""Schedules on paper: torch's own lists, the published bubbles, and how many micro-batches are in flight."""

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from parallelize.planner.replay import StageTime, action_orders, count_gathers, in_flight, orders_with_gathers, replay
from parallelize.schedule_file import Action
from parallelize.schedules import schedule_of


def bubble(name: str, virtual_stages: int, pp: int = 8, n_microbatches: int = 32, send_s: float = 0.0) -> float:
    """Over the ideal time, with forward, input and weight gradient of a rank's layers taking 1 s each."""
    orders = action_orders(schedule_of(name), pp, virtual_stages, n_microbatches)
    part = 1 / virtual_stages
    done = replay(orders, [StageTime(part, part, part)] * (pp * virtual_stages), send_s)
    ideal = 3 * n_microbatches
    assert done.busy_s == pytest.approx([ideal] * pp)
    return (done.end_s - ideal) / ideal


@pytest.mark.parametrize(
    "name, virtual_stages, expected",
    [
        ("GPipe", 1, 7 / 32),
        ("1F1B", 1, 7 / 32),
        ("Interleaved1F1B", 2, 7 / 64),
        ("Interleaved1F1B", 4, 7 / 128),
        ("LoopedBFS", 2, 7 / 64),
        ("InterleavedZeroBubble", 1, 7 / 96),
        ("InterleavedZeroBubble", 2, 7 / 192),
        ("ZBVZeroBubble", 2, 0.036),
    ],
)
def test_bubbles_of_equal_stages(name, virtual_stages, expected):
    assert bubble(name, virtual_stages) == pytest.approx(expected, abs=5e-4)


@pytest.mark.parametrize("frees, expected", [(False, (1, 1)), (True, (2 + 7, 1))])
def test_gathers_of_1f1b(frees, expected):
    # Freed, a unit is gathered for the two forwards before the first backward, and for each backward after a forward.
    orders = orders_with_gathers(schedule_of("1F1B"), 2, 1, 8)
    assert count_gathers(orders[0], frees) == {0: expected}


def test_sends_make_the_bubble_longer():
    # Down with an activation and up with a gradient, over 7 hops each.
    assert bubble("GPipe", 1, send_s=0.5) * 96 == pytest.approx(21 + 14 * 0.5)


def test_the_slowest_stage_sets_the_pace():
    times = [StageTime(1, 1, 1)] * 3 + [StageTime(2, 2, 2)]
    done = replay(action_orders(schedule_of("1F1B"), 4, 1, 16), times)
    assert done.end_s == pytest.approx(16 * 6 + 3 * 3)


@pytest.mark.parametrize("pp, n_microbatches", [(4, 8), (4, 2), (8, 32)])
def test_1f1b_holds_as_many_as_stages_follow(pp, n_microbatches):
    held = in_flight(action_orders(schedule_of("1F1B"), pp, 1, n_microbatches))
    assert [sum(stages.values()) for stages in held] == [min(n_microbatches, pp - rank) for rank in range(pp)]


def test_gpipe_holds_all():
    assert in_flight(action_orders(schedule_of("GPipe"), 4, 1, 8)) == tuple({rank: 8} for rank in range(4))


class PaperStage:
    """What torch's schedule classes ask of a stage when they are made."""

    def __init__(self, pp: int, n_stages: int, index: int, rank: int):
        self.group_size, self.group_rank, self.num_stages, self.stage_index = pp, rank, n_stages, index
        self.submod, self.device, self.log_prefix = torch.nn.Identity(), torch.device("cpu"), ""
        self.is_first, self.is_last, self.has_backward = index == 0, index == n_stages - 1, False
        self.stage_index_to_group_rank = None


@pytest.mark.parametrize("pp, n_microbatches", [(2, 4), (4, 8), (4, 12)])
@pytest.mark.parametrize(
    "name, virtual_stages",
    [("Interleaved1F1B", 2), ("Interleaved1F1B", 3), ("LoopedBFS", 2), ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2),
     ("DualPipeV", 2)],
)  # fmt: skip
def test_torchs_own_lists(name, virtual_stages, pp, n_microbatches):
    made = torch_schedules.get_schedule_class(name)(
        [PaperStage(pp, pp * virtual_stages, chunk * pp, 0) for chunk in range(virtual_stages)], n_microbatches
    )
    orders = action_orders(schedule_of(name), pp, virtual_stages, n_microbatches)
    for rank, actions in made.pipeline_order.items():
        listed = [part for action in actions if action for part in action.sub_actions or (action,)]
        kept = [part for part in map(str, listed) if part[-1].isdigit() and any(kind in part for kind in "FBIW")]
        assert [str(action) for action in orders[rank]] == kept


@pytest.mark.parametrize("virtual_stages", [2, 3, 4, 5])
def test_gathers_as_torch_places_them(virtual_stages):
    n_microbatches = 8
    orders = action_orders(schedule_of("Interleaved1F1B"), 4, virtual_stages, n_microbatches)
    ours = orders_with_gathers(schedule_of("Interleaved1F1B"), 4, virtual_stages, n_microbatches)
    for actions, gathering in zip(orders, ours):
        listed = torch_schedules._add_unshard_reshard([torch_schedules._Action.from_str(str(a)) for a in actions])
        names = [str(action).replace("UNSHARD", "U-1").replace("RESHARD", "R-1") for action in listed]
        # Which of two comes first, where several are freed or gathered at once, is a matter of a set's order.
        assert sorted(map(str, gathering)) == sorted(names)
        assert [name for name in map(str, gathering) if "R" not in name] == [name for name in names if "R" not in name]


def test_orders_that_never_end():
    with pytest.raises(ValueError, match="never ends: 1F0, 0B0"):
        replay(((Action(0, "B", 0),), (Action(1, "F", 0),))[::-1], [StageTime(1, 1, 1)] * 2)
