"""Gradients of which each tensor-parallel rank has only a summand: norms, and what every rank holds whole."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor


def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Add up the partial gradients over their ranks, all in one reduction. FSDP2, where it is used, has done so before."""
    partial = [p for p in parameters if isinstance(p.grad, DTensor) and p.grad.placements[-1].is_partial()]
    if not partial:
        return
    local = [parameter.grad.to_local() for parameter in partial]
    summed = torch.cat([gradient.flatten() for gradient in local])
    dist.all_reduce(summed, group=partial[0].device_mesh.get_group())
    for parameter, piece, gradient in zip(partial, summed.split([g.numel() for g in local]), local):
        whole = piece.view_as(gradient)
        parameter.grad = DTensor.from_local(whole, parameter.device_mesh, parameter.placements, run_check=False)
