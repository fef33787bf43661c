"""What the planner knows of a model and of one way to run it. Loads no torch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from parallelize.layout import Layout
from parallelize.planner.operations import Operation
from parallelize.planner.replay import Orders, orders_with_gathers
from parallelize.schedules import Schedule


@dataclass(frozen=True)
class ModelNumbers:
    """A decoder of units: an "embedding", "block"s ("kept_block" if not recomputed) and a "head" (norm, output matrix, loss).

    tied: the head's matrix is the embedding's.
    """

    dim: int
    vocab_size: int
    head_dim: int
    tied: bool


class LocalShape(NamedTuple):
    """A parameter on the first tensor-parallel rank, which never has less than another.

    summed: every rank holds all of it and computes a part of its gradient, which is summed over tp.
    """

    dims: tuple[int, ...]
    summed: bool
    trained: bool = True


Shapes = Mapping[str, tuple[LocalShape, ...]]  # unit -> its parameters


def trained_of(shapes: tuple[LocalShape, ...]) -> tuple[LocalShape, ...]:
    """Those with a gradient and an optimizer's state."""
    return tuple(shape for shape in shapes if shape.trained)


def starts_detached(shapes: Shapes) -> bool:
    """Whether nothing is trained before the first block's projections: its input has no gradient, and the embedding no backward."""
    norms = [shape for shape in trained_of(shapes["block"]) if len(shape.dims) == 1]
    return not trained_of(shapes["embedding"]) and not norms


def gathered_elements(shapes: tuple[LocalShape, ...], dp_shard: int) -> int:
    """Elements of a unit's parameters as FSDP2 gathers them: dim 0 in equal rows a rank, the last ones padded."""
    return dp_shard * sharded_elements(shapes, dp_shard)


def sharded_elements(shapes: tuple[LocalShape, ...], dp_shard: int) -> int:
    """Elements of one rank's share of a unit's parameters, padding included."""
    return sum(math.ceil(shape.dims[0] / dp_shard) * math.prod(shape.dims[1:]) for shape in shapes)


def with_one_table(shapes: Shapes) -> Shapes:
    """Of a model with tied embeddings on one stage: FSDP2's root unit, here the embedding, has what the ends share."""
    matrix, *norm = sorted(shapes["head"], key=lambda shape: -math.prod(shape.dims))
    assert matrix in shapes["embedding"]
    return {**shapes, "embedding": (*shapes["embedding"], *norm), "head": ()}


@dataclass(frozen=True)
class SplitTrace:
    """A unit's backward in two halves, for its input and then for its weights. Bytes.

    kept_bytes:              held between the halves, instead of ``UnitTrace.kept_bytes``; not the input's gradient.
    input_bytes:             of the input's gradient.
    left_bytes:              held after the second half until that of the whole stage is done.
    input_peak_bytes:        most above what was live before the first half.
    weight_peak_bytes:       most above what was live before the second half, if the weights have gradients already.
    first_weight_peak_bytes: if not.
    """

    kept_bytes: int
    input_bytes: int
    left_bytes: int
    input_peak_bytes: int
    weight_peak_bytes: int
    first_weight_peak_bytes: int


@dataclass(frozen=True)
class UnitTrace:
    """One unit on one rank with its parameters gathered, for one micro-batch. Bytes.

    kept_bytes:          held from the forward until the backward, the unit's output included, its input not.
    forward_peak_bytes:  most above what was live before the forward.
    backward_peak_bytes: most above what was live before the backward, the output's gradient not counted.
    forward, backward:   what the device is asked to do, and how often; recomputation belongs to the backward.
    weight:              the part of the backward that only the weights' gradients need.
    split:               of a backward in two halves, if traced.
    """

    kept_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    forward: Mapping[Operation, int]
    backward: Mapping[Operation, int]
    weight: Mapping[Operation, int]
    split: SplitTrace | None = None


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of an element of: stored parameters and gradients, parameters that are frozen, computation, gradient reduction,
    the optimizer's moments."""

    param: int
    frozen: int
    compute: int
    reduce: int
    moment: int


@dataclass(frozen=True)
class Job:
    """One way to run a training step: all that memory and time depend on besides the model and the machine.

    layers_per_stage: stage -> blocks. recompute: of each ``recompute_every``-th block. reshard: free gathered parameters
    and reduce gradients in each micro-batch.
    """

    layout: Layout
    schedule: Schedule
    virtual_stages: int
    layers_per_stage: tuple[int, ...]
    seq_len: int
    micro_batch_size: int
    n_microbatches: int
    n_schedule_runs: int
    recompute: str
    reshard: bool
    elements: ElementBytes
    sequence_parallel: bool = True
    loss_parallel: bool = True
    defers_projection: bool = False
    recompute_every: int = 1

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 is applied: ``parallelize.fsdp.needs_fsdp``."""
        return self.layout.dp > 1 or {self.elements.param, self.elements.frozen} != {self.elements.compute}

    @property
    def n_stages(self) -> int:
        return len(self.layers_per_stage)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        return self.schedule.stage_ranks(self.layout.pp, self.n_stages) if self.layout.pp > 1 else (0,)

    def orders(self) -> Orders:
        """The actions of one run of the schedule, by pipeline rank, with gathers; () without a pipeline."""
        return self._orders(self.n_microbatches // self.n_schedule_runs)

    def orders_that_fill_memory(self) -> Orders:
        """The same, or of fewer micro-batches with the same worst moment: these repeat themselves after two or three rounds."""
        n = self.n_microbatches // self.n_schedule_runs
        repeating = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
        if getattr(self.schedule, "name", None) in repeating:
            n = min(n, 4 * (n // max(1, n // self.layout.pp)))
        return self._orders(n)

    def _orders(self, n_microbatches: int) -> Orders:
        if self.layout.pp == 1:
            return ()
        return orders_with_gathers(self.schedule, self.layout.pp, self.virtual_stages, n_microbatches)

    def hidden_bytes(self, dim: int) -> int:
        """Of what one stage sends to the next: one micro-batch's residual stream on one rank."""
        spread = self.layout.tp if self.sequence_parallel else 1
        return self.micro_batch_size * (self.seq_len // spread) * dim * self.elements.compute

    def output_bytes(self, model: ModelNumbers) -> int:
        """What the last stage gives of one micro-batch, on one rank: logits, or the hidden states before them."""
        spread = self.layout.tp if self.loss_parallel else 1
        width = model.dim if self.defers_projection else math.ceil(model.vocab_size / spread)
        return self.micro_batch_size * self.seq_len * width * self.elements.compute

    def units_of(self, stage: int) -> list[str]:
        """The stage's units in the order of the forward."""
        first = sum(self.layers_per_stage[:stage])
        layers = range(first, first + self.layers_per_stage[stage])
        units = ["kept_block" if layer % self.recompute_every else "block" for layer in layers]
        if stage == 0:
            units.insert(0, "embedding")
        if stage == self.n_stages - 1:
            units.append("head")
        return units


def stays_gathered(units: list[str], index: int, shapes: Shapes, model: ModelNumbers, job: Job) -> bool:
    """Whether FSDP2 keeps the parameters of ``units[index]`` from the forward to the backward, whatever the others do.

    That is the model's last unit that has any, and a root unit.
    """
    if job.layout.pp > 1:
        return not job.reshard or units[index] == "head"
    root = model.tied and units[index] == "embedding" and job.layout.pp == 1
    return root or not job.reshard or not any(shapes[unit] for unit in units[index + 1 :])
