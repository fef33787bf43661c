"""AdamW over all of a rank's model parts, with state by parameter name."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Weight decay is for matrices; norms and biases, the vectors, are left alone."""
    return parameter.dim() >= 2


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """Fused AdamW. One group per (decayed, mesh): a fused update cannot mix device meshes."""
    groups: dict[tuple, list] = {}
    for name, parameter in named:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault((is_decayed(name, parameter), mesh), []).append((name, parameter))
    return torch.optim.AdamW(
        [{"params": group, "weight_decay": weight_decay if decayed else 0.0} for (decayed, _), group in groups.items()],
        lr=lr, betas=betas, eps=eps, fused=True,
    )  # fmt: skip


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def create_state(optimizer: torch.optim.AdamW) -> None:
    """Allocate the moments, which torch creates in the first step, so that a checkpoint can be read into them.

    A step with zero gradients at rate zero: it leaves parameters as they are, but counts as one; what is
    loaded afterwards overwrites the count.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    set_lr(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.AdamW, named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """The state, flat: ``NAME.exp_avg``, ``NAME.exp_avg_sq``, ``NAME.step``. The tensors themselves, not copies."""
    return {
        f"{name}.{kind}": tensor
        for name, parameter in named.items()
        for kind, tensor in optimizer.state[parameter].items()
    }
