"""From the meta device to real memory: each rank allocates and fills only its own slices."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from parallelize.recompute import named_parameters

try:  # private in torch 2.11 to 2.13; DCP relies on it for the same purpose
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "this torch release moved compute_local_shape_and_global_offset: see parallelize/materialize.py"
    ) from error


def local_slice(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a parameter begins and ends in the whole: (start, stop), one entry a dim."""
    if not isinstance(parameter, DTensor):
        return (0,) * parameter.dim(), tuple(parameter.shape)
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(start), tuple(lo + n for lo, n in zip(start, shape))


def materialize(part: nn.Module, device: torch.device) -> None:
    """Allocate a part's local shards and buffers on ``device``, uninitialised."""
    names_of: dict[int, list[str]] = {}
    for name, parameter in part.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)
    part.to_empty(device=device)
    # It makes two parameters of a tied one, where FSDP2 does not tie them again.
    for first, *others in names_of.values():
        for name in others:
            owner, _, key = name.rpartition(".")
            setattr(part.get_submodule(owner), key, part.get_parameter(first))


@torch.no_grad()
def fill_parameters(part: nn.Module, initial_value: Callable[..., torch.Tensor]) -> None:
    """Set each parameter from ``initial_value(name, shape, start, stop)``, which returns its slice on the CPU.

    ``shape`` is the parameter's global shape. Never holds more than one slice beside the parameters.
    """
    for name, parameter in named_parameters(part):
        start, stop = local_slice(parameter)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(initial_value(name, tuple(parameter.shape), start, stop))
