"""Low-rank adapters (Hu et al. 2021) beside linear layers: ``x W^T + scale (x A^T) B^T``. Plain torch.nn, one device.

A and B are parameters of the layer that they adapt, ``lora_a`` [rank, in] and ``lora_b`` [out, rank], so that no other
parameter changes its name.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter. Made of one by ``add_adapters``."""

    def add_adapter(self, rank: int, scale: float) -> None:
        weight, self.lora_scale = self.weight, scale
        self.lora_a = nn.Parameter(weight.new_empty(rank, self.in_features))
        self.lora_b = nn.Parameter(weight.new_empty(self.out_features, rank))

    def low_rank(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """What the adapter adds: [..., out] of x [..., in], by A and B or parts of them."""
        return F.linear(F.linear(x, a), b) * self.lora_scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.low_rank(x, self.lora_a, self.lora_b)


def adaptable(model: nn.Module) -> list[str]:
    """Names of the projections that can have an adapter: all that blocks hold."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "." in name]


def add_adapters(model: nn.Module, names: Iterable[str], rank: int, scale: float) -> None:
    """Give the linear layers of these names adapters, in place, with memory as it was."""
    for name in names:
        layer = model.get_submodule(name)
        layer.__class__ = AdaptedLinear
        layer.add_adapter(rank, scale)
