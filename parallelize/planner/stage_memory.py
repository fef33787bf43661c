"""Memory of one pipeline stage as it runs forwards and backwards, whole or split in two. Loads no torch."""

import math
from collections.abc import Iterator

from parallelize.planner.numbers import Job, UnitTrace, gathered_elements, sharded_elements, trained_of

Moment = tuple[float, float, float]  # bytes of whole gradients, activations, logits


class Unit:
    """One unit of a stage: its trace, and its parameters in bytes."""

    def __init__(self, name: str, trace: UnitTrace, shapes: tuple, stays: bool, job: Job):
        layout, elements = job.layout, job.elements
        trained = trained_of(shapes)
        self.name = name
        self.trace = trace
        self.n_trained = len(trained)
        self.sharded = sharded_elements(trained, layout.dp_shard)  # of those that are trained
        frozen = sharded_elements(shapes, layout.dp_shard) - self.sharded
        self.parameters = self.sharded * elements.param + frozen * elements.frozen
        self.gathered = gathered_elements(shapes, layout.dp_shard) * elements.compute if job.fsdp else 0  # copies
        whole = gathered_elements(trained, layout.dp_shard)
        self.computed = whole * elements.compute  # gradients as autograd gives them,
        self.reduced = whole * (elements.reduce if job.fsdp else elements.param)  # and as they are added up
        self.largest = max((math.prod(shape.dims) for shape in trained), default=0) * elements.compute
        self._last = math.prod(trained[-1].dims) if trained and layout.dp_shard > 1 else 0
        self._share = 1 / layout.dp_shard
        self._cast = self.sharded * elements.param if elements.reduce != elements.param else 0
        self._fsdp = job.fsdp
        self.stays = stays  # gathered from the forward to the backward

    def reduction(self, whole: int, element_bytes: int) -> float:
        """Most while FSDP2 reduces the unit's ``whole`` gradients, of ``element_bytes`` each.

        Beside them the input and the output, in the reduction's dtype, and at last the output in the parameters'. By then
        all whole gradients are freed but the last, which a variable of a loop in torch still names.
        """
        if not self._fsdp:
            return whole
        return self.reduced * (1 + self._share) + max(whole, self._last * element_bytes + self._cast)


class Held:
    """Bytes kept for the backward: (of blocks and the embedding, of the head)."""

    def __init__(self):
        self.activations = self.logits = 0

    def add(self, unit: Unit, times: int) -> None:
        self.add_bytes(unit, times * unit.trace.kept_bytes)

    def add_bytes(self, unit: Unit, n_bytes: int) -> None:
        if unit.name == "head":
            self.logits += n_bytes
        else:
            self.activations += n_bytes

    def with_peak(self, unit: Unit, peak: int) -> tuple[int, int]:
        """With what ``unit`` has at its own worst moment."""
        in_head = unit.name == "head"
        return self.activations + (0 if in_head else peak), self.logits + (peak if in_head else 0)


class StageMemory:
    """What each action of a stage adds to the memory of its rank.

    A gradient that autograd hands over whole is ``summed`` in the reduction's dtype by FSDP2 at the end of a unit's
    backward. The weights' half of a split backward passes by that: its gradients are ``pending`` in the dtype of
    computation, until the next backward for the input.
    """

    def __init__(self, job: Job, stage: int, units: list[Unit], output: int):
        self.gathered = sum(unit.gathered for unit in units)
        self._job = job
        self._units = units
        self._is_first, self._is_last = stage == 0, stage == job.n_stages - 1
        self._output = output if self._is_last else 0  # torch holds a stage's output until its backward
        self._summed = self._pending = False
        self._known: dict[tuple, tuple] = {}

    def run(self, kind: str) -> tuple[Moment, Moment]:
        """(worst moment above what was held before, what is held more afterwards)."""
        if kind == "I" and self._is_first:
            return (0, 0, 0), (0, 0, 0)  # without an input to go on to, torch leaves all to the weights' half
        if kind == "W" and self._is_first:
            kind = "B"
        key = kind, self._summed, self._pending
        if key not in self._known:
            moments = list({"F": self._forward, "B": self._backward, "I": self._input, "W": self._weight}[kind]())
            self._known[key] = max(moments, key=sum), moments[-1]
        if kind == "W":
            self._pending, self._summed = (self._converts, self._summed or not self._converts)
        elif kind == "B" or (kind == "I" and self._pending):
            self._pending, self._summed = False, True
        return self._known[key]

    def gradients(self) -> list[int]:
        """Bytes of the whole gradients of each unit, as they are now."""
        return [unit.reduced * self._summed + unit.computed * self._pending for unit in self._units]

    @property
    def _converts(self) -> bool:
        return self._job.fsdp and self._job.elements.compute != self._job.elements.reduce

    # Moments of one action, the last one what is held afterwards.

    def _forward(self) -> Iterator[Moment]:
        held = Held()
        for unit in self._units:
            yield 0, *held.with_peak(unit, unit.trace.forward_peak_bytes)
            held.add(unit, 1)
        yield 0, held.activations, held.logits + self._output

    def _backward(self) -> Iterator[Moment]:
        freed, whole = Held(), 0
        for unit in reversed(self._units):
            yield whole, *freed.with_peak(unit, unit.trace.backward_peak_bytes)
            freed.add(unit, -1)
            whole += 0 if self._summed else unit.reduced
            whole -= unit.computed if self._pending else 0
        yield whole, freed.activations, freed.logits - self._output

    def _input(self) -> Iterator[Moment]:
        """Nothing is freed but what only the loss needs, and the gradients that the weights will need are kept."""
        held, whole = Held(), 0
        for unit in reversed(self._units):
            yield whole, *held.with_peak(unit, unit.trace.split.input_peak_bytes)
            held.add_bytes(unit, unit.trace.split.kept_bytes - unit.trace.kept_bytes)
            if self._pending:
                whole += (0 if self._summed else unit.reduced) - unit.computed
                if not self._summed:
                    yield whole + unit.largest, held.activations, held.logits
        yield whole, held.activations + self._units[0].trace.split.input_bytes, held.logits - self._output

    def _weight(self) -> Iterator[Moment]:
        held, whole = Held(), 0
        is_first = not (self._pending or (self._summed and not self._converts))
        for unit in self._units:
            split = unit.trace.split
            peak = split.first_weight_peak_bytes if is_first else split.weight_peak_bytes
            yield whole, *held.with_peak(unit, peak)
            whole += unit.computed if is_first else 0
            held.add_bytes(unit, split.left_bytes - split.kept_bytes)
        freed = Held()
        for unit in self._units:
            freed.add_bytes(unit, -unit.trace.split.kept_bytes)
        yield whole, freed.activations - self._units[0].trace.split.input_bytes, freed.logits
