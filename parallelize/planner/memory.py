"""Memory of one pipeline rank through a training step, composed from the traces of its units.

What is always there: FSDP2's shards of parameters, gradients and the optimizer's moments; tables and buffers.
What comes and goes: gathered parameters, whole gradients and reduction buffers of FSDP2 (rules below, read off
its code and compared with full traces), and the activations that each unit's trace has counted.
"""

import functools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from parallelize.planner.numbers import (
    Job,
    ModelNumbers,
    Shapes,
    UnitTrace,
    stays_gathered,
)
from parallelize.planner.replay import Orders
from parallelize.planner.stage_memory import Held, StageMemory, Unit

_FLOAT32 = 4


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the first rank of one pipeline stage at its worst moment.

    parameters, gradients, optimizer: the rank's own shards. gathered: whole parameters and gradients of FSDP2, and what
    is being reduced. activations: kept for the backward, and results of the block that runs. logits: the same of the
    head. buffers: tables, what neighbours send, and the batch.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    activations: int
    logits: int
    buffers: int

    @property
    def peak_bytes(self) -> int:
        return sum(vars(self).values())


def rank_memory(
    job: Job, model: ModelNumbers, shapes: Shapes, traces: Mapping[str, UnitTrace], orders: Orders, pp_rank: int
) -> RankMemory:
    """Memory of pipeline rank ``pp_rank``; ``orders``: actions by rank, with gathers; () without a pipeline."""
    (parameters, optimizer, buffers), moments = _composed(job, model, shapes, traces, orders, pp_rank)
    gradients, gathered, activations, logits = map(round, max(moments, key=sum))
    return RankMemory(parameters, gradients, optimizer, gathered, activations, logits, buffers)


def rank_fits(
    job: Job, model: ModelNumbers, shapes: Shapes, traces: Mapping[str, UnitTrace], orders: Orders, pp_rank: int,
    usable_bytes: float,
) -> bool:  # fmt: skip
    """Whether ``rank_memory`` has no more, looking no further than the first moment that has."""
    always, moments = _composed(job, model, shapes, traces, orders, pp_rank)
    left = usable_bytes - sum(always)
    return all(sum(moment) <= left for moment in moments)


def _composed(
    job: Job, model: ModelNumbers, shapes: Shapes, traces: Mapping[str, UnitTrace], orders: Orders, pp_rank: int
):
    """What is always there (parameters, optimizer, buffers), and moments (gradients, gathered, activations, logits)."""
    stages = [stage for stage, rank in enumerate(job.stage_ranks) if rank == pp_rank]
    units = {}

    @functools.cache
    def unit(name: str, stays: bool) -> Unit:
        return Unit(name, traces[name], shapes[name], stays, job)

    for stage in stages:
        names = job.units_of(stage)
        units[stage] = [
            unit(name, stays_gathered(names, index, shapes, model, job)) for index, name in enumerate(names)
        ]
    everything = [unit for stage in stages for unit in units[stage]]
    parameters = sum(unit.parameters for unit in everything)
    sharded = sum(unit.sharded for unit in everything)
    n_tensors = sum(unit.n_trained for unit in everything)
    optimizer = 2 * sharded * job.elements.moment + _FLOAT32 * n_tensors  # a step count for each tensor
    if job.layout.pp > 1:
        moments = _pipelined(job, units, orders[pp_rank], job.output_bytes(model))
    elif job.reshard or (job.fsdp and job.n_microbatches == 1):
        moments = _in_turn(job, units[0])
    else:
        moments = _in_turn_reduced_once(job, units[0])
    return (parameters, optimizer, _buffers(job, model, stages)), moments


def _buffers(job: Job, model: ModelNumbers, stages: list[int]) -> int:
    tables = len(stages) * job.seq_len * model.head_dim * _FLOAT32  # cosines and sines, [2, S, E/2]
    batch = 2 * 8 * job.n_microbatches * job.micro_batch_size * job.seq_len  # tokens and labels, int64
    # Torch keeps a buffer for every micro-batch of a run, from each neighbour.
    neighbours = sum((stage > 0) + (stage < job.n_stages - 1) for stage in stages) if job.layout.pp > 1 else 0
    received = neighbours * (job.n_microbatches // job.n_schedule_runs) * job.hidden_bytes(model.dim)
    return tables + batch + received


def _gathering_forward(job: Job, units: list[Unit], gradients: float, held: Held):
    """Moments of a forward that gathers each unit as it comes to it; returns the bytes that stay gathered."""
    share = 1 / job.layout.dp_shard
    gathered, before = 0, 0  # ``before``: the buffer of the gather before, held until the next
    for unit in units:
        flat = unit.gathered * (1 + share)
        yield gradients, gathered + before + flat + unit.gathered, *held.with_peak(unit, 0)
        # The head's worst moment is in the loss, when the model's forward is over and its last gather's buffer freed.
        buffer = 0 if unit.name == "head" else unit.gathered
        yield gradients, gathered + unit.gathered + buffer, *held.with_peak(unit, unit.trace.forward_peak_bytes)
        before = unit.gathered
        if unit.stays:
            gathered += unit.gathered
        held.add(unit, 1)
    return gathered


def _in_turn_reduced_once(job: Job, units: list[Unit]):
    """The same where parameters stay gathered and gradients whole until the step's last micro-batch."""
    held, memory = Held(), StageMemory(job, 0, units, 0)
    gathered = yield from _gathering_forward(job, units, 0, held)
    whole, activations, logits = 0, held.activations, held.logits
    last = min(job.n_microbatches, 3) - 1  # from the second on they are alike
    for kind in "BF" * last:
        worst, after = memory.run(kind)
        yield 0, gathered + whole + worst[0], activations + worst[1], logits + worst[2]
        whole, activations, logits = whole + after[0], activations + after[1], logits + after[2]
    gradients, reducing = 0, 0
    for unit in reversed(units):
        whole += 0 if last else unit.reduced
        yield gradients, gathered + whole + reducing, *held.with_peak(unit, unit.trace.backward_peak_bytes)
        held.add(unit, -1)
        gathered -= unit.gathered
        whole -= unit.reduced
        if job.fsdp:
            most = unit.reduction(unit.reduced, job.elements.reduce)
            yield gradients, gathered + whole + most, *held.with_peak(unit, 0)
            reducing = unit.reduced
        gradients += unit.sharded * job.elements.param


def _in_turn(job: Job, units: list[Unit]):
    """Moments (gradients, gathered, activations, logits) of one micro-batch after another through the whole model."""
    share = 1 / job.layout.dp_shard
    # Of the micro-batches before; there is none before the only one.
    gradients = sum(unit.sharded for unit in units) * job.elements.param if job.n_microbatches > 1 else 0
    held = Held()
    gathered = yield from _gathering_forward(job, units, gradients, held)
    reducing = 0  # the input of the reduction before, held until the next begins
    # FSDP2 holds what it sums over replicas until the end of the backward. The only micro-batch's is its gradients.
    holds = job.layout.dp_replicate > 1 and (job.n_microbatches > 1 or job.elements.reduce != job.elements.param)
    for index in reversed(range(len(units))):
        unit = units[index]
        mine = 0 if unit.stays else unit.gathered
        ahead = units[index - 1].gathered * (1 + share) if index and not units[index - 1].stays else 0
        # The head's worst moment is in the loss, before the next gather begins.
        begun = 0 if unit.name == "head" else ahead
        yield gradients, gathered + mine + begun + reducing, *held.with_peak(unit, unit.trace.backward_peak_bytes)
        held.add(unit, -1)
        if unit.stays:
            gathered -= unit.gathered
        # Its gradients, as computed and as they are reduced.
        # With one data shard, what the first unit had gathered is freed after that only.
        whole = (unit.computed if job.fsdp else 0) + (unit.gathered if job.layout.dp_shard == 1 and index == 0 else 0)
        most = unit.reduction(whole, job.elements.compute)
        yield gradients, gathered + ahead + most, *held.with_peak(unit, 0)
        reducing = unit.reduced
        gathered += unit.sharded * job.elements.reduce if holds else 0
        if job.n_microbatches == 1:
            gradients += unit.sharded * job.elements.param


def _pipelined(job: Job, units: dict[int, list[Unit]], actions, output: int):
    """Moments (gradients, gathered, activations, logits) of a schedule. output: bytes of what the last stage gives.

    Parameters are gathered as ``actions`` say, and gradients, which a stage's first backward makes, add up whole until
    the last micro-batch of a run.
    """
    own = [unit for of_stage in units.values() for unit in of_stage]
    sharded = sum(unit.sharded for unit in own) * job.elements.param
    earlier = sharded if job.n_schedule_runs > 1 else 0
    stages = {stage: StageMemory(job, stage, of_stage, output) for stage, of_stage in units.items()}
    parameters = whole = activations = logits = 0
    to_come = Counter(stage for stage, kind, _ in actions if kind in "BW")
    for stage, kind, _ in actions:
        memory = stages[stage]
        if kind in "UR":
            # What is freed after the last backward is gone already.
            parameters += memory.gathered if kind == "U" else -memory.gathered if to_come[stage] else 0
            continue
        worst, after = memory.run(kind)
        yield earlier, parameters + whole + worst[0], activations + worst[1], logits + worst[2]
        whole, activations, logits = whole + after[0], activations + after[1], logits + after[2]
        to_come[stage] -= kind in "BW"
        if kind in "BW" and not to_come[stage]:
            # After a stage's last backward: unit by unit, parameters are freed and gradients reduced, from a copy.
            for unit, gradients in zip(units[stage], memory.gradients()):
                parameters -= unit.gathered
                whole -= gradients
                most = unit.reduction(unit.reduced, job.elements.reduce)
                yield earlier, parameters + whole + most, activations, logits
                if job.n_schedule_runs == 1:
                    earlier += unit.sharded * job.elements.param
