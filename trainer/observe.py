"""What a run shows of itself in its first steps, for comparing it with the same run laid out otherwise."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor

from parallelize.mesh import Mesh
from trainer.build import build_model, build_train_step
from trainer.config_rules import Resolved
from trainer.step import Batch


@dataclass
class Observed:
    """One rank's view. Tensors are whole, on the CPU, by name in the whole model."""

    dp_index: int = 0
    losses: list[float] = field(default_factory=list)  # one a step, and so the next
    grad_norms: list[float] = field(default_factory=list)
    batches: list[list[str]] = field(default_factory=list)  # a digest of each sequence of this rank's share
    initial: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)  # of step 1, before clipping
    clipped: dict[str, torch.Tensor] = field(default_factory=dict)  # and after
    final: dict[str, torch.Tensor] = field(default_factory=dict)
    copies: dict[str, torch.Tensor] = field(default_factory=dict)  # second holders of tied weights, at the end


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of a (sharded) tensor, gathered by all ranks that hold it together."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().to("cpu", copy=True)


def digest(sequence: torch.Tensor) -> str:
    return hashlib.sha256(sequence.cpu().numpy().tobytes()).hexdigest()[:16]


def observe(resolved: Resolved, mesh: Mesh, device: torch.device, batches: Iterable[Batch]) -> Observed:
    """Build the run, train on ``batches`` (of this data rank, one a step), look at it."""
    model = build_model(resolved, mesh, device)
    step = build_train_step(resolved, model, mesh, device)
    seen = Observed(dp_index=mesh.dp_index)

    def all_of(tensor_of) -> dict[str, torch.Tensor]:
        found = {name: tensor_of(parameter) for name, parameter in model.named.items()}
        return {name: whole(tensor) for name, tensor in found.items() if tensor is not None}

    seen.initial = all_of(lambda parameter: parameter)
    for batch in batches:
        seen.batches.append([digest(row) for row in torch.stack(tuple(batch), dim=1)])
        loss_share = step.forward_backward(*(tensor.to(device) for tensor in batch))
        if not seen.losses:
            seen.gradients = all_of(lambda parameter: parameter.grad)
        loss, grad_norm, _ = step.total_and_clip(loss_share, stop_requested=False)
        if not seen.losses:
            seen.clipped = all_of(lambda parameter: parameter.grad)
        step.update(loss, grad_norm)
        seen.losses.append(loss.item())
        seen.grad_norms.append(grad_norm.item())
    seen.final = all_of(lambda parameter: parameter)
    seen.copies = {name: whole(parameter) for name, parameter in model.copies.items()}
    return seen
