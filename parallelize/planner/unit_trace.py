"""Tracing one unit of a model (embedding, block, head) forward and backward on fake tensors."""

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from parallelize.planner.numbers import SplitTrace, UnitTrace
from parallelize.planner.operations import Attention, Collective, Elementwise, Matmul, Operation
from parallelize.planner.recorder import Recorder

_aten = torch.ops.aten
_MATMULS = {_aten.mm.default, _aten.addmm.default}
_COLLECTIVES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
}


def trace_unit(
    mode: FakeTensorMode, unit: nn.Module, run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]
) -> UnitTrace:
    """Run ``run()`` and its backward. ``inputs``: the fake tensors that it takes."""
    log: Counter[Operation] = Counter()

    def note(function, args, result):
        if (operation := _operation(function, args, result)) is not None:
            log[operation] += 1

    recorder = Recorder(note)
    recorder.track([inputs, list(unit.parameters())])
    with mode, recorder:
        before = recorder.live_bytes
        output = run()
        kept = recorder.live_bytes - before
        forward_peak = recorder.peak_bytes - before
        forward = dict(log)
        log.clear()
        gradient = torch.empty_like(output)
        before = recorder.live_bytes
        recorder.restart_peak()
        if output.requires_grad:  # not that of a frozen embedding
            output.backward(gradient)
    return UnitTrace(
        kept_bytes=kept,
        forward_peak_bytes=forward_peak,
        backward_peak_bytes=recorder.peak_bytes - before,
        forward=forward,
        backward=dict(log),
        weight=_weight_gradients(unit, log),
    )


def trace_split(
    mode: FakeTensorMode, unit: nn.Module, run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]
) -> SplitTrace:
    """Run ``run()`` and its backward in two halves, as a pipeline stage does. ``inputs[0]``: what has a gradient.

    Twice, since weights that have gradients already need less. ``run()`` is the loss if it is a scalar.
    """
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    recorder = Recorder()
    recorder.track([inputs, list(unit.parameters())])
    with mode, recorder:
        weight_peaks = []
        for _ in range(2):
            start = recorder.live_bytes
            output = run()
            is_loss = output.dim() == 0
            rest_of_stage = None if is_loss else output.grad_fn  # what comes behind this unit holds on to its graph
            gradient = None if is_loss else [torch.empty_like(output)]
            before = recorder.live_bytes
            recorder.restart_peak()
            groups = stage_backward_input([output], gradient, inputs[:1], unit.parameters())[1]
            input_peak = recorder.peak_bytes - before
            whole, inputs[0].grad = recorder.live_bytes, None
            input_bytes = whole - recorder.live_bytes
            del output, gradient
            kept = recorder.live_bytes - start
            gradients = _bytes_of_gradients(unit)
            recorder.restart_peak()
            stage_backward_weight(unit.parameters(), groups)
            weight_peaks.append(recorder.peak_bytes - start - kept)
            gradients = _bytes_of_gradients(unit) - gradients
            left = recorder.live_bytes - start - gradients
            del rest_of_stage, groups
    return SplitTrace(kept, input_bytes, left, input_peak, weight_peaks[1], weight_peaks[0])


def _bytes_of_gradients(unit: nn.Module) -> int:
    gradients = [parameter.grad for parameter in unit.parameters() if parameter.grad is not None]
    return sum(_bytes_of(getattr(gradient, "_local_tensor", gradient)) for gradient in gradients)


def _weight_gradients(unit: nn.Module, backward: Counter[Operation]) -> dict[Operation, int]:
    """The matmuls of a backward that make the gradients of the unit's matrices: [out, tokens] x [tokens, in]."""
    shapes = [
        tuple(getattr(parameter, "_local_tensor", parameter).shape)
        for parameter in unit.parameters()
        if parameter.requires_grad
    ]
    made = Counter(
        operation
        for operation in backward
        for shape in shapes
        if isinstance(operation, Matmul) and (operation.m, operation.n) == shape
    )
    return {operation: min(count, backward[operation]) for operation, count in made.items()}


def _operation(function, args, result) -> Operation | None:
    """What the device does for one ATen operation; None for a view or nothing at all."""
    name = function.name().split("::")[1].split(".")[0]
    if function in _MATMULS:
        left, right = args[-2:]
        return Matmul(left.shape[0], left.shape[1], right.shape[1], left.element_size())
    if "attention" in name:
        backward = "backward" in name
        query, key = args[1:3] if backward else args[:2]  # [B, H, S, E]
        return Attention(query.shape[0], query.shape[1], key.shape[1], query.shape[2], query.shape[3], backward)
    if function.namespace == "_c10d_functional":
        kind = _COLLECTIVES.get(name)
        if kind is None:
            return None
        whole = result if kind == "all_gather" else args[0]
        return Collective(kind, "tp", _bytes_of(whole))
    tensors = [tensor for tensor in (*args, result) if isinstance(tensor, torch.Tensor)]
    if (
        function.is_view
        or not isinstance(result, torch.Tensor)
        or name in ("empty", "empty_like", "detach", "_unsafe_view")
    ):
        return None
    return Elementwise(sum(map(_bytes_of, tensors)))


def _bytes_of(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape) * tensor.element_size()
