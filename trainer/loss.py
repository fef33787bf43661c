"""The one loss rule: summed cross-entropy over valid tokens, divided by their number in the global batch."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from trainer.data.rows import IGNORED


def count_valid(labels: torch.Tensor) -> torch.Tensor:
    """Labels that count: int64 scalar."""
    return (labels != IGNORED).sum()


class TokenLoss:
    """``loss(logits [B, S, V], labels [B, S])``: this micro-batch's share of the step's mean loss.

    ``n_tokens`` holds the valid tokens of the whole global batch and is set before a step's first
    micro-batch. Because every micro-batch on every rank divides by the same number, shares add up to the
    mean over all tokens, and gradients add up with them, however the batch was cut. (An attribute and not
    an argument, since a pipeline schedule of torch before 2.13 passes none.)
    """

    def __init__(self):
        self.n_tokens: torch.Tensor | None = None

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum", ignore_index=IGNORED)
        if isinstance(loss, DTensor):  # sharded logits: the sum is already over the whole vocabulary
            loss = loss.to_local()
        return loss / self.n_tokens.clamp(min=1)
