"""AdamW over all of a rank's model parts, with state by parameter name."""

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config_training import OptimizerGroup


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Weight decay is for matrices; norms and biases, the vectors, are left alone."""
    return parameter.dim() >= 2


def build_optimizer(
    named: Iterable[tuple[str, nn.Parameter]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    group_of: Callable[[str], OptimizerGroup | None] = lambda name: None,
) -> torch.optim.AdamW:
    """Fused AdamW. One group per (decay, scale of the rate, mesh): a fused update cannot mix device meshes."""
    groups: dict[tuple, list] = {}
    for name, parameter in named:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        own = group_of(name) or OptimizerGroup(match=("*",))
        decay = weight_decay if is_decayed(name, parameter) else 0.0
        decay = decay if own.weight_decay is None else own.weight_decay
        groups.setdefault((decay, own.lr_scale, mesh), []).append((name, parameter))
    return torch.optim.AdamW(
        [
            {"params": group, "weight_decay": decay, "lr": lr * scale, "lr_scale": scale}
            for (decay, scale, _), group in groups.items()
        ]
        or [{"params": [], "lr_scale": 1.0}],  # of a pipeline rank whose stages are frozen
        lr=lr, betas=betas, eps=eps, fused=True,
    )  # fmt: skip


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """``lr``: of the config's schedule; each group has its own share of it."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


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
