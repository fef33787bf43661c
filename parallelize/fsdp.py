"""FSDP2 over one pipeline part: sharding, mixed precision and gradient reduction."""

import warnings
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from parallelize.layout import Layout
from parallelize.plan import Plan, owned, resolve


@dataclass(frozen=True)
class Precision:
    """dtypes of: stored parameters that are trained (and so of gradients and optimizer state), those that are not,
    computation, gradient reduction."""

    param: torch.dtype
    frozen: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def fsdp_units(model: nn.Module, plan: Plan) -> list[tuple[str, ...]]:
    """The plan's units as exact module names of the whole model."""
    units: list[tuple[str, ...]] = []
    for group in plan.fsdp_units:
        names = tuple(resolve(model, group))
        units += [(name,) for name in names] if len(group) == 1 else [names]
    return units


def needs_fsdp(layout: Layout, precision: Precision) -> bool:
    """Whether parameters have to be gathered, or cast: else FSDP2 would only copy them and their gradients."""
    return layout.dp > 1 or {precision.param, precision.frozen} != {precision.compute}


def apply_fsdp(
    part: nn.Module, mesh: DeviceMesh, units: list[tuple[str, ...]], precision: Precision, reshard: bool
) -> None:
    """Shard every unit that ``part`` owns, then the part itself, in place.

    On a mesh of one it casts to the compute dtype. It also sums the partial gradients that tensor parallelism leaves
    on norms. Inputs are not cast: the rotary
    tables that blocks take must stay fp32. Gradients are summed over ranks, not averaged: the loss is
    already divided by the token count of the global batch.
    """
    # Said of logits gathered by tensor parallelism; nothing here works in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute, reduce_dtype=precision.reduce, cast_forward_inputs=False
    )
    for unit in units:
        modules = [part.get_submodule(name) for name in unit if owned(part, name)]
        if modules:
            # What the backward needs first is not worth freeing after the forward.
            ends_the_forward = unit == units[-1]
            fully_shard(modules, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard and not ends_the_forward)
    fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            # Both are needed: a divisor of 1 alone asks for a reduction that gloo does not have.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
