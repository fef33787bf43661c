"""AdamW over all of a rank's model parts, with state by parameter name."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from parallelize.grad_norm import local_tensor
from trainer.config_training import OptimizerGroup

_PIECE = 2**26  # elements whose moments are in fp32 at once, but for a larger single tensor


class AdamWWithSmallMoments(torch.optim.AdamW):
    """Fused AdamW that stores its moments in bfloat16 and updates them in fp32.

    Rounded to nearest, and so the same at any layout. What changes by less than 1/512 of itself a step stands still:
    ``config_rules`` refuses betas so near to 1.
    """

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for piece in _pieces(parameters):
                self._update(piece, group)

    def _update(self, parameters: list[nn.Parameter], group: dict) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["step"] = torch.zeros((), device=parameter.device)
                for kind in ("exp_avg", "exp_avg_sq"):
                    self.state[parameter][kind] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        stored = [
            [local_tensor(self.state[parameter][kind]) for parameter in parameters]
            for kind in ("exp_avg", "exp_avg_sq")
        ]
        parts = [local_tensor(parameter) for parameter in parameters]
        whole = [[moment.to(parameter.dtype) for moment, parameter in zip(kind, parts)] for kind in stored]
        adamw(
            parts, [local_tensor(parameter.grad) for parameter in parameters], *whole, [],
            [self.state[parameter]["step"] for parameter in parameters],
            fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            grad_scale=getattr(self, "grad_scale", None), found_inf=getattr(self, "found_inf", None),
        )  # fmt: skip
        for kind, updated in zip(stored, whole):
            torch._foreach_copy_(kind, updated)


def _pieces(parameters: list[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    piece, n_elements = [], 0
    for parameter in parameters:
        if piece and n_elements + local_tensor(parameter).numel() > _PIECE:
            yield piece
            piece, n_elements = [], 0
        piece.append(parameter)
        n_elements += local_tensor(parameter).numel()
    if piece:
        yield piece


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
    small_moments: bool = False,
    group_of: Callable[[str], OptimizerGroup | None] = lambda name: None,
) -> torch.optim.AdamW:
    """Fused AdamW. One group per (decay, scale of the rate, mesh): a fused update cannot mix device meshes.

    small_moments: moments in bfloat16.
    """
    groups: dict[tuple, list] = {}
    for name, parameter in named:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        own = group_of(name) or OptimizerGroup(match=("*",))
        decay = weight_decay if is_decayed(name, parameter) else 0.0
        decay = decay if own.weight_decay is None else own.weight_decay
        groups.setdefault((decay, own.lr_scale, mesh), []).append((name, parameter))
    return (AdamWWithSmallMoments if small_moments else torch.optim.AdamW)(
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
