"""One gradient norm over pipeline stages, virtual chunks and mixed meshes; each parameter counted once."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from parallelize.layout import Layout


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def n_copies(parameter: torch.Tensor, layout: Layout) -> int:
    """How many ranks of a stage hold each element of a parameter."""
    n_shards = 1
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            assert not placement.is_partial(), "FSDP2 reduces partial gradients in its backward"
            if not placement.is_replicate():
                n_shards *= parameter.device_mesh.size(axis)
    return layout.stage_ranks // n_shards


def squared_norm_share(
    gradients: Sequence[torch.Tensor], layout: Layout, norms: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """This rank's share of the squared 2-norm of all gradients: float64 scalar.

    ``norms``: their ``local_norms``, if the caller has them.

    Summed over all ranks of the job it is the squared norm: an element held by c ranks enters c times
    with weight 1/c. Works for any mixture of meshes, since no collective sees a DTensor.
    """
    by_copies: dict[int, list[torch.Tensor]] = {}
    for gradient, norm in zip(gradients, local_norms(gradients) if norms is None else norms):
        by_copies.setdefault(n_copies(gradient, layout), []).append(norm)
    shares = [torch.stack(group).double().square().sum() / copies for copies, group in sorted(by_copies.items())]
    return torch.stack(shares).sum()


def local_norms(gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The 2-norm of this rank's part of each gradient, scalars on its device."""
    tensors = [local_tensor(gradient) for gradient in gradients]
    if tensors[0].device.type == "cpu":
        # The CPU kernel adds up in the dtype of the result, one after another: 8e-5 off at 4M entries of
        # fp32, and by another amount for each way of sharding them.
        return [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch._foreach_norm(tensors)


def clip_by_norm(gradients: Sequence[torch.Tensor], norm: torch.Tensor, max_norm: float) -> None:
    """Scale gradients in place so that their global ``norm`` is at most ``max_norm``. No host sync."""
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor)
