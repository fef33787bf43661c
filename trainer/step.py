"""One optimizer step: all micro-batches, one norm, one clip, one update. And the same loss without a step."""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from parallelize.grad_norm import clip_by_norm, local_norms, squared_norm_share
from parallelize.layout import Layout
from parallelize.local_model import LocalModel
from parallelize.mesh import sum_over_ranks
from trainer.loss import TokenLoss, count_valid

Batch = Sequence[torch.Tensor]  # tokens, labels, and positions where documents are isolated: int64 [sequences, S]


class MicroBatches(Protocol):
    """Runs a ``Batch``, cut into micro-batches; their losses where the last stage is, else []."""

    def forward_backward(
        self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> list[torch.Tensor]: ...

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> list[torch.Tensor]: ...


class InTurn:
    """Micro-batches one after another on the whole model: the counterpart of ``parallelize.pipeline.Pipeline``.

    reduce_once: gradients are reduced, and parameters gathered, once a step and not for each micro-batch.
    """

    def __init__(self, model: LocalModel, loss_fn: Callable, micro_batch_size: int, reduce_once: bool):
        self.model = model
        self.part = model.parts[0]
        self.loss_fn = loss_fn
        self.micro_batch_size = micro_batch_size
        self.reduce_once = reduce_once

    def forward_backward(
        self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        losses = []
        micro_batches = self._cut(tokens, labels, positions)
        for number, micro_batch in enumerate(micro_batches, 1):
            if self.reduce_once:
                self.model.more_to_come(number < len(micro_batches))
            loss = self._loss(*micro_batch)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        return [self._loss(*micro_batch) for micro_batch in self._cut(tokens, labels, positions)]

    def _cut(self, *batch: torch.Tensor | None) -> list[Batch]:
        return list(zip(*(tensor.split(self.micro_batch_size) for tensor in batch if tensor is not None)))

    def _loss(self, tokens: torch.Tensor, labels: torch.Tensor, *positions: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.part(tokens, *positions), labels)


@dataclass(frozen=True)
class StepResult:
    """Device scalars, the same on every rank; reading one waits for the step."""

    loss: torch.Tensor  # token-weighted mean over the global batch
    grad_norm: torch.Tensor  # before clipping
    verdict: "Verdict"
    # Of this rank alone, to find out where something not finite came from:
    loss_share: torch.Tensor
    squared_norm_share: torch.Tensor  # over all ranks they add up to the square of grad_norm
    gradient_norms: Sequence[torch.Tensor]  # in the order of ``LocalModel.trained``, before clipping


class Verdict:
    """Two answers on their way to the host: was the update left out, and was any rank asked to stop?

    On a GPU they are copied as soon as the step is done, so that reading them later waits for that step
    alone and not for what has been queued since.
    """

    def __init__(self, skipped: torch.Tensor, stop: torch.Tensor):
        values = torch.stack((skipped.double(), stop))
        self._done = None
        if values.is_cuda:
            self._values = torch.empty(2, dtype=torch.float64, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()
        else:
            self._values = values

    def read(self) -> tuple[bool, bool]:
        """(skipped, stop); waits for the step."""
        if self._done is not None:
            self._done.synchronize()
        skipped, stop = self._values.tolist()
        return skipped > 0, stop > 0


class TrainStep:
    """Callable: this data rank's ``Batch`` -> ``StepResult``."""

    def __init__(
        self,
        micro_batches: MicroBatches,
        loss_fn: TokenLoss,
        model: LocalModel,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        max_grad_norm: float,
        loss_context: Callable = contextlib.nullcontext,
    ):
        self.micro_batches = micro_batches
        self.loss_fn = loss_fn
        self.model = model
        self.parameters = list(model.trained.values())
        self.copies = list(model.trained_copies.values())
        self.optimizer = optimizer
        self.layout = layout
        self.max_grad_norm = max_grad_norm
        self.loss_context = loss_context

    def __call__(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        positions: torch.Tensor | None = None,
        stop_requested: bool = False,
    ) -> StepResult:
        loss_share = self.forward_backward(tokens, labels, positions)
        loss, grad_norm, stop = self.total_and_clip(loss_share, stop_requested)
        verdict = Verdict(self.update(loss, grad_norm), stop)
        return StepResult(loss, grad_norm, verdict, loss_share, self.squared_norm_share, self.gradient_norms)

    def forward_backward(
        self, tokens: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Accumulate gradients of all micro-batches. Returns what this rank adds to the loss, a scalar."""
        # Ranks that differ only in pp or tp count the same sequences.
        copies = self.layout.pp * self.layout.tp
        self.loss_fn.n_tokens = sum_over_ranks(count_valid(labels)) // copies
        with self.loss_context():
            losses = self.micro_batches.forward_backward(tokens, labels, positions)
        self.model.complete_gradients()
        return _sum_of(losses, labels.device)

    def total_and_clip(self, loss_share: torch.Tensor, stop_requested: bool) -> tuple[torch.Tensor, ...]:
        """Total loss, gradient norm and stop votes over all ranks, in one reduction; clip once by the norm."""
        gradients = [parameter.grad for parameter in self.parameters]
        # A pipeline rank whose stages are frozen has none.
        self.gradient_norms = local_norms(gradients) if gradients else ()
        self.squared_norm_share = (
            squared_norm_share(gradients, self.layout, self.gradient_norms)
            if gradients
            else torch.zeros_like(loss_share, dtype=torch.float64)
        )
        shares = torch.stack(
            [
                loss_share.double() / self.layout.tp,
                self.squared_norm_share,
                torch.full_like(loss_share, stop_requested, dtype=torch.float64),
            ]
        )
        loss, squared_norm, stop = sum_over_ranks(shares).unbind()
        grad_norm = squared_norm.sqrt()
        if self.max_grad_norm and gradients:
            gradients += [parameter.grad for parameter in self.copies]
            clip_by_norm(gradients, grad_norm.float(), self.max_grad_norm)
        return loss, grad_norm, stop

    def update(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> torch.Tensor:
        """Apply one update, unless loss or norm is not finite. Returns 1 if it was left out, else 0."""
        skipped = 1.0 - (loss.isfinite() & grad_norm.isfinite()).float()
        # The fused kernel itself leaves everything as it was where this is 1, moments and step counts
        # included: the decision needs no wait for the device, and every rank has the same bits.
        self.optimizer.grad_scale, self.optimizer.found_inf = None, skipped
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return skipped

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> tuple[float, int]:
        """Loss without training: (mean over the valid tokens of all batches and ranks, their number).

        The same on every rank; 0 without a valid token. ``batches``: of this data rank, as many
        on every rank, in the step's shape. Changes no state that training sees.
        """
        layout, totals = self.layout, None
        for tokens, labels, *positions in batches:
            self.loss_fn.n_tokens = torch.ones((), dtype=torch.int64, device=labels.device)  # sums, not means
            with self.loss_context():
                losses = self.micro_batches.forward(tokens, labels, *positions)
            loss_sum = _sum_of(losses, labels.device).double() / layout.tp
            share = torch.stack((loss_sum, count_valid(labels).double() / (layout.pp * layout.tp)))
            totals = share if totals is None else totals + share
        self.model.free_gathered()
        loss_sum, n_tokens = (0.0, 0.0) if totals is None else sum_over_ranks(totals).tolist()
        return loss_sum / max(n_tokens, 1), round(n_tokens)


def _sum_of(losses: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if not losses:  # a pipeline rank without the last stage
        return torch.zeros((), device=device)
    return torch.stack([loss.detach() for loss in losses]).sum()
