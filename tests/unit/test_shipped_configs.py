"""Every shipped config: parsed, validated, built on the meta device, split; each stage's size stated."""

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from models import FAMILIES
from models.decoder import Decoder
from models.names import is_adapter
from parallelize.apply import resolve_plan
from parallelize.pipeline import split_stage
from parallelize.plan import decoder_plan, resolve
from parallelize.schedules import balance_uniform, schedule_of
from trainer.build import build_meta_parts
from trainer.config_load import CONFIG_DIR, load_config
from trainer.config_rules import layout_needs, resolve_config

# name: GPUs, layers per stage, parameters per stage
SHIPPED = {
    "debug": (1, [6], [4_885_760]),
    "llama3_8b": (8, [32], [8_030_261_248]),
    "llama3_2_1b": (8, [16], [1_235_814_400]),
    "smollm2_135m": (8, [30], [134_515_008]),
    "smollm2_135m_sft": (1, [30], [134_515_008]),
    "smollm2_135m_lora": (1, [30], [134_515_008 + 4_884_480]),
    "qwen2_5_7b": (8, [28], [7_615_616_512]),
    "qwen3_0_6b": (8, [28], [596_049_920]),
    "qwen3_8b": (8, [36], [8_190_735_360]),
    "qwen3_32b": (64, [64], [32_762_123_264]),
    "llama3_70b": (256, [10] * 8, [9_607_217_152] + [8_556_544_000] * 6 + [9_607_225_344]),
    "llama3_405b": (
        512, [8] * 14 + [7] * 2, [27_602_976_768] + [25_501_630_464] * 13 + [22_313_926_656, 24_415_289_344],
    ),
}  # fmt: skip


def test_none_is_forgotten():
    shipped = {
        path.stem for path in CONFIG_DIR.glob("*.toml") if not path.stem.startswith("bench_")
    }  # those: test_bench.py
    assert shipped == SHIPPED.keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config(name):
    world_size, layers, sizes = SHIPPED[name]
    config = load_config(name)
    assert layout_needs(config.parallel) == world_size
    resolved = resolve_config(config, world_size)
    parts, plan = build_meta_parts(resolved, tuple(range(len(layers))))
    assert list(resolved.layers_per_stage) == layers
    assert [sum(p.numel() for p in part.parameters()) for part in parts] == sizes
    adapters = sum(p.numel() for part in parts for name, p in part.named_parameters() if is_adapter(name))
    assert sum(sizes) == resolved.architecture.n_params + adapters
    assert (CONFIG_DIR / f"{name}.toml").read_text().startswith("#:schema ./schema.json\n")


@pytest.mark.parametrize("family, size", [(family, size) for family in FAMILIES for size in FAMILIES[family]])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_plan_resolves_on_every_size(family, size, sequence_parallel):
    architecture = FAMILIES[family][size]
    with torch.device("meta"):
        model = Decoder(architecture, n_positions=16)
    plan = decoder_plan(
        sequence_parallel=sequence_parallel, loss_parallel=True, tie_embeddings=architecture.tie_embeddings,
        qk_norm=architecture.qk_norm,
    )  # fmt: skip
    resolved = resolve_plan(model, plan)
    sharded = {name for name in resolved.styles}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)) or (sequence_parallel and isinstance(module, nn.RMSNorm)):
            assert name in sharded, f"{name} has no tensor-parallel style"
    in_units = [name for unit in resolved.units for name in unit]
    assert len(in_units) == len(set(in_units))
    rest = [n for n, _ in model.named_parameters() if not any(n.startswith(unit + ".") for unit in in_units)]
    assert rest == (["tok_embeddings.weight", "norm.weight"] if architecture.tie_embeddings else [])


def test_resolver_raises_on_a_pattern_without_a_module():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.ModuleDict({"a": nn.Linear(1, 1)})})
    assert resolve(model, ["a", "*.a"]) == {"a": "a", "b.a": "*.a"}
    with pytest.raises(ValueError, match="'c' matches no module"):
        resolve(model, ["a", "c"])
    with pytest.raises(ValueError, match="matched by 'a' and by '\\*'"):
        resolve(model, ["a", "*"])


@pytest.mark.parametrize("n_layers, n_stages", [(5, 2), (6, 4), (30, 4), (126, 16), (5, 4), (4, 4)])
def test_b59_every_layer_is_placed_exactly_once(n_layers, n_stages):
    balance = balance_uniform(n_layers, n_stages)
    assert sum(balance) == n_layers and max(balance) - min(balance) <= 1
    config = FAMILIES["llama"]["debug"]
    with torch.device("meta"):
        model = Decoder(type(config)(**{**vars(config), "n_layers": n_layers}), n_positions=16)
    plan = decoder_plan(sequence_parallel=True, loss_parallel=True, tie_embeddings=False)
    parts = [split_stage(model, plan, balance, stage) for stage in range(n_stages)]
    names = [name for part in parts for name, _ in part.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    with pytest.raises(ValueError, match="exactly once"):
        split_stage(model, plan, [n_layers - 1] + [0] * (n_stages - 2) + [1], 0) if n_stages > 2 else split_stage(
            model, plan, [1, 1], 0
        )


@pytest.mark.parametrize("pp", [2, 4])
def test_stages_are_placed_in_a_loop_or_in_a_v(pp):
    assert schedule_of("LoopedBFS").stage_ranks(pp, 3 * pp) == tuple(range(pp)) * 3
    assert schedule_of("DualPipeV").stage_ranks(pp, 2 * pp) == (*range(pp), *range(pp - 1, -1, -1))


def test_torch_still_wants_gradients_of_a_forward_only_pipeline():
    """Once this fails, ``Stage`` in parallelize/pipeline.py can go."""
    stage = object.__new__(PipelineStage)
    stage.has_backward = False
    with pytest.raises(AssertionError, match="doesn't have backward"):
        stage.get_local_bwd_output(0)


def test_torch_still_misplaces_vocabularies_sharded_unevenly_twice():
    """Once this fails, the rule on vocab_size, tp and dp_shard in config_rules.py can go."""
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    # 9 rows over tp 2: 5 and 4. The 5 over dp 4: 2, 2, 1, 0. The 4: 1 each, the last of them row 8.
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    shape, offset = _compute_local_shape_and_global_offset((9, 1), (4, 2), [3, 1], placements)
    assert (shape[0], offset[0]) != (1, 8)
