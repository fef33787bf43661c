"""What each unit of the configured model keeps and does, for any tensor-parallel degree, recompute mode and micro-batch."""

import contextlib
import functools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import fields, replace
from functools import partial

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from models.decoder_config import DecoderConfig
from parallelize.layout import Layout
from parallelize.mesh import Mesh
from parallelize.planner.fake import fake_memory, fake_rank, gpu_kernels
from parallelize.planner.numbers import LocalShape, Shapes, SplitTrace, UnitTrace
from parallelize.planner.unit_trace import trace_split, trace_unit
from trainer.build import build_units, token_loss
from trainer.config import Config
from trainer.config_rules import Resolved
from trainer.loss import torchs_cross_entropy

UNITS = ("embedding", "block", "head")


class TracedUnits:
    """Traces units when they are first asked for, or before, on all cores.

    The first call for (tp, recompute, micro-batch) takes some tenths of a second.
    """

    def __init__(self, config: Config, architecture: DecoderConfig):
        self.config = config
        self.architecture = architecture
        self.shapes = functools.cache(self._shapes)
        self.traces = functools.cache(self._traces)
        self._trace_split = functools.cache(self._trace_split)
        self._known: dict[_Job, dict[str, UnitTrace]] = {}  # what has been traced

    def trace_before(self, wanted: Iterable[tuple[int, str, int]]) -> None:
        """Have what ``traces`` needs for these (tp, recompute, micro-batch), on all cores."""
        jobs = {job for of_unit in wanted for job in _jobs(*of_unit)} - self._known.keys()
        groups = _groups(jobs)
        if len(groups) > 1 and "fork" in multiprocessing.get_all_start_methods():
            # A fork has torch loaded; threads of its parent's it has none, and must not wait for any.
            pool = ProcessPoolExecutor(
                min(len(groups), os.cpu_count() or 1), multiprocessing.get_context("fork"),
                initializer=torch.set_num_threads, initargs=(1,),
            )  # fmt: skip
            with pool:
                for traced in pool.map(partial(_trace, self.config, self.architecture), groups):
                    self._known |= traced

    def _traces(self, tp: int, recompute: str, micro_batch_size: int, split: bool = False) -> dict[str, UnitTrace]:
        """Unit -> its trace. Torch copies a batch of several sequences where it can view one; from two on, all grows
        by the same for each. split: of a backward in two halves too, without recomputation."""
        if micro_batch_size > 4:
            self.trace_before([(tp, recompute, 2), (tp, recompute, 4)])
            two, four = (self.traces(tp, recompute, size, split) for size in (2, 4))
            return {unit: _extrapolated(two[unit], four[unit], (micro_batch_size - 2) / 2) for unit in four}
        jobs = _jobs(tp, recompute, micro_batch_size)
        if unknown := [job for job in jobs if job not in self._known]:
            self._known |= _trace(self.config, self.architecture, unknown)
        traces = {unit: trace for job in jobs for unit, trace in self._known[job].items()}
        if split:
            splits = self._trace_split(tp, micro_batch_size)
            return {unit: replace(trace, split=splits.get(unit)) for unit, trace in traces.items()}
        return traces

    def _shapes(self, tp: int) -> Shapes:
        with fake_rank(tp):
            part = build_units(
                _resolved(self.config, self.architecture, tp, "none", 1), Mesh(Layout(tp=tp), "cpu"), "cuda"
            )
            return {
                name: _local_shapes(modules, self.config.parallel.sequence_parallel)
                for name, modules in _units(part).items()
            }

    def _trace_split(self, tp: int, micro_batch_size: int) -> dict[str, SplitTrace]:
        with _fake_rank(tp) as (mode, mesh):
            resolved = _resolved(self.config, self.architecture, tp, "none", micro_batch_size)
            part = _fake_part(resolved, mode, mesh)
            return {name: run_unit(trace_split, name, mode, part, resolved, mesh) for name in ("block", "head")}


_Job = tuple[int, str, int, bool]  # tp, recompute, micro-batch, whether it is of blocks or of the ends


def _jobs(tp: int, recompute: str, micro_batch_size: int) -> tuple[_Job, _Job]:
    """The ends are not recomputed."""
    return (tp, "none", micro_batch_size, False), (tp, recompute, micro_batch_size, True)


def _groups(jobs: Iterable[_Job]) -> list[list[_Job]]:
    """For a process each: of one tp and micro-batch, where torch remembers what the first has found out of shapes."""
    groups: dict[tuple[int, int], list[_Job]] = {}
    for job in sorted(jobs):
        groups.setdefault((job[0], job[2]), []).append(job)
    by_work = sorted(groups.items(), key=lambda item: (item[0][0] == 1, item[0]))  # the quickest last
    return [group for _, group in by_work]


def _trace(config: Config, architecture: DecoderConfig, jobs: list[_Job]) -> dict[_Job, dict[str, UnitTrace]]:
    """Jobs of one tp."""
    traced = {}
    with _fake_rank(jobs[0][0]) as (mode, mesh):
        for job in jobs:
            *varied, blocks = job
            resolved = _resolved(config, architecture, *varied)
            part = _fake_part(resolved, mode, mesh)
            units = [name for name in UNITS if (name == "block") == blocks]
            traced[job] = {name: run_unit(trace_unit, name, mode, part, resolved, mesh) for name in units}
    return traced


@contextlib.contextmanager
def _fake_rank(tp: int) -> Iterator[tuple[FakeTensorMode, Mesh]]:
    """The mode of its tensors, and the mesh."""
    with fake_rank(tp) as mode, gpu_kernels():
        yield mode, Mesh(Layout(tp=tp), "cpu")


def _fake_part(resolved: Resolved, mode: FakeTensorMode, mesh: Mesh) -> nn.Module:
    """A model of one block."""
    part = build_units(resolved, mesh, "cuda")
    fake_memory(part, mode)
    part.rebuild_buffers("cpu")
    return part


def _resolved(config: Config, architecture: DecoderConfig, tp: int, recompute: str, micro_batch_size: int) -> Resolved:
    varied = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"tp": tp}),
            "activation_checkpoint": config.activation_checkpoint.model_copy(update={"mode": recompute}),
            "training": config.training.model_copy(update={"micro_batch_size": micro_batch_size}),
            "compile": config.compile.model_copy(update={"enabled": False}),
            "float8": type(config.float8)(),
        }
    )
    return with_one_block(Resolved(varied, architecture, Layout(tp=tp), (), ()))


def with_one_block(resolved: Resolved) -> Resolved:
    """The model with one block, on one stage."""
    config = resolved.config
    parallel = config.parallel.model_copy(update={"pp": 1})
    return replace(
        resolved,
        config=config.model_copy(update={"parallel": parallel}),
        architecture=replace(resolved.architecture, n_layers=1),
        layers_per_stage=(1,),
        stage_ranks=(0,),
    )


def _extrapolated(one: UnitTrace, other: UnitTrace, steps: float) -> UnitTrace:
    """Bytes at ``one`` + ``steps`` times what ``other`` has more; what is done is left as it is."""

    def at(first, second):
        values = {
            field.name: getattr(first, field.name)
            + round(steps * (getattr(second, field.name) - getattr(first, field.name)))
            for field in fields(first)
            if field.name.endswith("_bytes")
        }
        return replace(second, **values)

    split = None if one.split is None else at(one.split, other.split)
    return replace(at(one, other), split=split)


def _units(part: nn.Module) -> dict[str, list[nn.Module]]:
    return {"embedding": [part.tok_embeddings], "block": [part.layers["0"]], "head": [part.norm, part.output]}


def _local_shapes(modules: list[nn.Module], sequence_parallel: bool) -> tuple[LocalShape, ...]:
    shapes = []
    for parameter in (parameter for module in modules for parameter in module.parameters()):
        whole = isinstance(parameter, DTensor) and parameter.placements[0].is_replicate()
        dims = tuple(parameter.to_local().shape if isinstance(parameter, DTensor) else parameter.shape)
        # A replicated matrix is a key or value projection of few heads; a vector is a norm, over a part of the sequence.
        shapes.append(
            LocalShape(dims, summed=whole and (sequence_parallel or len(dims) > 1), trained=parameter.requires_grad)
        )
    return tuple(shapes)


def _hidden(mode: AbstractContextManager, part: nn.Module, resolved: Resolved) -> torch.Tensor:
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


def _tokens(mode: AbstractContextManager, resolved: Resolved) -> torch.Tensor:
    training = resolved.config.training
    with mode:
        return torch.zeros(training.micro_batch_size, training.seq_len, dtype=torch.int64)


def run_unit(trace: Callable, name: str, mode: AbstractContextManager, part: nn.Module, resolved: Resolved, mesh: Mesh):
    """``trace(mode, unit, run, inputs)`` for one unit of ``part``; mode: in which its inputs are made."""
    if name == "embedding":
        tokens = _tokens(mode, resolved)
        return trace(mode, part.tok_embeddings, lambda: part.tok_embeddings(tokens), [tokens])
    hidden = _hidden(mode, part, resolved)
    if name == "block":
        block = part.layers["0"]
        return trace(mode, block, lambda: block(hidden, part.rotary_table), [hidden, part.rotary_table])
    labels, head = _tokens(mode, resolved), nn.ModuleList([part.norm, part.output])
    loss_fn = token_loss(resolved, mesh)
    loss_fn.summed = torchs_cross_entropy
    with mode:
        loss_fn.n_tokens = torch.ones((), dtype=torch.int64)
    sharded = resolved.layout.tp > 1 and resolved.config.parallel.loss_parallel
    with loss_parallel() if sharded else contextlib.nullcontext():
        return trace(mode, head, lambda: loss_fn(part.output(part.norm(hidden)), labels), [hidden, labels])
