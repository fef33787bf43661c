"""Isolated documents on a GPU: FlexAttention, forward and backward, against a CPU."""

import pytest
import torch

from parallelize.recompute import with_recompute
from tests.unit.test_isolation import LENGTHS, a_row, tiny_decoder

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def rows(n_long: int):
    """Two rows with other borders, each followed by documents that span several blocks of the mask."""
    parts = [a_row((*LENGTHS, *(150,) * n_long)), a_row((*(150,) * n_long, *LENGTHS[::-1]), seed=1)]
    return tuple(torch.cat([part[which] for part in parts]) for which in (0, 1))


def logits_and_gradients(model, tokens, positions):
    logits = model(tokens, positions)
    logits.logsumexp(-1).sum().backward()
    return logits.detach().cpu(), [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_b65_a_gpu_computes_what_a_cpu_does(recompute, compiled):
    tokens, positions = rows(n_long=4)
    model = tiny_decoder(n_positions=tokens.shape[1])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.3)
    want, want_gradients = logits_and_gradients(model, tokens, positions)
    model.zero_grad()
    model.cuda()
    for name, block in model.layers.items():
        block = with_recompute(block, recompute if recompute == "selective" else "none")
        if compiled:
            block.compile(fullgraph=True)
        model.layers[name] = with_recompute(block, recompute if recompute == "full" else "none")
    logits, gradients = logits_and_gradients(model, tokens.cuda(), positions.cuda())
    torch.testing.assert_close(logits, want, rtol=1e-2, atol=1e-2)  # TF32 may be on inside the kernel
    for got, expected in zip(gradients, want_gradients):
        assert (got - expected).abs().max() <= 2e-2 * expected.abs().max()


def test_b65_changing_a_document_leaves_the_others_on_a_gpu():
    tokens, positions = (tensor.cuda() for tensor in rows(n_long=4))
    model = tiny_decoder(n_positions=tokens.shape[1]).cuda()
    changed = tokens.clone()
    changed[0, :20] += 1  # the first two documents, and a part of the third
    with torch.no_grad():
        before, after = model(tokens, positions), model(changed % 256, positions)
    first = sum(LENGTHS[:3])
    assert torch.equal(before[0, first:], after[0, first:]) and torch.equal(before[1], after[1])
    assert not torch.equal(before[0, :first], after[0, :first])
