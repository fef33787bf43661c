"""A parallel plan is data: which module of a decoder gets which treatment.

Names are globs over dotted module names, ``*`` matching one segment. ``resolve`` turns them into exact
names on the whole (meta) model before it is split, and raises where a pattern matches nothing:
``parallelize_module`` would only warn, and train with that layer unsharded.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)


class ReplicatedKvHeads(ParallelStyle):
    """A key or value projection with fewer heads than there are tensor-parallel ranks.

    Every rank holds the whole projection, computes all ``n_kv_heads`` heads, and passes on the one that its
    query heads share. A rank's gradient of the projection covers its own head only: it is marked as partial,
    and so summed over the axis.
    """

    def __init__(self, n_kv_heads: int):
        self.n_kv_heads = n_kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def replicate(name, module, mesh):
            for key, parameter in module.named_parameters(recurse=False):
                replica = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                module.register_parameter(key, nn.Parameter(replica))

        def own_head(module, output, mesh):
            local = output.to_local(grad_placements=[Partial()])
            head = mesh.get_local_rank() * self.n_kv_heads // mesh.size()
            return local.unflatten(-1, (self.n_kv_heads, -1))[..., head, :]

        return distribute_module(module, device_mesh, replicate, output_fn=own_head)


class _GradientOfOwnRows(torch.autograd.Function):
    """The weight, whose gradient is cut to the rows that this rank holds as soon as it is there."""

    @staticmethod
    def forward(ctx, weight):
        ctx.mesh, ctx.placements = weight.device_mesh, weight.placements
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.redistribute(ctx.mesh, ctx.placements)


class VocabParallelEmbedding(RowwiseParallel):
    """An embedding whose rows are spread over the ranks.

    DTensor computes the gradient of all rows on every rank. FSDP2 would cut it only when it reduces it, and a
    pipeline adds up gradients until then: the whole table in fp32.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.forward = lambda tokens: F.embedding(tokens, _GradientOfOwnRows.apply(module.weight))
        return super()._apply(module, device_mesh)


@dataclass(frozen=True)
class Plan:
    """How one family of models is spread out.

    tensor_parallel: glob of module names to the style ``parallelize_module`` applies.
    fsdp_units:      groups of module globs; each group is gathered and freed as one. A glob that matches
                     several modules makes one unit of each.
    blocks:          glob of the repeated layers: units of recompute and compile, split over pipeline stages.
    first_stage:     modules that only the first pipeline stage owns.
    last_stage:      modules that only the last one owns.
    tied:            pairs (module, module) whose ``weight`` is one parameter.
    """

    tensor_parallel: dict[str, ParallelStyle]
    fsdp_units: tuple[tuple[str, ...], ...]
    blocks: str
    first_stage: tuple[str, ...]
    last_stage: tuple[str, ...]
    tied: tuple[tuple[str, str], ...] = ()


def decoder_plan(
    *,
    sequence_parallel: bool,
    loss_parallel: bool,
    tie_embeddings: bool = False,
    qk_norm: bool = False,
    replicated_kv_heads: int | None = None,
) -> Plan:
    """The plan of the one decoder.

    With ``sequence_parallel`` the residual stream and the norms hold S/tp tokens a rank between the
    matmuls (Korthikanti et al. 2022); with ``loss_parallel`` the logits stay sharded over the vocabulary.
    ``replicated_kv_heads``: the model's kv heads where they are fewer than the tp ranks; None shards them.
    """
    stream = Shard(1) if sequence_parallel else Replicate()
    whole = Replicate()
    styles: dict[str, ParallelStyle] = {
        # Vocabulary and feature dims may be uneven: DTensor's shards need not divide.
        "tok_embeddings": VocabParallelEmbedding(input_layouts=whole, output_layouts=stream),
        "layers.*.attention": PrepareModuleInput(
            # The stream; rotary table and mask are whole on every rank.
            input_layouts=(stream, None, None),
            desired_input_layouts=(whole, None, None),
        ),
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.w[kv]": (
            ColwiseParallel() if replicated_kv_heads is None else ReplicatedKvHeads(replicated_kv_heads)
        ),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=stream),
        "layers.*.feed_forward": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,)),
        "layers.*.feed_forward.w[13]": ColwiseParallel(),
        "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=stream),
        "output": ColwiseParallel(
            input_layouts=stream,
            output_layouts=Shard(-1) if loss_parallel else whole,
            use_local_output=not loss_parallel,
        ),
    }
    if sequence_parallel:
        styles |= {name: SequenceParallel() for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")}
    if qk_norm:  # each rank norms its own heads, so a rank's gradient is a part of the whole
        styles["layers.*.attention.[qk]_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    if tie_embeddings:
        # One group must hold both names of a tied weight, or fully_shard unties them: leave both to
        # the root group, which is gathered for the whole forward.
        units, tied = (("layers.*",),), (("tok_embeddings", "output"),)
    else:
        units, tied = (("tok_embeddings",), ("layers.*",), ("norm", "output")), ()
    return Plan(
        tensor_parallel=styles,
        fsdp_units=units,
        blocks="layers.*",
        first_stage=("tok_embeddings",),
        last_stage=("norm", "output"),
        tied=tied,
    )


def resolve(model: nn.Module, patterns: Iterable[str]) -> dict[str, str]:
    """Map each matching module name of ``model`` to its pattern, in the model's order.

    Raises ``ValueError`` where a pattern matches nothing, or two patterns match one module.
    """
    patterns = tuple(patterns)
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, str] = {}
    for pattern in patterns:
        hits = [name for name in names if name.count(".") == pattern.count(".") and fnmatch.fnmatchcase(name, pattern)]
        if not hits:
            raise ValueError(f"the plan's pattern {pattern!r} matches no module of the model")
        for name in hits:
            if name in found:
                raise ValueError(f"module {name!r} is matched by {found[name]!r} and by {pattern!r}: keep one")
            found[name] = pattern
    return {name: found[name] for name in names if name in found}


def owned(part: nn.Module, name: str) -> bool:
    """Whether a pipeline part holds the module ``name`` of the whole model (and not a stand-in)."""
    try:
        return not isinstance(part.get_submodule(name), nn.Identity)
    except AttributeError:
        return False
