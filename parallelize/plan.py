"""A parallel plan is data: which module of a decoder gets which treatment.

Names are globs over dotted module names, ``*`` matching one segment. ``resolve`` turns them into exact
names on the whole (meta) model before it is split, and raises where a pattern matches nothing:
``parallelize_module`` would only warn, and train with that layer unsharded.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from parallelize.local_styles import (
    ColwiseLinear,
    GatheredInput,
    PartialNorm,
    ReplicatedKvHeads,
    RowwiseLinear,
    VocabParallelEmbedding,
    VocabParallelHead,
)


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
    styles: dict[str, ParallelStyle] = {
        "tok_embeddings": VocabParallelEmbedding(sequence_parallel),
        "layers.*.attention": GatheredInput(sequence_parallel),
        "layers.*.attention.wq": ColwiseLinear(),
        "layers.*.attention.w[kv]": (
            ColwiseLinear() if replicated_kv_heads is None else ReplicatedKvHeads(replicated_kv_heads)
        ),
        "layers.*.attention.wo": RowwiseLinear(sequence_parallel),
        "layers.*.feed_forward": GatheredInput(sequence_parallel),
        "layers.*.feed_forward.w[13]": ColwiseLinear(),
        "layers.*.feed_forward.w2": RowwiseLinear(sequence_parallel),
        "output": VocabParallelHead(sequence_parallel, loss_parallel),
    }
    if sequence_parallel:  # each rank norms its own tokens
        styles |= {name: PartialNorm() for name in ("layers.*.attention_norm", "layers.*.ffn_norm", "norm")}
    if qk_norm:  # and its own heads
        styles["layers.*.attention.[qk]_norm"] = PartialNorm()
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
