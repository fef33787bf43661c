import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from trainer.data.rows import IGNORED
from trainer.hardware import peak_flops
from trainer.loss import TokenLoss, count_valid, summed_cross_entropy
from trainer.optimizer import build_optimizer, is_decayed, set_lr


def logits_with_loss(value: float, n: int) -> torch.Tensor:
    """Logits [1, n, 2] whose cross-entropy against label 0 is ``value`` at each position."""
    return torch.tensor([[[0.0, math.log(math.exp(value) - 1)]] * n])


def test_moments_in_bfloat16_follow_those_in_fp32():
    """After a step that leaves all as it was where the gradient is not finite, and in pieces of any size."""
    torch.manual_seed(0)
    gradients = [torch.randn(300) for _ in range(30)]
    found = {}
    for small in (False, True):
        parameters = [torch.nn.Parameter(torch.ones(300)) for _ in range(3)]
        named = [(str(number), parameter) for number, parameter in enumerate(parameters)]
        optimizer = build_optimizer(named, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, small_moments=small)
        for number, gradient in enumerate(gradients):
            for parameter in parameters:
                parameter.grad = gradient.clone()
            optimizer.grad_scale, optimizer.found_inf = None, torch.tensor(float(number == 7))
            before = [parameter.detach().clone() for parameter in parameters]
            optimizer.step()
            assert (number == 7) == all(map(torch.equal, before, parameters))
        found[small] = parameters[0].detach()
        kinds = {tensor.dtype for state in optimizer.state.values() for tensor in state.values() if tensor.dim()}
        assert kinds == {torch.bfloat16 if small else torch.float32}
    assert torch.allclose(found[True] - 1, found[False] - 1, atol=2e-3)


def test_b01_worked_value():
    """Loss sums 2 (1 token) and 90 (9 tokens) make 9.2, not the mean of means 6.0."""
    loss = TokenLoss()
    first = torch.tensor([[0] + [IGNORED] * 8])
    second = torch.zeros(1, 9, dtype=torch.long)
    loss.n_tokens = count_valid(first) + count_valid(second)
    total = loss(logits_with_loss(2.0, 9), first) + loss(logits_with_loss(10.0, 9), second)
    assert loss.n_tokens.item() == 10 and total.item() == pytest.approx(9.2, rel=1e-6)


def test_b16_no_valid_label_is_zero_loss_and_gradient():
    loss = TokenLoss()
    logits = torch.randn(2, 4, 8, requires_grad=True)
    labels = torch.full((2, 4), IGNORED)
    loss.n_tokens = count_valid(labels)
    value = loss(logits, labels)
    value.backward()
    assert value.item() == 0 and logits.grad.abs().max() == 0


def test_b82_norms_are_not_decayed():
    config = DecoderConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=256)
    named = dict(Decoder(config, 16).named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizer = build_optimizer(named.items(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.5)
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in named.items():
        factor = 1.0 if "norm" in name else 0.95
        torch.testing.assert_close(parameter.detach(), before[name] * factor)
    assert sum(is_decayed(name, parameter) for name, parameter in named.items()) == 2 * 7 + 2
    assert not is_decayed("layers.0.attention.wq.bias", torch.zeros(4))


def test_set_lr_reaches_every_group():
    module = nn.Linear(2, 2)
    optimizer = build_optimizer(module.named_parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_b75_unknown_hardware_has_no_peak():
    assert peak_flops("CPU", "bfloat16") is None
    assert peak_flops("Some Future GPU", "bfloat16") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "float32") is None
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16") == 312e12


def test_the_loss_over_a_large_vocabulary_is_that_of_float64():
    """Frequent ids come first, as in a real tokenizer: then torch's CPU kernel loses the small terms of the sum."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 151_936, generator=generator) - torch.linspace(0, 10, 151_936)
    logits[:, 0] += 8
    labels = torch.randint(0, 151_936, (64,), generator=generator)
    labels[::5] = IGNORED
    logits.requires_grad_()
    loss = summed_cross_entropy(logits, labels)
    loss.backward()
    exact = logits.detach().double().requires_grad_()
    truth = F.cross_entropy(exact, labels, reduction="sum", ignore_index=IGNORED)
    truth.backward()
    assert loss.item() == pytest.approx(truth.item(), rel=1e-7)
    assert (logits.grad - exact.grad).abs().max() < 1e-6 and logits.grad[0].abs().max() == 0
    kernel = F.cross_entropy(logits.detach(), labels, reduction="sum", ignore_index=IGNORED)
    # By less where a CPU adds more of them side by side: 6e-7 with AVX-512, 3e-6 with AVX2.
    assert abs(kernel.item() / truth.item() - 1) > 3e-7, "the kernel is exact now: use it"


def test_a_loss_that_stands_out_is_told():
    import math

    from trainer.metrics import LossSpikes

    spikes = LossSpikes(6.0)
    falling = [3.0 * math.exp(-step / 200) + 0.05 * math.sin(step) for step in range(300)]
    assert not any(spikes.judge(loss) for loss in falling)
    assert spikes.judge(float("nan")) is None  # that is another's business
    assert "loss 5.0000 stands out from the 100 before" in spikes.judge(5.0)
    assert LossSpikes(0).judge(5.0) is None
    early = LossSpikes(6.0)
    assert not any(early.judge(loss) for loss in (5.0, 5.0, 9.0))  # too few to know
