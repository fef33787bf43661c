"""What every rank has to say of a logged step, brought together in one small gather."""

import math
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from parallelize.layout import Layout


@dataclass(frozen=True)
class RankStats:
    """One rank's part, all floats: seconds and bytes."""

    data_time_s: float
    squared_norm_share: float  # of the gradient
    memory_allocated_bytes: float
    memory_reserved_bytes: float
    memory_peak_bytes: float
    # Of its pipeline actions, counted from where the step's first reduction has brought all ranks together; 0 without a pipeline:
    pipeline_busy_s: float = 0.0
    pipeline_begin_s: float = 0.0
    pipeline_end_s: float = 0.0
    # Of torch.compile since this process began:
    compiled_graphs: float = 0.0
    compile_time_s: float = 0.0


def compile_stats() -> dict[str, float]:
    """The fields of torch.compile; zeros in a process that has compiled nothing."""
    if "torch._dynamo" not in sys.modules:
        return {}
    from torch._dynamo.utils import calculate_time_spent, counters

    times = calculate_time_spent() if counters["stats"]["unique_graphs"] else {}
    return {
        "compiled_graphs": float(counters["stats"]["unique_graphs"]),
        "compile_time_s": times.get("entire_frame_compile", 0.0) + times.get("entire_backward_compile", 0.0),
    }


def gather_stats(mine: RankStats, device: torch.device) -> list[RankStats]:
    """Every rank's, by rank. Called by all ranks together."""
    if dist.get_world_size() == 1:
        return [mine]
    values = torch.tensor(astuple(mine), dtype=torch.float64, device=device)
    everyone = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, values)
    return [RankStats(*row) for row in torch.stack(everyone).tolist()]


def summary_of(ranks: list[RankStats], layout: Layout) -> dict:
    """The part of a step's record that they make; with a pipeline, lists by pipeline rank."""
    by_stage = [ranks[first : first + layout.stage_ranks] for first in range(0, len(ranks), layout.stage_ranks)]

    def most_by_stage(value: Callable[[RankStats], float]) -> list[int]:
        return [int(max(map(value, stage))) for stage in by_stage]

    memory = {
        "memory_peak_bytes": most_by_stage(lambda rank: rank.memory_peak_bytes),
        "memory_allocated_bytes": most_by_stage(lambda rank: rank.memory_allocated_bytes),
        "memory_reserved_bytes": most_by_stage(lambda rank: rank.memory_reserved_bytes),
    }
    memory = {key: stages for key, stages in memory.items() if any(stages)}  # nothing is reserved on a CPU
    record = {"data_time_s": max(rank.data_time_s for rank in ranks)}
    record |= {key: max(stages) for key, stages in memory.items()}
    if graphs := max(rank.compiled_graphs for rank in ranks):
        record |= {"compiled_graphs": int(graphs), "compile_time_s": max(rank.compile_time_s for rank in ranks)}
    if layout.pp == 1:
        return record
    record |= {f"{key}_by_stage": stages for key, stages in memory.items()}
    record["grad_norm_by_stage"] = [math.sqrt(sum(rank.squared_norm_share for rank in stage)) for stage in by_stage]
    # Counted from a moment that is the same on every rank: their clocks need not agree.
    span_s = max(rank.pipeline_end_s for rank in ranks) - min(rank.pipeline_begin_s for rank in ranks)
    if span_s > 0:
        record["bubble_fraction"] = 1 - sum(rank.pipeline_busy_s for rank in ranks) / len(ranks) / span_s
    return record
