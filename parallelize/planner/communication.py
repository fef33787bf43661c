"""Collectives of one step on one rank, counted per mesh axis."""

import math
from collections import Counter
from collections.abc import Mapping

from parallelize.planner.numbers import (
    Job,
    ModelNumbers,
    Shapes,
    UnitTrace,
    gathered_elements,
    sharded_elements,
    starts_detached,
    stays_gathered,
    trained_of,
)
from parallelize.planner.operations import Collective
from parallelize.planner.replay import count_gathers


def collectives(
    job: Job, model: ModelNumbers, shapes: Shapes, traces: Mapping[str, UnitTrace], pp_rank: int
) -> tuple[Counter, Counter]:
    """(axis, kind) -> how often, and (axis, kind) -> bytes, as ``Collective`` counts them; axes of degree 1 have none.

    Left out: the sums over all ranks of a few numbers (tokens, loss, norm).
    """
    counts: Counter = Counter()
    sizes: Counter = Counter()

    def add(axis: str, kind: str, count: int, size: int) -> None:
        if count and getattr(job.layout, axis) > 1:
            counts[axis, kind] += count
            sizes[axis, kind] += count * size

    stages = [stage for stage, rank in enumerate(job.stage_ranks) if rank == pp_rank]
    units = [(stage, unit) for stage in stages for unit in job.units_of(stage)]
    names = [unit for _, unit in units]
    for _, unit in units:
        for operations in (traces[unit].forward, traces[unit].backward):
            for operation, count in operations.items():
                if isinstance(operation, Collective):
                    add(operation.axis, operation.kind, count * job.n_microbatches, operation.bytes)
    if 0 in stages and starts_detached(shapes):
        kind = "reduce_scatter" if job.sequence_parallel else "all_reduce"
        whole = job.micro_batch_size * job.seq_len * model.dim * job.elements.compute
        add("tp", kind, -job.n_microbatches, whole)
    # FSDP2 works once a run of a pipeline, else once a micro-batch where it reshards, and gathers again what it has freed.
    times = job.n_microbatches if job.layout.pp == 1 and job.reshard else job.n_schedule_runs
    in_a_run = count_gathers(job.orders()[pp_rank], job.reshard) if job.layout.pp > 1 else {0: (1 + job.reshard, 1)}
    partial: list[int] = []
    for index, (stage, unit) in enumerate(units):
        if not shapes[unit]:
            continue
        # Summed when they are reduced: as they were computed, or as they have been added up.
        added_up = job.layout.pp > 1 or (not job.reshard and job.n_microbatches > 1)
        element = job.elements.reduce if added_up and job.fsdp else job.elements.compute
        trained = trained_of(shapes[unit])
        for shape in trained:
            if shape.summed:
                partial.append(math.prod(shape.dims) * element)
        whole = gathered_elements(shapes[unit], job.layout.dp_shard)
        n_gathers = times * in_a_run[stage][stays_gathered(names, index, shapes, model, job)]
        add("dp_shard", "all_gather", n_gathers, whole * job.elements.compute)
        whole = gathered_elements(trained, job.layout.dp_shard)
        add("dp_shard", "reduce_scatter", times if whole else 0, whole * job.elements.reduce)
        add("dp_replicate", "all_reduce", times if whole else 0, whole // job.layout.dp_shard * job.elements.reduce)
    for size in partial if job.fsdp or not partial else [sum(partial)]:  # one by one by FSDP2, all together without it
        add("tp", "all_reduce", times if job.fsdp else 1, size)
    for stage in stages:
        for other in (stage - 1, stage + 1):
            if 0 <= other < job.n_stages and job.stage_ranks[other] != pp_rank:
                add("pp", "send", job.n_microbatches, job.hidden_bytes(model.dim))
    tables = trained_of(shapes["embedding"])
    if model.tied and tables and job.stage_ranks[0] != job.stage_ranks[-1]:  # the two copies add up their gradients
        table = sharded_elements(tables, job.layout.dp_shard) * job.elements.param
        add("pp", "send", (0 in stages) + (job.n_stages - 1 in stages), table)
    return counts, sizes
