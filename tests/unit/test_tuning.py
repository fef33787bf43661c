"""Globs over parameters: what is frozen, adapted, grouped, and what is said of one that matches nothing."""

import pytest
import torch

from models.decoder import Decoder
from models.lora import AdaptedLinear
from tests.tiny import tiny_config
from trainer.build import flops_per_token, meta_model, with_matching_globs
from trainer.config_rules import architecture_of, resolve_config
from trainer.errors import UserError
from trainer.optimizer import build_optimizer, set_lr
from trainer.tuning import group_of, lora_scale


def trained(**overrides) -> set[str]:
    config = tiny_config(**overrides)
    return {name for name, p in meta_model(config, architecture_of(config)).named_parameters() if p.requires_grad}


def test_freezing():
    everything = trained()
    assert everything - trained(training__freeze=["tok_embeddings", "layers.[01]"]) == {
        name for name in everything if name.startswith(("tok_embeddings.", "layers.0.", "layers.1."))
    }
    assert everything - trained(training__freeze=["*norm*"]) == {name for name in everything if "norm" in name}
    tied = trained(training__freeze=["tok_embeddings"], model__tie_embeddings=True)
    assert "output.weight" not in tied and "tok_embeddings.weight" not in tied


def test_adapters_are_what_is_trained_and_what_is_frozen_has_its_own_dtype():
    lora = dict(
        training__method="lora", lora__rank=4, lora__targets=["layers.*.attention.w[qv]"], precision__frozen="bfloat16"
    )
    names = trained(**lora)
    assert len(names) == 16 and all(name.endswith((".lora_a", ".lora_b")) for name in names)
    config = tiny_config(**lora)
    whole = meta_model(config, architecture_of(config))
    assert {p.dtype for p in whole.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in whole.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert whole.get_parameter("layers.0.attention.wv.lora_b").shape == (32, 4)
    assert lora_scale(config.lora) == 8 and lora_scale(tiny_config(**lora, lora__rslora=True).lora) == 16


def test_an_adapter_adds_what_it_should():
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 5)
    plain, x = torch.nn.Linear(6, 5), torch.randn(3, 6)
    layer.__class__ = AdaptedLinear
    layer.add_adapter(2, 0.5)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    with torch.no_grad():
        plain.weight.copy_(layer.weight + 0.5 * layer.lora_b @ layer.lora_a)
        plain.bias.copy_(layer.bias)
    torch.testing.assert_close(layer(x), plain(x))


def test_groups_of_rates():
    groups = [
        {"match": ["layers.*.attention"], "lr_scale": 0.5, "weight_decay": 0.3},
        {"match": ["norm"], "lr_scale": 0},
    ]
    config = tiny_config(optimizer__groups=groups)
    model = Decoder(architecture_of(config), 8)
    named = dict(model.named_parameters())
    optimizer = build_optimizer(
        named.items(),
        lr=1.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.1,
        group_of=lambda name: group_of(config, name),
    )
    set_lr(optimizer, 0.2)
    found = {id(p): (group["lr"], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
    assert found[id(named["layers.3.attention.wo.weight"])] == (0.1, 0.3)
    assert found[id(named["norm.weight"])] == (0.0, 0.0) and found[id(named["layers.0.ffn_norm.weight"])] == (0.2, 0.0)
    assert found[id(named["output.weight"])] == (0.2, 0.1) and len(found) == len(named)


@pytest.mark.parametrize(
    "overrides, told",
    [
        (
            dict(training__freeze=["embedding*"]),
            'training.freeze: "embedding*" matches nothing in the model; did you mean tok_embeddings?',
        ),
        (dict(training__freeze=["layers.9"]), 'training.freeze: "layers.9" matches nothing'),
        (dict(training__freeze=["*"]), "leaves nothing to train"),
        (dict(training__method="lora", lora__targets=["layers.*.attention.wx"]), "did you mean layers.*.attention.w"),
        (
            dict(training__method="lora", lora__targets=["output"]),
            'lora.targets: "output" matches nothing in the model',
        ),
        (dict(training__method="lora", lora__dropout=0.1), "lora.dropout = 0.1: ranks would draw masks of their own"),
        (dict(training__method="lora", float8__recipe="tensorwise"), 'use float8.recipe = "none"'),
        (dict(lora__rank=4), '[lora] is set, but training.method = "pretrain"'),
        (dict(optimizer__groups=[{"match": ["atention"]}]), "optimizer.groups, table 1: match"),
        (
            dict(optimizer__groups=[{"match": ["norm"]}, {"match": ["*norm*"]}]),
            "norm.weight is matched by table 1 and by table 2",
        ),
        (dict(optimizer__groups=[{"match": ["norm"]}], training__freeze=["norm"]), "all that it matches is frozen"),
        (dict(training__method="sft"), None),
    ],
)
def test_what_cannot_be(overrides, told):
    if told is None:
        resolve_config(tiny_config(**overrides), 1)
        return
    with pytest.raises(UserError) as error:
        resolve_config(tiny_config(**overrides), 1)
    assert told in error.value.message()


def test_a_smaller_model_loses_globs_of_layers_that_it_has_not():
    config = tiny_config(training__freeze=["layers.3", "norm"], model__n_layers=2)
    assert with_matching_globs(config, architecture_of(config)).training.freeze == ("norm",)


def test_b75_flops_of_what_is_not_trained():
    plain, frozen = tiny_config(), tiny_config(training__freeze=["tok_embeddings", "layers.0"])
    architecture = architecture_of(plain)
    block = sum(p.numel() for name, p in Decoder(architecture, 8).named_parameters() if name.startswith("layers.0."))
    assert flops_per_token(plain, architecture) - flops_per_token(frozen, architecture) == 2 * block
    lora = tiny_config(training__method="lora", lora__rank=2, lora__targets=["layers.*.attention.wq"])
    n_active = architecture.n_params - 256 * 64
    assert flops_per_token(lora, architecture) == flops_per_token(plain, architecture) - 2 * n_active + 6 * 4 * 2 * (
        64 + 64
    )
