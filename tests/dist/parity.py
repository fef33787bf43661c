"""Run a layout on gloo ranks and hold it against one process, parameter by parameter."""


import torch
from torch.distributed.tensor import DTensor

from tests.dist.pool import mesh_of
from tests.tiny import Observed, make_batch, reference, tiny_config
from trainer.build import build_model, build_train_step
from trainer.config import Config
from trainer.config_rules import resolve_config

CPU = torch.device("cpu")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value of a (sharded) tensor, gathered by all ranks together."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def as_numpy(tensors: dict[str, torch.Tensor]) -> dict:
    return {name: tensor.numpy() for name, tensor in tensors.items()}  # pickled by value


def observe(config: Config, world_size: int, n_steps: int, mask: str) -> Observed:
    """Runs on each rank: build, train ``n_steps``, and report this rank's losses and its stages' tensors."""
    resolved = resolve_config(config, world_size)
    mesh = mesh_of(resolved.layout)
    model = build_model(resolved, mesh, CPU)
    train_step = build_train_step(resolved, model, mesh, CPU)
    named, seen = model.named, Observed()
    seen.initial = as_numpy({name: whole(parameter) for name, parameter in named.items()})
    share = config.training.global_batch_size // resolved.layout.dp
    rows = slice(mesh.dp_index * share, (mesh.dp_index + 1) * share)
    for step in range(1, n_steps + 1):
        tokens, labels = make_batch(config, step, mask)
        loss_share = train_step.forward_backward(tokens[rows], labels[rows])
        if step == 1:
            seen.gradients = as_numpy({name: whole(parameter.grad) for name, parameter in named.items()})
        loss, grad_norm, _ = train_step.total_and_clip(loss_share, stop_requested=False)
        if step == 1:
            seen.clipped = as_numpy({name: whole(parameter.grad) for name, parameter in named.items()})
        assert train_step.update(loss, grad_norm).item() == 0, "the step was skipped"
        seen.losses.append(loss.item())
        seen.grad_norms.append(grad_norm.item())
    seen.final = as_numpy({name: whole(parameter) for name, parameter in named.items()})
    seen.copies = as_numpy({name: whole(parameter) for name, parameter in model.copies.items()})
    return seen


def same_on_one_process(config: Config) -> Config:
    """The config of the reference: the same run without any parallelism or recompute."""
    return config.model_copy(
        update={"parallel": type(config.parallel)(), "activation_checkpoint": type(config.activation_checkpoint)(), "compile": type(config.compile)()}
    )


def check_parity(
    ranks, world_size: int, n_steps: int = 5, mask: str = "none", timeout_s: float = 120, **overrides
) -> list[Observed]:
    """Assert that a layout equals one process: initial weights bitwise; loss, norm and every gradient to
    rounding; and ``n_steps`` of training. Returns what each rank saw."""
    config = tiny_config(**overrides)
    expected = reference(same_on_one_process(config), n_steps, mask)
    seen = ranks(world_size, observe, config, world_size, n_steps, mask, timeout_s=timeout_s)
    names = set().union(*(rank.gradients for rank in seen))
    assert names == expected.gradients.keys(), names ^ expected.gradients.keys()
    for rank, observed in enumerate(seen):
        for got, want, rtol in (
            (observed.losses, expected.losses, 1e-5), (observed.grad_norms, expected.grad_norms, 1e-4)
        ):  # fmt: skip
            torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=rtol, atol=1e-7, msg=lambda m, r=rank: f"rank {r}: {m}")
        assert observed.losses == seen[0].losses and observed.grad_norms == seen[0].grad_norms, "ranks disagree"
        for name, initial in observed.initial.items():
            assert torch.equal(torch.from_numpy(initial), expected.initial[name]), f"rank {rank}: initial {name}"
        for name, gradient, want in (
            *((name, gradient, expected.gradients[name]) for name, gradient in observed.gradients.items()),
            *((f"{name} after clipping", gradient, expected.clipped[name]) for name, gradient in observed.clipped.items()),
        ):
            error = (torch.from_numpy(gradient) - want).abs().max() / want.abs().max().clamp(min=1e-12)
            assert error < 1e-4 or want.abs().max() == 0, f"rank {rank}: gradient of {name} off by {error:.1e} of its largest entry"
    return seen


