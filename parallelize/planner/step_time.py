"""Seconds of a training step: units' operations by the roofline, put together by the pipeline schedule. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from parallelize.layout import Layout
from parallelize.planner.hardware import Cluster
from parallelize.planner.numbers import (
    Job,
    ModelNumbers,
    Shapes,
    UnitTrace,
    gathered_elements,
    sharded_elements,
    trained_of,
)
from parallelize.planner.op_time import busy_seconds, seconds
from parallelize.planner.operations import Collective, Elementwise, Operation, scaled
from parallelize.planner.replay import StageTime, action_orders, count_gathers, replay

# AdamW reads a parameter, its gradient and two moments and writes three of them; norm and clipping read the
# gradient twice more and write it once.
_OPTIMIZER_PASSES = 10
_STEADY = 6  # micro-batches per pipeline rank after which each further one costs the same


@dataclass(frozen=True)
class UnitTime:
    """Seconds of one micro-batch through one unit: computing, and waiting for tensor-parallel collectives."""

    forward_s: float
    forward_tp_s: float
    backward_s: float
    backward_tp_s: float
    weight_s: float  # the part of backward_s that only weights' gradients need

    @property
    def total_s(self) -> float:
        return self.forward_s + self.forward_tp_s + self.backward_s + self.backward_tp_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step on the busiest pipeline rank.

    compute: matmuls, attention, elementwise work. tp: tensor-parallel collectives, none of them hidden. fsdp: what of
    FSDP2's gathers and reductions computation does not hide. bubble: waiting for other stages, sends included. other: data
    and logging.
    """

    compute_s: float
    tp_s: float
    fsdp_s: float
    bubble_s: float
    optimizer_s: float
    other_s: float

    @property
    def total_s(self) -> float:
        return sum(vars(self).values())


def unit_time(trace: UnitTrace, batch: int, cluster: Cluster, layout: Layout) -> UnitTime:
    """Of ``batch`` sequences, from the trace of one. Of the layout, only tp matters."""

    def split(operations: Mapping[Operation, int], weight: float = 0.0) -> tuple[float, float]:
        """(computing, communicating); no less in all than Python needs to launch it."""
        compute, communicate = weight, 0.0
        for operation, count in operations.items():
            spent = count * busy_seconds(scaled(operation, batch), cluster, layout)
            if isinstance(operation, Collective):
                communicate += spent
            else:
                compute += spent
        launching = sum(operations.values()) * cluster.calibration.launch_s
        return max(compute, launching - communicate), communicate

    # A weight's gradient sums over tokens: not its rows grow with the batch but its inner dim.
    others = {operation: count - trace.weight.get(operation, 0) for operation, count in trace.backward.items()}
    weight = sum(
        count * busy_seconds(replace(operation, k=operation.k * batch), cluster, layout)
        for operation, count in trace.weight.items()
    )
    return UnitTime(*split(trace.forward), *split(others, weight), weight)


def least_s(job: Job, model: ModelNumbers, shapes: Shapes, times: Mapping[str, UnitTime], cluster: Cluster) -> float:
    """Seconds that no step is shorter than, without a replay: ``step_time`` itself where there is no pipeline.

    With one, a rank's first forward waits for those of the stages below its own, its work is all to be done, and its
    last backward for the input goes on through the same stages, in every run of the schedule.
    """
    if job.layout.pp == 1:
        return step_time(job, model, shapes, times, cluster).total_s
    of_stages, send = stage_times(job, times, cluster), send_s(job, model, cluster)
    ranks, splits = job.stage_ranks, job.schedule.splits_backward
    work, weight = [0.0] * job.layout.pp, [0.0] * job.layout.pp  # of one micro-batch
    chains: dict[int, tuple[float, float]] = {}  # rank -> forwards and backwards of the stages below its first
    before = after = 0.0
    for stage, (rank, time) in enumerate(zip(ranks, of_stages)):
        work[rank] += time.forward_s + time.input_s
        weight[rank] += time.weight_s
        chains.setdefault(rank, (before, after))
        hop = send if rank != ranks[min(stage + 1, job.n_stages - 1)] else 0.0
        before += time.forward_s + hop
        after += time.input_s + hop + (0.0 if splits else time.weight_s)
    n, end = job.n_microbatches // job.n_schedule_runs, 0.0
    for rank, (before, after) in chains.items():
        # The weights' halves of a split backward may come after the last of the others.
        end = max(end, before + n * (work[rank] + weight[rank]) + (0.0 if splits else after))
        end = max(end, before + n * work[rank] + after)
    fsdp = max(_exposed_s(job, shapes, cluster, dict.fromkeys(range(job.n_stages), 1)))
    return job.n_schedule_runs * (end + fsdp) + _optimizer_s(job, shapes, cluster) + cluster.calibration.step_s


def step_time(
    job: Job, model: ModelNumbers, shapes: Shapes, times: Mapping[str, UnitTime], cluster: Cluster
) -> StepTime:
    if job.layout.pp == 1:
        fsdp, ranks, end = _in_turn(job, shapes, times, cluster)
    else:
        fsdp, ranks, end = _pipelined(job, model, shapes, times, cluster)
    compute, tp = max(ranks, key=sum)
    bubble = max(0.0, end - compute - tp)
    return StepTime(compute, tp, fsdp, bubble, _optimizer_s(job, shapes, cluster), cluster.calibration.step_s)


def _optimizer_s(job: Job, shapes: Shapes, cluster: Cluster) -> float:
    """Of the pipeline rank with the most parameters."""
    of_unit = {unit: sharded_elements(trained_of(of_unit), job.layout.dp_shard) for unit, of_unit in shapes.items()}
    ranks = [0] * job.layout.pp
    for stage, rank in enumerate(job.stage_ranks):
        ranks[rank] += sum(of_unit[unit] for unit in job.units_of(stage))
    elements = job.elements
    n_bytes = _OPTIMIZER_PASSES * elements.param
    if elements.moment != elements.param:
        n_bytes += 4 * (elements.moment + elements.param)  # both moments, there and back
    return seconds(Elementwise(n_bytes * max(ranks)), cluster, job.layout)


def _fsdp_times(job: Job, shapes: Shapes, cluster: Cluster) -> dict[str, tuple[float, float]]:
    """Unit -> seconds to gather its parameters, and to reduce its gradients."""
    layout, elements = job.layout, job.elements
    result = {}
    for unit, of_unit in shapes.items():
        whole = gathered_elements(of_unit, layout.dp_shard)
        gather = seconds(Collective("all_gather", "dp_shard", whole * elements.compute), cluster, layout)
        whole = gathered_elements(trained_of(of_unit), layout.dp_shard)
        reduce = seconds(Collective("reduce_scatter", "dp_shard", whole * elements.reduce), cluster, layout)
        if layout.dp_replicate > 1:
            share = whole // layout.dp_shard * elements.reduce
            reduce += seconds(Collective("all_reduce", "dp_replicate", share), cluster, layout)
        result[unit] = gather, reduce
    return result


def _in_turn(job: Job, shapes: Shapes, times: Mapping[str, UnitTime], cluster: Cluster):
    """A gather runs beside the unit before it, a reduction beside the one after it; both share one link.

    In each micro-batch where the job reshards, else once a step.
    """
    fsdp = _fsdp_times(job, shapes, cluster)
    units = job.units_of(0)

    def not_hidden(traffic: float, behind: float) -> float:
        return max(0.0, traffic - behind) + cluster.calibration.fsdp_exposed * min(traffic, behind)

    exposed = fsdp[units[0]][0]
    for before, unit in zip(units, units[1:]):
        exposed += not_hidden(fsdp[unit][0], times[before].forward_s + times[before].forward_tp_s)
    reducing = 0.0
    backwards = units[::-1]
    for index, unit in enumerate(backwards):
        gathers = fsdp[backwards[index + 1]][0] if job.reshard and index + 1 < len(backwards) else 0.0
        exposed += not_hidden(gathers + reducing, times[unit].backward_s + times[unit].backward_tp_s)
        reducing = fsdp[unit][1]
    exposed += reducing  # of the embedding, with nothing behind it
    beyond = cluster.calibration.microbatch_s
    compute = job.n_microbatches * (beyond + sum(times[unit].forward_s + times[unit].backward_s for unit in units))
    tp = job.n_microbatches * sum(times[unit].forward_tp_s + times[unit].backward_tp_s for unit in units)
    times_reduced = job.n_microbatches if job.reshard else 1
    return times_reduced * exposed, [(compute, tp)], compute + tp


def _pipelined(job: Job, model: ModelNumbers, shapes: Shapes, times: Mapping[str, UnitTime], cluster: Cluster):
    busy = [(0.0, 0.0)] * job.layout.pp
    counted = [count_gathers(actions, job.reshard).items() for actions in job.orders()]
    n_gathers = {stage: often for of_rank in counted for stage, (often, _) in of_rank}
    for stage, rank in enumerate(job.stage_ranks):
        of_stage = [times[unit] for unit in job.units_of(stage)]
        compute = cluster.calibration.microbatch_s + sum(time.forward_s + time.backward_s for time in of_stage)
        tp = sum(time.forward_tp_s + time.backward_tp_s for time in of_stage)
        busy[rank] = (busy[rank][0] + job.n_microbatches * compute, busy[rank][1] + job.n_microbatches * tp)
    end = job.n_schedule_runs * _end_s(job, stage_times(job, times, cluster), send_s(job, model, cluster))
    return job.n_schedule_runs * max(_exposed_s(job, shapes, cluster, n_gathers)), busy, end


def _exposed_s(job: Job, shapes: Shapes, cluster: Cluster, n_gathers: Mapping[int, int]) -> list[float]:
    """Pipeline rank -> seconds of FSDP's traffic in a run of the schedule that nothing hides. n_gathers: by stage.

    Gathered while other stages compute, but for the first unit; reduced after the last backward.
    """
    fsdp = _fsdp_times(job, shapes, cluster)
    exposed = [0.0] * job.layout.pp
    for stage, rank in enumerate(job.stage_ranks):
        gathers = [fsdp[unit][0] for unit in job.units_of(stage)]
        exposed[rank] += gathers[0] + cluster.calibration.fsdp_exposed * (n_gathers[stage] * sum(gathers) - gathers[0])
        exposed[rank] += sum(fsdp[unit][1] for unit in job.units_of(stage))
    return exposed


def stage_times(job: Job, times: Mapping[str, UnitTime], cluster: Cluster) -> list[StageTime]:
    """Seconds of one micro-batch on each stage of a pipeline, FSDP's not counted."""
    result = []
    beyond = cluster.calibration.microbatch_s / 2
    for stage in range(job.n_stages):
        of_stage = [times[unit] for unit in job.units_of(stage)]
        forward = beyond + sum(time.forward_s + time.forward_tp_s for time in of_stage)
        backward = beyond + sum(time.backward_s + time.backward_tp_s for time in of_stage)
        weight = sum(time.weight_s for time in of_stage)
        if stage == 0 and job.schedule.splits_backward:
            weight = backward  # without an input to go on to, torch leaves all to the weights' half
        result.append(StageTime(forward, backward - weight, weight))
    return result


def send_s(job: Job, model: ModelNumbers, cluster: Cluster) -> float:
    """Seconds of sending one micro-batch from a stage to the next."""
    return seconds(Collective("send", "pp", job.hidden_bytes(model.dim)), cluster, job.layout)


def _end_s(job: Job, of_stages: list[StageTime], send: float) -> float:
    """End of one run of the schedule; of a long one by two shorter, since it grows evenly in between."""
    n, pp = job.n_microbatches // job.n_schedule_runs, job.layout.pp

    def end(n_microbatches: int) -> float:
        orders = action_orders(job.schedule, pp, job.virtual_stages, n_microbatches)
        return replay(orders, of_stages, send).end_s

    fewer, more = _STEADY * pp + n % pp, (_STEADY + 2) * pp + n % pp
    if n <= more or not hasattr(job.schedule, "name"):
        return end(n)
    first, second = end(fewer), end(more)
    return second + (n - more) * (second - first) / (more - fewer)
