"""What each unit of the configured model keeps and does, for any tensor-parallel degree, recompute mode and micro-batch."""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from parallelize.layout import Layout
from parallelize.mesh import Mesh
from parallelize.planner.fake import fake_memory, fake_rank, gpu_kernels
from parallelize.planner.numbers import LocalShape, Shapes, UnitTrace
from parallelize.planner.unit_trace import trace_unit
from trainer.build import build_units
from trainer.config import Config
from trainer.config_rules import Resolved
from trainer.loss import TokenLoss, torchs_cross_entropy


class TracedUnits:
    """Traces units when they are first asked for.

    A trace of the first call for (tp, recompute, micro-batch) takes some tenths of a second.
    """

    def __init__(self, config: Config, architecture):
        self.config = config
        self.architecture = architecture
        self.shapes = functools.cache(self._shapes)
        self.traces = functools.cache(self._traces)
        self._trace = functools.cache(self._trace)

    def _traces(self, tp: int, recompute: str, micro_batch_size: int) -> dict[str, UnitTrace]:
        """Unit -> its trace. Torch copies a batch of several sequences where it can view one; from two on, all grows
        by the same for each."""
        if micro_batch_size <= 4:
            ends = self._trace(tp, "none", micro_batch_size, blocks=False)  # only blocks are recomputed
            return ends | self._trace(tp, recompute, micro_batch_size, blocks=True)
        two, four = self.traces(tp, recompute, 2), self.traces(tp, recompute, 4)
        return {unit: _extrapolated(two[unit], four[unit], (micro_batch_size - 2) / 2) for unit in four}

    def _shapes(self, tp: int) -> Shapes:
        with fake_rank(tp):
            part = build_units(self._resolved(tp, "none", 1), Mesh(Layout(tp=tp), "cpu"), "cuda")
            return {
                name: _local_shapes(modules, self.config.parallel.sequence_parallel)
                for name, modules in _units(part).items()
            }

    def _trace(self, tp: int, recompute: str, micro_batch_size: int, blocks: bool) -> dict[str, UnitTrace]:
        resolved = self._resolved(tp, recompute, micro_batch_size)
        with fake_rank(tp) as mode, gpu_kernels():
            mesh = Mesh(resolved.layout, "cpu")
            part = build_units(resolved, mesh, "cuda")
            fake_memory(part, mode)
            part.rebuild_buffers("cpu")
            return {name: trace(mode, part, resolved) for name, trace in _TRACE.items() if (name == "block") == blocks}

    def _resolved(self, tp: int, recompute: str, micro_batch_size: int) -> Resolved:
        config = self.config.model_copy(
            update={
                "parallel": self.config.parallel.model_copy(update={"tp": tp, "pp": 1}),
                "activation_checkpoint": self.config.activation_checkpoint.model_copy(update={"mode": recompute}),
                "training": self.config.training.model_copy(update={"micro_batch_size": micro_batch_size}),
                "compile": self.config.compile.model_copy(update={"enabled": False}),
            }
        )
        return Resolved(config, replace(self.architecture, n_layers=1), Layout(tp=tp), (1,), (0,))


def _extrapolated(one: UnitTrace, other: UnitTrace, steps: float) -> UnitTrace:
    """Bytes at ``one`` + ``steps`` times what ``other`` has more; what is done is left as it is."""

    def at(name: str) -> int:
        first, second = getattr(one, name), getattr(other, name)
        return round(first + steps * (second - first))

    return replace(
        other,
        kept_bytes=at("kept_bytes"),
        forward_peak_bytes=at("forward_peak_bytes"),
        backward_peak_bytes=at("backward_peak_bytes"),
    )


def _units(part: nn.Module) -> dict[str, list[nn.Module]]:
    return {"embedding": [part.tok_embeddings], "block": [part.layers["0"]], "head": [part.norm, part.output]}


def _local_shapes(modules: list[nn.Module], sequence_parallel: bool) -> tuple[LocalShape, ...]:
    shapes = []
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        whole = isinstance(parameter, DTensor) and parameter.placements[0].is_replicate()
        dims = tuple(parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape)
        # A replicated matrix is a key or value projection of few heads; a vector is a norm, over a part of the sequence.
        shapes.append(LocalShape(dims, summed=whole and (sequence_parallel or len(dims) > 1)))
    return tuple(shapes)


def _hidden(mode: FakeTensorMode, part: nn.Module, resolved: Resolved) -> torch.Tensor:
    training, parallel = resolved.config.training, resolved.config.parallel
    length = training.seq_len // (resolved.layout.tp if parallel.sequence_parallel else 1)
    with mode:
        return torch.empty(
            training.micro_batch_size,
            length,
            resolved.architecture.dim,
            dtype=part.norm.weight.dtype,
            requires_grad=True,
        )


def _tokens(mode: FakeTensorMode, resolved: Resolved) -> torch.Tensor:
    training = resolved.config.training
    with mode:
        return torch.zeros(training.micro_batch_size, training.seq_len, dtype=torch.int64)


def _trace_embedding(mode: FakeTensorMode, part: nn.Module, resolved: Resolved) -> UnitTrace:
    tokens = _tokens(mode, resolved)
    return trace_unit(mode, part.tok_embeddings, lambda: part.tok_embeddings(tokens), [tokens])


def _trace_block(mode: FakeTensorMode, part: nn.Module, resolved: Resolved) -> UnitTrace:
    hidden, block = _hidden(mode, part, resolved), part.layers["0"]
    return trace_unit(mode, block, lambda: block(hidden, part.rotary_table), [hidden, part.rotary_table])


def _trace_head(mode: FakeTensorMode, part: nn.Module, resolved: Resolved) -> UnitTrace:
    hidden, labels = _hidden(mode, part, resolved), _tokens(mode, resolved)
    loss_fn = TokenLoss(torchs_cross_entropy)
    with mode:
        loss_fn.n_tokens = torch.ones((), dtype=torch.int64)
    sharded = resolved.layout.tp > 1 and resolved.config.parallel.loss_parallel
    with loss_parallel() if sharded else contextlib.nullcontext():
        head = nn.ModuleList([part.norm, part.output])
        return trace_unit(mode, head, lambda: loss_fn(part.output(part.norm(hidden)), labels), [hidden, labels])


_TRACE: dict[str, Callable] = {"embedding": _trace_embedding, "block": _trace_block, "head": _trace_head}
