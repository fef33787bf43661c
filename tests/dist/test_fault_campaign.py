"""A few faults of the campaign of docs/reliability.md, one after the other on one run."""

from benchmarks.fault_campaign import Fault, Layout, Plan, campaign
from benchmarks.fault_kinds import Moment

ALONE = Layout(1, ())
TP = Layout(2, ("--parallel.tp=2", "--training.micro_batch_size=8"))
PP = Layout(2, ("--parallel.pp=2",))
SHARDED = Layout(2, ("--parallel.dp_shard=2",))


def test_a_run_goes_on_exactly_after_every_fault(tmp_path):
    faults = (
        Fault("SIGKILL of one rank", PP, Moment(0.25, inside_save=False, delay_s=0.0)),
        Fault("SIGTERM to the launcher", SHARDED, Moment(0.2, inside_save=False, delay_s=0.0)),
        Fault("flipped byte", ALONE, Moment(0.3, inside_save=False, delay_s=0.0)),
        Fault("SIGKILL of everything", ALONE, Moment(0.3, inside_save=True, delay_s=0.0)),
    )
    plan = Plan("four faults", faults, TP, async_save=False)
    (result,) = campaign(4, 0, tmp_path, plan_of=lambda trial: plan if trial == 0 else None)
    assert result["problems"] == []
    assert [fault["kind"] for fault in result["faults"]] == [fault.kind for fault in faults]
    assert result["faults"][3]["inside_save"]
