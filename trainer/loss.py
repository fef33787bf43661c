"""The one loss rule: summed cross-entropy over valid tokens, divided by their number in the global batch."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from trainer.data.rows import IGNORED


def count_valid(labels: torch.Tensor) -> torch.Tensor:
    """Labels that count: int64 scalar."""
    return (labels != IGNORED).sum()


def summed_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross-entropy summed over the labels that count: scalar of logits fp32 [N, V] and labels int64 [N]."""
    if isinstance(logits, DTensor) or logits.device.type != "cpu":
        return torchs_cross_entropy(logits, labels)
    # Torch's CPU kernel adds up the vocabulary one after another in fp32: 6e-6 too low for a real model with 49,152
    # ids, where sharded logits, added up in parts, are right.
    counted = labels != IGNORED
    picked = logits.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(counted, logits.logsumexp(1) - picked, 0.0).sum()


def torchs_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The same by torch's own kernel, as on a GPU."""
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


class TokenLoss:
    """``loss(logits [B, S, V], labels [B, S])``: this micro-batch's share of the step's mean loss.

    In place of logits it takes (hidden [B, S, D], weight [V, D]), which ``projected`` computes the sum from.

    ``n_tokens`` holds the valid tokens of the whole global batch and is set before a step's first
    micro-batch. Because every micro-batch on every rank divides by the same number, shares add up to the
    mean over all tokens, and gradients add up with them, however the batch was cut. (An attribute and not
    an argument, since a pipeline schedule of torch before 2.13 passes none.)
    """

    def __init__(
        self,
        projected: Callable[..., torch.Tensor] | None = None,
        summed: Callable[..., torch.Tensor] = summed_cross_entropy,
    ):
        self.n_tokens: torch.Tensor | None = None
        self.projected = projected
        self.summed = summed

    def __call__(self, output: torch.Tensor | tuple[torch.Tensor, torch.Tensor], labels: torch.Tensor) -> torch.Tensor:
        if isinstance(output, tuple):
            hidden, weight = output
            loss = self.projected(hidden.flatten(0, 1), weight, labels.flatten())
        else:
            loss = self.summed(output.flatten(0, 1).float(), labels.flatten())
        if isinstance(loss, DTensor):  # sharded logits: the sum is already over the whole vocabulary
            loss = loss.to_local()
        return loss / self.n_tokens.clamp(min=1)
