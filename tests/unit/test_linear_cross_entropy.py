import pytest
import torch
import torch.nn.functional as F

from parallelize.linear_cross_entropy import linear_cross_entropy

IGNORED = -100


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    hidden, weight = (torch.randn(n, 24, generator=generator).to(dtype).requires_grad_() for n in (50, 90))
    labels = torch.randint(0, 90, (50,), generator=generator)
    labels[::4] = IGNORED
    return hidden, weight, labels


def reference(hidden, weight, labels):
    logits = hidden.double() @ weight.double().T
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED)


@pytest.mark.parametrize("piece", [1, 7, 50, 1000])
def test_it_is_the_cross_entropy_of_all_logits_in_any_pieces(piece):
    hidden, weight, labels = inputs()
    exact = reference(hidden, weight, labels) / 38
    loss = linear_cross_entropy(hidden, weight, labels, IGNORED, piece) / 38
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    for got, want in zip(torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(exact, (hidden, weight))):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, labels, IGNORED, piece) / 38 == loss


def test_a_frozen_weight_has_no_gradient_and_none_is_computed():
    hidden, weight, labels = inputs()
    (want,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, IGNORED, 8), hidden)
    loss = linear_cross_entropy(hidden, weight.detach(), labels, IGNORED, 8)
    assert [None if tensor is None else tensor.shape for tensor in loss.grad_fn.saved_tensors] == [hidden.shape, None]
    (got,) = torch.autograd.grad(loss, hidden)
    assert torch.equal(got, want)


def test_without_a_label_that_counts_all_is_zero():
    hidden, weight, labels = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, IGNORED), IGNORED, 8)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_gradients_of_bfloat16_weights_add_up_in_fp32():
    """One piece a token is as close to the exact gradient as one piece of all."""
    hidden, weight, labels = inputs(torch.bfloat16)
    (exact,) = torch.autograd.grad(reference(hidden, weight, labels), weight)
    away = []
    for piece in (50, 1):
        (got,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, IGNORED, piece), weight)
        assert got.dtype == torch.bfloat16
        away.append((got.double() - exact.double()).norm() / exact.double().norm())
    assert away[0] < 0.01 and away[1] < 1.5 * away[0]


def test_the_logits_of_a_piece_are_the_most_there_is():
    """By the largest tensor that any operation makes."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                self.numel = max(self.numel, result.numel())
            return result

    hidden, weight, labels = inputs()
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, labels, IGNORED, 10).backward()
    assert largest.numel == max(weight.numel(), 10 * 90)
