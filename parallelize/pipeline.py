"""Splitting a model into pipeline stages, and the schedule that drives them."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from parallelize.action_times import ActionTimes
from parallelize.mesh import Mesh
from parallelize.plan import Plan, resolve
from parallelize.schedules import ScheduleFile, schedule_of


def split_stage(model: nn.Module, plan: Plan, layers_per_stage: Sequence[int], stage: int) -> nn.Module:
    """A copy of the (meta) model that owns only what stage ``stage`` computes; names are unchanged.

    Raises ``ValueError`` unless ``layers_per_stage`` places every layer exactly once, none empty.
    """
    blocks = list(resolve(model, [plan.blocks]))
    if sum(layers_per_stage) != len(blocks) or min(layers_per_stage) < 1:
        raise ValueError(f"stages of {tuple(layers_per_stage)} layers do not place {len(blocks)} layers exactly once")
    first = sum(layers_per_stage[:stage])
    keep = set(blocks[first : first + layers_per_stage[stage]])
    part = copy.deepcopy(model)
    for name in blocks:
        if name not in keep:
            parent, _, key = name.rpartition(".")
            del part.get_submodule(parent)[key]
    absent = plan.first_stage if stage > 0 else ()
    absent += plan.last_stage if stage < len(layers_per_stage) - 1 else ()
    for name in absent:
        part.set_submodule(name, nn.Identity())
    return part


def make_schedule(name_or_path: str, stages: list[PipelineStage], n_microbatches: int, loss_fn: Callable):
    """A schedule of torch by its name, or the one in a .csv file."""
    # Gradients are never scaled: the loss has been divided by the token count of the whole step.
    options = dict(n_microbatches=n_microbatches, loss_fn=loss_fn, scale_grads=False)
    written = schedule_of(name_or_path)
    if isinstance(written, ScheduleFile):
        return _run_actions(written.cells, stages, options)
    schedule_class = get_schedule_class(name_or_path)
    multi = issubclass(schedule_class, PipelineScheduleMulti)
    return schedule_class(stages if multi else stages[0], **options)


def _run_actions(cells: Sequence[Sequence[str]], stages: list[PipelineStage], options: dict):
    """Torch's runtime with these actions, in the way its own schedules give it theirs. Private in 2.11 to 2.13."""
    from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(stages, **options)
    runtime.pipeline_order = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(cells)}
    runtime._prepare_schedule_with_comms(runtime.pipeline_order)
    return runtime


class Stage(PipelineStage):
    """A ``PipelineStage`` that takes positions, whose actions can be timed, and that can run forward only.

    That takes the memory of one micro-batch.
    In torch 2.13 a plain stage keeps every micro-batch's output (logits, on the last stage) for the backward that is not
    to come; and where its neighbour is on the same rank the runtime hands that one a gradient even so, and raises.
    A test fails once it no longer does.
    """

    action_times: ActionTimes | None = None
    # Of each micro-batch, the model's second argument. Not torch's keyword arguments: between 2.11 and 2.13 it took
    # them for inputs with a gradient, to be sent to the stage before.
    positions: Sequence[torch.Tensor] = ()
    _micro_batch = 0  # whose forward runs

    def _timed(self, kind: str, micro_batch: int) -> AbstractContextManager:
        return self.action_times.of(self.stage_index, kind, micro_batch) if self.action_times else nullcontext()

    def backward_one_chunk(self, bwd_chunk_id: int, loss=None, full_backward: bool = True, last_backward=False):
        with self._timed("B" if full_backward else "I", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward=False):
        with self._timed("W", bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def forward_one_chunk(self, fwd_chunk_id: int, *args, **kwargs):
        self._micro_batch = fwd_chunk_id
        with self._timed("F", fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward and (self.is_last or self._next_is_here):
            self.fwd_cache.pop(fwd_chunk_id)
        return output

    def forward_maybe_with_nosync(self, *args, **kwargs):
        return super().forward_maybe_with_nosync(*args, *self.positions[self._micro_batch :][:1], **kwargs)

    def _compute_outputs(self, *args, module: nn.Module, **kwargs):
        # How 2.13 learns shapes, before the first step: the same graph, or compiled blocks would be compiled twice.
        return module(*args, *self.positions[:1], **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int):
        if self.has_backward:
            return super().get_fwd_send_ops(fwd_chunk_id)
        operations = super().get_fwd_send_ops(fwd_chunk_id) if fwd_chunk_id in self.fwd_cache else []
        self.fwd_cache.pop(fwd_chunk_id, None)
        return operations

    @property
    def _next_is_here(self) -> bool:
        return self.stage_index_to_group_rank[self.stage_index + 1] == self.group_rank

    def get_local_bwd_output(self, mb_index: int):
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class Pipeline:
    """This rank's stages and the schedule that runs micro-batches through all of them.

    parts: the rank's (parallelized) stage modules, in the order of ``stage_indices``.
    loss_fn: logits, labels -> scalar; called on the last stage once per micro-batch.
    n_runs: how often the schedule runs in a step, each time with an equal part of its micro-batches.
    shapes_of: stage -> ``PipelineStage``'s arguments that say what it takes and gives, where no peer can be asked.
    """

    def __init__(
        self,
        parts: Sequence[nn.Module],
        stage_indices: Sequence[int],
        n_stages: int,
        schedule: str,
        n_microbatches: int,
        n_runs: int,
        mesh: Mesh,
        device: torch.device,
        loss_fn: Callable,
        shapes_of: Callable[[int], dict] = lambda stage: {},
    ):
        self.stages = [
            Stage(part, index, n_stages, device, group=mesh.axis("pp").get_group(), **shapes_of(index))
            for part, index in zip(parts, stage_indices)
        ]
        self.has_first = 0 in stage_indices
        self.has_last = n_stages - 1 in stage_indices
        self.n_runs = n_runs
        self.n_microbatches = n_microbatches // n_runs  # in a run
        self.times: ActionTimes | None = None  # of the last step, if it was asked for
        self._timed = False
        self.schedule = make_schedule(schedule, self.stages, self.n_microbatches, loss_fn)

    def time_next(self) -> None:
        """Note when each action of this rank begins and ends in the next ``forward_backward``, in ``times``."""
        self._timed = True

    def forward_backward(
        self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """Run tokens and labels [sequences, S], cut into micro-batches; their losses on the last stage, else [].

        ``positions``, of the same shape, go to every stage as they are: all ranks of a pipeline read the same batch.
        """
        # Only now: the count of the step's tokens, just before, has brought all ranks together.
        self.times = ActionTimes(self.stages[0].device) if self._timed else None
        self._timed = False
        for stage in self.stages:
            stage.action_times = self.times
        try:
            return self._run(self.schedule.step, tokens, labels, positions)
        finally:
            for stage in self.stages:
                stage.action_times = None

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """The same without the backward, in the order of the schedule's forwards."""
        return self._run(self.schedule.eval, tokens, labels, positions)

    def _run(self, run_schedule: Callable, *batch: torch.Tensor | None) -> list[torch.Tensor]:
        losses: list[torch.Tensor] = []
        parts = [(None,) * self.n_runs if tensor is None else tensor.chunk(self.n_runs) for tensor in batch]
        for tokens, labels, positions in zip(*parts):
            run_losses: list[torch.Tensor] = []
            inputs = (tokens,) if self.has_first else ()
            targets = {"target": labels, "losses": run_losses} if self.has_last else {}
            for stage in self.stages:
                stage.positions = () if positions is None else positions.chunk(self.n_microbatches)
            run_schedule(*inputs, **targets, return_outputs=False)
            losses += run_losses
        return losses
