import torch

from parallelize.grad_norm import clip_by_norm, squared_norm_share
from parallelize.layout import Layout


def test_norm_of_a_large_gradient_is_not_rounded_away():
    gradient = torch.randn(4_000_000, generator=torch.Generator().manual_seed(0)) * 1e-3
    exact = gradient.double().norm()
    share = squared_norm_share([gradient], Layout())
    assert abs(share.sqrt() - exact) / exact < 1e-9
    halves = sum(squared_norm_share([half], Layout()) for half in gradient.chunk(2))
    assert abs(halves.sqrt() - exact) / exact < 1e-9


def test_copies_are_weighed_and_clipping_is_global():
    gradients = [torch.full((4,), 3.0), torch.full((9,), -1.0)]
    assert squared_norm_share(gradients, Layout(tp=2)).item() == (36 + 9) / 2  # plain tensors: on both tp ranks
    clip_by_norm(gradients, torch.tensor(45.0).sqrt(), max_norm=1.0)
    assert torch.cat(gradients).norm().item() < 1.0
    before = [g.clone() for g in gradients]
    clip_by_norm(gradients, torch.tensor(0.5), max_norm=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients))
