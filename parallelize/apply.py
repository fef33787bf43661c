"""The order of application: tensor parallel, recompute, compile, FSDP2.

``Treatment`` says what to do, in numbers and flags; nothing here knows which model it is.
"""

import functools
from dataclasses import dataclass

import torch._functorch.config
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from parallelize.float8 import Float8, apply_float8
from parallelize.fsdp import Precision, apply_fsdp, fsdp_units, needs_fsdp
from parallelize.mesh import Mesh
from parallelize.plan import Plan, owned, resolve
from parallelize.recompute import with_recompute
from parallelize.tensor_parallel import apply_tensor_parallel


@dataclass(frozen=True)
class Treatment:
    """Everything ``parallelize_part`` does besides the plan and the mesh.

    recompute: "none", "selective" or "full", of each ``recompute_every``-th block. compile_backend: None for eager.
    compile_mode: as of ``torch.compile``. memory_budget: share of a compiled block's activations that it may keep.
    reshard_after_forward: free gathered parameters after the forward and gather again for the backward.
    """

    precision: Precision
    recompute: str = "none"
    recompute_every: int = 1
    float8: Float8 | None = None
    compile_backend: str | None = None
    compile_mode: str = "default"
    memory_budget: float = 1.0
    reshard_after_forward: bool = True


@dataclass(frozen=True)
class ResolvedPlan:
    """A plan's globs turned into the exact module names of one whole model."""

    plan: Plan
    styles: dict[str, ParallelStyle]
    units: list[tuple[str, ...]]
    blocks: list[str]


def resolve_plan(model: nn.Module, plan: Plan) -> ResolvedPlan:
    """Resolve every pattern on the whole meta model. Raises ``ValueError`` for one that matches nothing."""
    styles = {name: plan.tensor_parallel[pattern] for name, pattern in resolve(model, plan.tensor_parallel).items()}
    resolve(model, plan.first_stage + plan.last_stage)
    return ResolvedPlan(plan, styles, fsdp_units(model, plan), list(resolve(model, [plan.blocks])))


def parallelize_part(part: nn.Module, resolved: ResolvedPlan, mesh: Mesh, treatment: Treatment) -> None:
    """Turn one pipeline part (on meta) into its distributed self, in place."""
    parallelize_inside(part, resolved, mesh, treatment)
    if needs_fsdp(mesh.layout, treatment.precision):
        apply_fsdp(part, mesh.fsdp, resolved.units, treatment.precision, treatment.reshard_after_forward)


def parallelize_inside(part: nn.Module, resolved: ResolvedPlan, mesh: Mesh, treatment: Treatment) -> None:
    """All of it but the sharding over data ranks: what a unit computes with once its parameters are gathered."""
    tp_mesh = mesh.axis("tp")
    if treatment.float8 is not None:
        for name in filter(functools.partial(owned, part), resolved.blocks):
            apply_float8(part.get_submodule(name), treatment.float8, mesh.layout.tp)
    if tp_mesh is not None:
        apply_tensor_parallel(part, tp_mesh, resolved.styles, resolved.plan)
    if treatment.compile_backend is not None:
        torch._functorch.config.activation_memory_budget = treatment.memory_budget  # read when a block is compiled
    for number, name in enumerate(resolved.blocks):
        if owned(part, name):
            recompute = "none" if number % treatment.recompute_every else treatment.recompute
            part.set_submodule(name, _prepare_block(part.get_submodule(name), recompute, treatment))


def _prepare_block(block: nn.Module, recompute: str, treatment: Treatment) -> nn.Module:
    # Full recompute must wrap the compiled block (inside it, tensor parallelism fails in torch 2.13);
    # the selective policy must be seen by the compiler, so it goes inside.
    inside = recompute if recompute == "selective" else "none"
    outside = recompute if recompute == "full" else "none"
    block = with_recompute(block, inside)
    if treatment.compile_backend is not None:
        block.compile(backend=treatment.compile_backend, mode=treatment.compile_mode, fullgraph=True)
    return with_recompute(block, outside)
