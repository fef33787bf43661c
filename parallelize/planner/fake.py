"""One rank of any job on any machine: a process group without peers, and tensors without memory.

Everything private that this needs of torch (2.11 to 2.13) is in this file.
"""

import contextlib
import logging
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def fake_rank(world_size: int, rank: int = 0) -> Iterator[FakeTensorMode]:
    """Be rank ``rank`` of ``world_size``: collectives return at once. Yields the mode whose tensors have no memory.

    Raises ``RuntimeError`` in a process that has a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("a process with a process group cannot play another rank")
    chatter = logging.getLogger("torch.distributed.tensor._redistribute")
    level = chatter.level
    chatter.setLevel(logging.ERROR)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with _shape_propagation_without_modes():
            yield FakeTensorMode(allow_non_fake_inputs=True)  # the rotary tables are real
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it names process groups that are gone, and equal meshes would find them
        chatter.setLevel(level)


@contextlib.contextmanager
def _shape_propagation_without_modes() -> Iterator[None]:
    """DTensor runs each operation on fake tensors of its own to learn shapes; they must not meet ours."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    def alone(self, op_schema):
        with _disable_current_modes():
            return original(self, op_schema)

    setattr(ShardingPropagator, name, alone)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, original)


def fake_memory(part: nn.Module, mode: FakeTensorMode) -> None:
    """Give a part on the meta device parameters and buffers that look like memory, in place."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        with mode:
            local = torch.empty(local.shape, dtype=local.dtype, device="cpu")
        if isinstance(tensor, DTensor):
            return DTensor(local, tensor._spec, requires_grad=tensor.requires_grad)
        return local

    part._apply(fake)


def without_peers(schedule) -> None:
    """Let a pipeline schedule start although nobody answers: its stages have been told all shapes.

    Torch 2.13 first asks all stages whether that is so.
    """
    from torch.distributed.pipelining._utils import InferenceMode

    def told(stages, *_):
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    schedule._warmup_p2p = told


class _FusedNorm(torch.autograd.Function):
    """Shapes, dtypes and kept tensors of a GPU's fused RMS norm; not its values."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.narrow(-1, 0, 1).float())  # the last: a scale a row
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight, _ = ctx.saved_tensors
        return grad * weight, (grad * x).sum(dim=tuple(range(grad.dim() - 1)))


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """What a GPU does in one kernel is one operation inside: a CPU keeps several fp32 results of a norm instead."""
    original = torch.nn.functional.rms_norm
    torch.nn.functional.rms_norm = lambda x, shape, weight, eps: _FusedNorm.apply(x, weight)
    try:
        yield
    finally:
        torch.nn.functional.rms_norm = original
