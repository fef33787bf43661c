"""Splitting a model into pipeline stages, and the schedule that drives them."""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from parallelize.mesh import Mesh
from parallelize.plan import Plan, resolve


def split_stage(model: nn.Module, plan: Plan, layers_per_stage: Sequence[int], stage: int) -> nn.Module:
    """A copy of the (meta) model that owns only what stage ``stage`` computes; names are unchanged.

    Raises ``ValueError`` unless ``layers_per_stage`` places every layer exactly once, none empty.
    """
    blocks = list(resolve(model, [plan.blocks]))
    if sum(layers_per_stage) != len(blocks) or min(layers_per_stage) < 1:
        raise ValueError(f"stages of {tuple(layers_per_stage)} layers do not place {len(blocks)} layers exactly once")
    first = sum(layers_per_stage[:stage])
    keep = set(blocks[first : first + layers_per_stage[stage]])
    part = copy.deepcopy(model)
    for name in blocks:
        if name not in keep:
            parent, _, key = name.rpartition(".")
            del part.get_submodule(parent)[key]
    absent = plan.first_stage if stage > 0 else ()
    absent += plan.last_stage if stage < len(layers_per_stage) - 1 else ()
    for name in absent:
        part.set_submodule(name, nn.Identity())
    return part


class Pipeline:
    """This rank's stages and the schedule that runs micro-batches through all of them.

    parts: the rank's (parallelized) stage modules, in the order of ``stage_indices``.
    loss_fn: logits, labels -> scalar; called on the last stage once per micro-batch. It divides by the
    step's token count itself, so the schedule must not scale gradients.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stage_indices: Sequence[int],
        n_stages: int,
        schedule: str,
        n_microbatches: int,
        mesh: Mesh,
        device: torch.device,
        loss_fn: Callable,
    ):
        stages = [
            PipelineStage(part, index, n_stages, device, group=mesh.axis("pp").get_group())
            for part, index in zip(parts, stage_indices)
        ]
        self.has_first = 0 in stage_indices
        self.has_last = n_stages - 1 in stage_indices
        schedule_class = get_schedule_class(schedule)
        multi = issubclass(schedule_class, PipelineScheduleMulti)
        self.schedule = schedule_class(
            stages if multi else stages[0], n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=False
        )

    def forward_backward(self, tokens: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """Run tokens and labels [sequences, S], cut into micro-batches; their losses on the last stage, else []."""
        losses: list[torch.Tensor] = []
        inputs = (tokens,) if self.has_first else ()
        targets = {"target": labels, "losses": losses} if self.has_last else {}
        self.schedule.step(*inputs, **targets, return_outputs=False)
        return losses
