"""Tensor-parallel styles that compute with local tensors.

Torch's own styles do each operation through DTensor, which asks on the host for every matmul and norm how it is sharded:
on a CPU, or with short kernels, longer than the operation takes. Here only parameters are DTensors (so checkpoints, FSDP2
and the optimizer see what they always see); a module's forward takes its local part out and says in the open what is
gathered and what is summed. ``mesh`` is the tensor-parallel one throughout.
"""

import functools

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from parallelize.collectives import gather, scatter_sum, sum_backward, sum_forward
from parallelize.float8 import linear


@functools.cache
def _computing_locally(module_type: type) -> type:
    """The module's type with the forward of its style. One for all modules of a type: torch.compile tells layers apart by it."""

    def forward(self, *inputs):
        return self.tp_style.forward(self, self.tp_mesh, *inputs)

    return type(f"Local{module_type.__name__}", (module_type,), {"forward": forward})


class LocalStyle(ParallelStyle):
    """Spreads a module's own parameters by ``placements``, and computes ``forward`` in place of the module's."""

    placements: dict[str, Placement] = {}

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            spread = distribute_tensor(parameter, mesh, [self.placements[name]], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(spread, parameter.requires_grad))
        module.tp_style, module.tp_mesh = self, mesh
        module.__class__ = _computing_locally(type(module))
        return module

    def forward(self, module: nn.Module, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def _local(parameter: DTensor | None) -> torch.Tensor | None:
    return None if parameter is None else parameter.to_local()


def _partial(parameter: DTensor | None) -> torch.Tensor | None:
    """The local part of a replicated parameter, where each rank's gradient is only a summand."""
    return None if parameter is None else parameter.to_local(grad_placements=[Partial()])


class GatheredInput(ParallelStyle):
    """Before attention or feed-forward: the whole sequence, gathered once for all projections that follow.

    sequence_parallel: ranks hold S/tp tokens of the stream; else all of it.
    """

    def __init__(self, sequence_parallel: bool):
        self.sequence_parallel = sequence_parallel

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        def gathered(module, inputs):
            x_BSD, *others = inputs
            return whole_stream(x_BSD, mesh, self.sequence_parallel), *others

        module.register_forward_pre_hook(gathered)
        return module


def whole_stream(x_BSD: torch.Tensor, mesh: DeviceMesh, sequence_parallel: bool) -> torch.Tensor:
    """The stream as a column-parallel layer takes it: [B, S, D] on each rank."""
    return gather(x_BSD, 1, mesh) if sequence_parallel else sum_backward(x_BSD, mesh)


def summed_stream(x_BSD: torch.Tensor, mesh: DeviceMesh, sequence_parallel: bool) -> torch.Tensor:
    """What the ranks computed in parts, summed: [B, S/tp, D] of it with ``sequence_parallel``, else [B, S, D]."""
    return scatter_sum(x_BSD, 1, mesh) if sequence_parallel else sum_forward(x_BSD, mesh)


def is_adapted(module: nn.Module) -> bool:
    """Whether it has a low-rank adapter: ``lora_a`` [rank, in], ``lora_b`` [out, rank], ``low_rank``."""
    return hasattr(module, "lora_a")


class ColwiseLinear(LocalStyle):
    """A linear layer whose output features are spread; its input is whole (``GatheredInput``).

    Of an adapter every rank has A, and its rows of B: it sees a summand of A's gradient.
    """

    placements = {"weight": Shard(0), "bias": Shard(0), "lora_a": Replicate(), "lora_b": Shard(0)}

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        out = linear(module, x, _local(module.weight), _local(module.bias))
        if is_adapted(module):
            out = out + module.low_rank(x, _partial(module.lora_a), _local(module.lora_b))
        return out


class RowwiseLinear(LocalStyle):
    """A linear layer whose input features are spread; its outputs are summed over the ranks.

    Of an adapter every rank has its columns of A, and B, whose gradient it sees a summand of.
    """

    placements = {"weight": Shard(1), "bias": Replicate(), "lora_a": Shard(1), "lora_b": Replicate()}

    def __init__(self, sequence_parallel: bool):
        self.sequence_parallel = sequence_parallel

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        part_BSD = linear(module, x, _local(module.weight))
        if is_adapted(module):
            part_BSD = part_BSD + module.low_rank(x, _local(module.lora_a), _partial(module.lora_b))
        out_BSD = summed_stream(part_BSD, mesh, self.sequence_parallel)
        if module.bias is None:
            return out_BSD
        return out_BSD + (_partial(module.bias) if self.sequence_parallel else _local(module.bias))


class PartialNorm(LocalStyle):
    """An RMSNorm of which each rank sees only some tokens or some heads, with the whole weight."""

    placements = {"weight": Replicate()}

    def forward(self, module: nn.RMSNorm, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, module.normalized_shape, _partial(module.weight), module.eps)


class ReplicatedKvHeads(LocalStyle):
    """A key or value projection with fewer heads than there are ranks.

    Every rank holds the whole projection and computes the one head that its query heads share.
    """

    placements = {name: Replicate() for name in ("weight", "bias", "lora_a", "lora_b")}

    def __init__(self, n_kv_heads: int):
        self.n_kv_heads = n_kv_heads

    def forward(self, module: nn.Linear, mesh: DeviceMesh, x: torch.Tensor) -> torch.Tensor:
        head = mesh.get_local_rank() * self.n_kv_heads // mesh.size()

        def own(parameter):
            return None if parameter is None else _partial(parameter).unflatten(0, (self.n_kv_heads, -1))[head]

        out = linear(module, x, own(module.weight), own(module.bias))
        if is_adapted(module):
            out = out + module.low_rank(x, _partial(module.lora_a), own(module.lora_b))
        return out


class VocabParallelEmbedding(LocalStyle):
    """An embedding whose rows are spread: each rank looks up the ids that are its own, and the ranks' results are summed."""

    placements = {"weight": Shard(0)}

    def __init__(self, sequence_parallel: bool):
        self.sequence_parallel = sequence_parallel

    def forward(self, module: nn.Embedding, mesh: DeviceMesh, tokens: torch.Tensor) -> torch.Tensor:
        weight = _local(module.weight)
        rows = tokens - first_row(module.weight.shape[0], mesh)
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        found = F.embedding(rows.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
        return summed_stream(found, mesh, self.sequence_parallel)


def first_row(n_rows: int, mesh: DeviceMesh) -> int:
    """Where a rank's part of ``n_rows`` begins. DTensor's shards are as torch.chunk cuts: all but the last are full."""
    return min(mesh.get_local_rank() * -(-n_rows // mesh.size()), n_rows)


class VocabParallelHead(LocalStyle):
    """The last projection, whose rows are spread. Gives logits: a sharded DTensor with ``loss_parallel``, else whole.

    Or, of a module that ``defers``, the whole hidden states and its rows.
    """

    placements = {"weight": Shard(0)}

    def __init__(self, sequence_parallel: bool, loss_parallel: bool):
        self.sequence_parallel = sequence_parallel
        self.loss_parallel = loss_parallel

    def forward(self, module: nn.Module, mesh: DeviceMesh, x_BSD: torch.Tensor):
        x_BSD = whole_stream(x_BSD, mesh, self.sequence_parallel)
        if module.defers:
            return x_BSD, _local(module.weight)
        local = F.linear(x_BSD, _local(module.weight))
        shape = (*local.shape[:-1], module.weight.shape[0])
        stride = torch.empty(shape, device="meta").stride()
        logits = DTensor.from_local(local, mesh, [Shard(-1)], run_check=False, shape=shape, stride=stride)
        return logits if self.loss_parallel else logits.full_tensor()
