"""The actions that a run notes are those that torch's schedule lists, and noting them changes nothing."""

import pytest

from parallelize.planner.replay import action_orders
from parallelize.schedules import schedule_of
from tests.dist.runs import run_config, run_training
from trainer.pipeline_record import read_record


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"])
def test_the_noted_actions_are_the_schedules_own(tmp_path, ranks, schedule):
    keys = dict(parallel__pp=2, parallel__schedule=schedule, training__global_batch_size=8, training__steps=3)
    noting = run_config(tmp_path / "noting", metrics__pipeline_steps=(2,), **keys)
    plain = run_config(tmp_path / "plain", **keys)
    noted, not_noted = ranks(2, run_training, noting), ranks(2, run_training, plain)
    for rank in range(2):
        names = noted[rank]["weights"].keys()
        assert all((noted[rank]["weights"][name] == not_noted[rank]["weights"][name]).all() for name in names)
    assert not (tmp_path / "plain" / "run" / "plots").exists()

    step, replay = read_record(tmp_path / "noting" / "run" / "plots", pp=2)
    assert step == 2
    virtual_stages = 1 if schedule in ("1F1B", "GPipe") else 2
    listed = action_orders(schedule_of(schedule), 2, virtual_stages, 8 // noting.training.micro_batch_size)
    for spans, actions in zip(replay.spans, listed):
        assert [action for action, _, _ in spans] == list(actions)
        assert all(start <= end for _, start, end in spans)
        assert all(before[2] <= after[1] for before, after in zip(spans, spans[1:]))
    assert min(spans[0][1] for spans in replay.spans) == 0
