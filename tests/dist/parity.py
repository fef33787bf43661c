"""Run a layout on gloo ranks and hold it against one process, parameter by parameter."""


import dataclasses

import torch

from tests.dist.pool import mesh_of
from tests.tiny import make_batch, reference, tiny_config
from trainer.config import Config
from trainer.config_rules import resolve_config
from trainer.observe import Observed, observe

CPU = torch.device("cpu")


def as_tensors(seen: Observed) -> Observed:
    """The opposite of ``numpy_tensors``."""
    tensors = {kind: value for kind, value in vars(seen).items() if isinstance(value, dict)}
    return dataclasses.replace(
        seen, **{kind: {name: torch.from_numpy(v) for name, v in value.items()} for kind, value in tensors.items()}
    )


def as_numpy(tensors: dict[str, torch.Tensor]) -> dict:
    # Pickled by value. numpy has no bfloat16.
    return {name: (t.float() if t.dtype == torch.bfloat16 else t).numpy() for name, t in tensors.items()}


def numpy_tensors(seen: Observed) -> Observed:
    return dataclasses.replace(
        seen, **{name: as_numpy(value) for name, value in vars(seen).items() if isinstance(value, dict)}
    )


def observe_rank(config: Config, world_size: int, n_steps: int, mask: str) -> Observed:
    """Runs on each rank: its first ``n_steps`` on the cases' batches, tensors as numpy arrays."""
    resolved = resolve_config(config, world_size)
    mesh = mesh_of(resolved.layout)
    share = config.training.global_batch_size // resolved.layout.dp
    rows = slice(mesh.dp_index * share, (mesh.dp_index + 1) * share)
    batches = [make_batch(config, step, mask) for step in range(1, n_steps + 1)]
    return numpy_tensors(observe(resolved, mesh, CPU, [[tensor[rows] for tensor in batch] for batch in batches]))


def same_on_one_process(config: Config) -> Config:
    """The config of the reference: the same run without any parallelism or recompute."""
    return config.model_copy(
        update={"parallel": type(config.parallel)(), "activation_checkpoint": type(config.activation_checkpoint)(), "compile": type(config.compile)()}
    )


def check_parity(
    ranks, world_size: int, n_steps: int = 5, mask: str = "none", timeout_s: float = 120, function=observe_rank,
    expect=reference, **overrides
) -> list[Observed]:
    """Assert that a layout equals one process: initial weights bitwise; loss, norm and every gradient to
    rounding; and ``n_steps`` of training. Returns what each rank saw."""
    config = tiny_config(**overrides)
    expected = expect(same_on_one_process(config), n_steps, mask)
    seen = ranks(world_size, function, config, world_size, n_steps, mask, timeout_s=timeout_s)
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


