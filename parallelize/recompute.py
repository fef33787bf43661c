"""Activation recomputation: keep less in the forward, compute it again in the backward."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_aten = torch.ops.aten
# Results that cost more to compute again than to keep: attention, and under tensor parallelism the
# reduce-scatter of a row-parallel layer, which would repeat the communication.
_KEEP = {
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}
_MATMULS = {_aten.mm.default, _aten.addmm.default, _aten._scaled_mm.default}


def _selective_contexts():
    """Keep attention and every second matmul; fresh counters for each forward of each block."""
    n_matmuls = {False: 0, True: 0}  # counted apart for the forward and its recomputation

    def policy(context, op, *args, **kwargs) -> CheckpointPolicy:
        if op in _MATMULS:
            n_matmuls[context.is_recompute] += 1
            keep = n_matmuls[context.is_recompute] % 2 == 1
        else:
            keep = op in _KEEP
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def with_recompute(block: nn.Module, mode: str) -> nn.Module:
    """Wrap one block for ``mode`` "selective" or "full"; "none" returns it as it is."""
    if mode == "none":
        return block
    # No dropout anywhere, so there is no RNG state worth the copies.
    if mode == "full":
        return checkpoint_wrapper(block, preserve_rng_state=False)
    return checkpoint_wrapper(block, context_fn=_selective_contexts, preserve_rng_state=False)


def named_parameters(part: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A part's parameters by their name in the whole, plain model; a tied one once."""
    for name, parameter in part.named_parameters():
        yield name.replace(_CHECKPOINT_PREFIX, ""), parameter
