"""Memory of one pipeline rank through a training step, composed from the traces of its units.

What is always there: FSDP2's shards of parameters, gradients and the optimizer's moments; tables and buffers.
What comes and goes: gathered parameters, whole gradients and reduction buffers of FSDP2 (rules below, read off
its code and compared with full traces), and the activations that each unit's trace has counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from parallelize.planner.numbers import Job, ModelNumbers, Shapes, UnitTrace, gathered_elements, sharded_elements
from parallelize.planner.replay import Orders

_FLOAT32 = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the first rank of one pipeline stage at its worst moment.

    parameters, gradients, optimizer: the rank's own shards. gathered: whole parameters and gradients of FSDP2, and what
    is reduced. activations: kept for backward. working: results of the unit that runs. buffers: tables, what
    neighbours send, and the batch.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    working: int
    buffers: int

    @property
    def peak_bytes(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.gathered
            + self.activations
            + self.working
            + self.buffers
        )


class _Unit:
    """One unit of a stage: its trace, and its parameters in bytes."""

    def __init__(self, name: str, trace: UnitTrace, shapes: tuple, job: Job):
        layout, elements = job.layout, job.elements
        self.name = name
        self.trace = trace
        self.sharded = sharded_elements(shapes, layout.dp_shard)
        whole = gathered_elements(shapes, layout.dp_shard)
        self.gathered = whole * elements.compute
        self.reduced = whole * elements.reduce


def rank_memory(
    job: Job, model: ModelNumbers, shapes: Shapes, traces: Mapping[str, UnitTrace], orders: Orders, pp_rank: int
) -> RankMemory:
    """Memory of pipeline rank ``pp_rank``; ``orders``: the schedule's actions by rank, () without a pipeline."""
    stages = [stage for stage, rank in enumerate(job.stage_ranks) if rank == pp_rank]
    units = {stage: [_Unit(name, traces[name], shapes[name], job) for name in job.units_of(stage)] for stage in stages}
    everything = [unit for stage in stages for unit in units[stage]]
    sharded = sum(unit.sharded for unit in everything)
    n_tensors = sum(len(shapes[unit.name]) for unit in everything)
    parameters = sharded * job.elements.param
    optimizer = 2 * parameters + _FLOAT32 * n_tensors  # two moments, and a step count for each tensor
    if job.layout.pp > 1:
        moments = _pipelined(job, units, orders[pp_rank], job.logits_bytes(model.vocab_size), parameters)
    else:
        moments = _in_turn(job, units[0])
    gradients, gathered, activations, working = max(moments, key=sum)
    buffers = _buffers(job, model, stages)
    return RankMemory(parameters, gradients, optimizer, gathered, activations, working, buffers)


def _buffers(job: Job, model: ModelNumbers, stages: list[int]) -> int:
    tables = len(stages) * job.seq_len * model.head_dim * _FLOAT32  # cosines and sines, [2, S, E/2]
    batch = 2 * 8 * job.n_microbatches * job.micro_batch_size * job.seq_len  # tokens and labels, int64
    # Torch keeps a buffer for every micro-batch of a run, from each neighbour.
    neighbours = sum((stage > 0) + (stage < job.n_stages - 1) for stage in stages) if job.layout.pp > 1 else 0
    received = neighbours * (job.n_microbatches // job.n_schedule_runs) * job.hidden_bytes(model.dim)
    return tables + batch + received


def _in_turn(job: Job, units: list[_Unit]):
    """Moments (gradients, gathered, activations, working) of one micro-batch after another through the whole model."""
    share = 1 / job.layout.dp_shard
    # Of the micro-batches before; there is none before the only one.
    gradients = sum(unit.sharded for unit in units) * job.elements.param if job.n_microbatches > 1 else 0
    kept, before = 0, 0
    gathered = 0  # parameters that stay gathered
    for unit in units:
        # The buffer of the gather before is held until this one is there; its own until the next.
        flat = unit.gathered * (1 + share)
        yield gradients, gathered + before + flat + unit.gathered, kept, 0
        yield gradients, gathered + unit.gathered * 2, kept, unit.trace.forward_peak_bytes
        before = unit.gathered
        if not job.reshard or unit is units[-1]:
            gathered += unit.gathered
        kept += unit.trace.kept_bytes
    reducing = 0  # the input of the reduction before, held until the next
    for index in reversed(range(len(units))):
        unit = units[index]
        mine = 0 if not job.reshard or unit is units[-1] else unit.gathered
        ahead = units[index - 1].gathered * (1 + share) if index and job.reshard else 0
        # The head's worst moment is in the loss, before the next gather begins.
        begun = 0 if unit.name == "head" else ahead
        yield gradients, gathered + mine + begun + reducing, kept, unit.trace.backward_peak_bytes
        kept -= unit.trace.kept_bytes
        if not job.reshard or unit is units[-1]:
            gathered -= unit.gathered
        # Its gradients, as computed and as they are reduced.
        yield gradients, gathered + ahead + unit.gathered + unit.reduced * (1 + share) + reducing, kept, 0
        reducing = unit.reduced
        if job.n_microbatches == 1:
            gradients += unit.sharded * job.elements.param


def _pipelined(job: Job, units: dict[int, list[_Unit]], actions, logits: int, sharded: int):
    """Moments (gradients, gathered, activations, working) of a schedule.

    Parameters stay gathered, and gradients add up whole, until the last micro-batch of a run.
    """
    own = [unit for of_stage in units.values() for unit in of_stage]
    whole = sum(unit.gathered + unit.reduced for unit in own)
    earlier = sharded if job.n_schedule_runs > 1 else 0
    kept, forward, backward = {}, {}, {}
    for stage, of_stage in units.items():
        held, peaks = 0, []
        for unit in of_stage:
            peaks.append(held + unit.trace.forward_peak_bytes)
            held += unit.trace.kept_bytes
        forward[stage] = max(peaks)
        kept[stage] = held + (logits if stage == job.n_stages - 1 else 0)  # torch holds a stage's output
        freed, peaks = 0, []
        for unit in reversed(of_stage):
            peaks.append(unit.trace.backward_peak_bytes - freed)
            freed += unit.trace.kept_bytes
        backward[stage] = max(peaks)
    live = 0
    for stage, kind, _ in actions:
        if kind == "F":
            yield earlier, whole, live, forward[stage]
            live += kept[stage]
        else:
            yield earlier, whole, live, backward[stage]
            if kind != "I":
                live -= kept[stage]
    largest = max(unit.reduced for unit in own)
    yield sharded, whole + largest, 0, 0
