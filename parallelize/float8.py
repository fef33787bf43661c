"""Matmuls of blocks in float8, by torchao (extra ``float8``): inputs, weights and gradients are scaled and cast for each product.

Parameters, their gradients and the optimizer stay as they are. torchao is imported here alone.
"""

from dataclasses import dataclass
from fnmatch import fnmatch

import torch
import torch.nn.functional as F
from torch import nn

_MULTIPLE = 16  # of a matrix's sides, for the GPU's float8 units


@dataclass(frozen=True)
class Float8:
    """recipe: one scale a tensor ("tensorwise") or one a row ("rowwise"). layers: globs of names in a block. min_features:
    smaller projections stay as they are. emulate: only the rounding, in the dtype of computation, on any device."""

    recipe: str
    layers: tuple[str, ...]
    min_features: int
    emulate: bool


class NothingChosen(ValueError):
    """No projection would be in float8."""


def apply_float8(block: nn.Module, float8: Float8, tp: int) -> None:
    """Have the block's chosen projections multiply in float8, before they are spread over ``tp`` ranks.

    Raises ``ImportError`` without torchao, and ``NothingChosen``.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    def chosen(module: nn.Module, name: str) -> bool:
        sides = module.in_features, module.out_features
        return (
            any(fnmatch(name, pattern) for pattern in float8.layers)
            and min(sides) >= float8.min_features
            and not any(side % (_MULTIPLE * tp) for side in sides)
        )

    projections = {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    names = {name for name, module in projections.items() if chosen(module, name)}
    if not names:
        sizes = ", ".join(
            f"{name} {module.out_features} x {module.in_features}" for name, module in projections.items()
        )
        raise NothingChosen(
            f"no projection of a block is chosen by {list(float8.layers)}, with at least {float8.min_features} features and sides "
            f"that are multiples of {_MULTIPLE * tp}; there are {sizes}"
        )
    config = Float8LinearConfig.from_recipe_name(float8.recipe)
    object.__setattr__(config, "emulate", float8.emulate)  # a frozen dataclass whose replace() warns
    convert_to_float8_training(block, config=config, module_filter_fn=lambda module, name: name in names)
    for name in names:
        block.get_submodule(name).float8_product = matmul_with_hp_or_float8_args.apply


def linear(module: nn.Linear, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` as the module multiplies; ``weight`` and ``bias``: of the module, or a part of it."""
    if not hasattr(module, "float8_product"):
        return F.linear(x, weight, bias)
    out = module.float8_product(x, weight.t(), module.linear_mm_config, module.config)
    return out if bias is None else out + bias
