"""Collectives that autograd passes through, over the ranks of a one-dimensional mesh, on plain tensors."""

import torch
from torch.distributed.device_mesh import DeviceMesh

_ops = torch.ops._c10d_functional


def _gather(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    n, group = mesh.size(), mesh.get_group().group_name
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), n, group))
    # Parts lie one after another in the first dim; where that has one entry, the reshape moves nothing.
    return parts.unflatten(0, (n, -1)).movedim(0, dim).flatten(dim, dim + 1)


def _scatter_sum(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    n, group = mesh.size(), mesh.get_group().group_name
    parts = x.unflatten(dim, (n, -1)).movedim(dim, 0).flatten(0, 1)
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(parts.contiguous(), "sum", n, group))


def all_sum(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum over ranks, without a gradient."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "sum", mesh.get_group().group_name))


def all_max(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The largest of the ranks' entries, without a gradient."""
    return _ops.wait_tensor(_ops.all_reduce(x.contiguous(), "max", mesh.get_group().group_name))


class _GatherForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, mesh):
        ctx.dim, ctx.mesh = dim, mesh
        return _gather(x, dim, mesh)

    @staticmethod
    def backward(ctx, gradient):
        return _scatter_sum(gradient, ctx.dim, ctx.mesh), None, None


class _ScatterForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dim, mesh):
        ctx.dim, ctx.mesh = dim, mesh
        return _scatter_sum(x, dim, mesh)

    @staticmethod
    def backward(ctx, gradient):
        return _gather(gradient, ctx.dim, ctx.mesh), None, None


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        return all_sum(x, mesh)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh):
        ctx.mesh = mesh
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return all_sum(gradient, ctx.mesh), None


def gather(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """The ranks' pieces of ``dim`` (1 or higher, or of size 1 before it) put together; each rank's gradient is the sum of all, cut to its piece."""
    return _GatherForward.apply(x, dim, mesh)


def scatter_sum(x: torch.Tensor, dim: int, mesh: DeviceMesh) -> torch.Tensor:
    """The sum over ranks, cut to this rank's piece of ``dim``, which the ranks must divide: the inverse of ``gather``."""
    return _ScatterForward.apply(x, dim, mesh)


def sum_forward(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sum over ranks, whose gradient is the same on each: after a row-parallel layer."""
    return _SumForward.apply(x, mesh)


def sum_backward(x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """``x``, the same on every rank, whose gradient is the sum of theirs: before a column-parallel layer."""
    return _SumBackward.apply(x, mesh)
