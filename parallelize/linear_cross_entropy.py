"""The last projection and the cross-entropy together, some tokens at a time: logits of all tokens never exist.

A vocabulary makes logits large: of Llama 3 8B at 2 x 8,192 tokens, 128,256 of them in fp32 are 7.8 GiB, and as much again
for their gradient. Loss and gradients are exact; the gradients are computed with the loss, while a piece's logits are there,
and wait for the backward in the size of what they belong to.

Shapes: N tokens, D model dim, V vocabulary, or this rank's part of it where it is spread.
"""

import torch
from torch.distributed.device_mesh import DeviceMesh

from parallelize.collectives import all_max, all_sum


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_N: torch.Tensor,
    ignored: int,
    piece: int,
    mesh: DeviceMesh | None = None,
    first_id: int = 0,
) -> torch.Tensor:
    """Cross-entropy of ``hidden @ weight.T``, summed over the labels that are not ``ignored``: fp32 scalar.

    piece: tokens whose logits exist at once. With a ``mesh``, ``weight`` has the ids from ``first_id`` on, and the ranks
    together all; the gradient of ``hidden`` is then this rank's summand.
    """
    spread = (mesh, first_id)
    if not torch.is_grad_enabled():
        pieces = zip(hidden_ND.split(piece), labels_N.split(piece))
        losses = [_Piece(hidden, weight_VD, labels, ignored, *spread).loss() for hidden, labels in pieces]
        return torch.stack(losses).sum()
    return _LinearCrossEntropy.apply(hidden_ND, weight_VD, labels_N, ignored, piece, *spread)


class _Piece:
    """Logits of some tokens, and what follows from them."""

    def __init__(self, hidden, weight, labels, ignored, mesh, first_id):
        self.hidden, self.weight, self.mesh = hidden, weight, mesh
        self.counted = labels != ignored
        logits = (hidden @ weight.T).float()
        largest = logits.amax(1, keepdim=True)
        if mesh is not None:
            largest = all_max(largest, mesh)
        self.shifted = logits.sub_(largest)
        ids = labels - first_id
        self.mine = self.counted & (ids >= 0) & (ids < weight.shape[0])
        self.ids = torch.where(self.mine, ids, 0)[:, None]
        picked = torch.where(self.mine, self.shifted.gather(1, self.ids).squeeze(1), 0.0)
        self.exponentials = self.shifted.exp_()
        sums = torch.stack((self.exponentials.sum(1), picked))
        self.sum, self.picked = (sums if mesh is None else all_sum(sums, mesh)).unbind()

    def loss(self) -> torch.Tensor:
        return torch.where(self.counted, self.sum.log() - self.picked, 0.0).sum()

    def gradient_of_logits(self) -> torch.Tensor:
        """Softmax minus one at the label, in the dtype of computation."""
        share = torch.where(self.counted, 1.0 / self.sum, 0.0)
        gradient = self.exponentials.mul_(share[:, None])
        gradient.scatter_add_(1, self.ids, -self.mine[:, None].to(gradient.dtype))
        return gradient.to(self.hidden.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, labels, ignored, piece, mesh, first_id):
        hidden_gradient = torch.empty_like(hidden)
        # Pieces add up in fp32, as one matmul over all tokens would. A frozen weight has none.
        trains = ctx.needs_input_grad[1]
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if trains else None
        losses = []
        for tokens, labels_of_piece, out in zip(hidden.split(piece), labels.split(piece), hidden_gradient.split(piece)):
            now = _Piece(tokens, weight, labels_of_piece, ignored, mesh, first_id)
            losses.append(now.loss())
            gradient = now.gradient_of_logits()
            torch.mm(gradient, weight, out=out)
            if not trains:
                continue
            if weight.dtype == torch.float32:
                weight_gradient.addmm_(gradient.T, tokens)
            else:
                weight_gradient += gradient.T @ tokens
        ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype) if trains else None)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx, scale):
        hidden_gradient, weight_gradient = ctx.saved_tensors
        of_weight = None if weight_gradient is None else weight_gradient * scale
        return hidden_gradient * scale, of_weight, *(None,) * 5
