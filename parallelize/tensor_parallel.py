"""Applying a plan's tensor-parallel styles to one pipeline part."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from parallelize.plan import Plan, owned


def apply_tensor_parallel(part: nn.Module, mesh: DeviceMesh, styles: dict[str, ParallelStyle], plan: Plan) -> None:
    """Shard the modules of ``part`` over ``mesh`` in place. ``styles`` is keyed by exact module name."""
    parallelize_module(part, mesh, {name: style for name, style in styles.items() if owned(part, name)})
    retie(part, plan)
    for name in plan.first_stage:
        if owned(part, name):
            part.get_submodule(name).register_forward_hook(_wait_for_output)


def retie(part: nn.Module, plan: Plan) -> None:
    """Make tied weights one parameter again where a part holds both names.

    ``parallelize_module`` shards module by module and so makes two parameters of one.
    """
    for first, second in plan.tied:
        if owned(part, first) and owned(part, second):
            part.get_submodule(second).weight = part.get_submodule(first).weight


class _Wait(torch.autograd.Function):
    """Wait for an asynchronous collective without losing autograd history."""

    @staticmethod
    def forward(ctx, x):
        return x.trigger_wait() if hasattr(x, "trigger_wait") else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def _wait_for_output(module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    # The embedding returns an AsyncCollectiveTensor. Handed to a compiled block it loses its autograd
    # history: torch 2.13 raises at tp 2 and gives a silently wrong embedding gradient at dp 2 x tp 2.
    return _Wait.apply(output)
