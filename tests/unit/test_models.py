import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models import FAMILIES
from models.decoder import Decoder
from models.decoder_config import DecoderConfig
from models.initialize import draw_slice, initial_std
from models.rotary import rotary_frequencies, rotary_table, rotate

# Parameters of the published weights, a tied matrix once: model cards, and the sizes of the safetensors files.
PUBLISHED = {
    "llama": {
        "3-8B": 8_030_261_248,
        "3-70B": 70_553_706_496,
        "3.1-8B": 8_030_261_248,
        "3.1-70B": 70_553_706_496,
        "3.1-405B": 405_853_388_800,
        "3.2-1B": 1_235_814_400,
        "3.2-3B": 3_212_749_824,
        "3.3-70B": 70_553_706_496,
        "smollm2-135M": 134_515_008,
        "smollm2-360M": 361_821_120,
        "smollm2-1.7B": 1_711_376_384,
    },
    "qwen": {
        "2.5-0.5B": 494_032_768,
        "2.5-1.5B": 1_543_714_304,
        "2.5-3B": 3_085_938_688,
        "2.5-7B": 7_615_616_512,
        "2.5-14B": 14_770_033_664,
        "2.5-32B": 32_763_876_352,
        "2.5-72B": 72_706_203_648,
        "3-0.6B": 596_049_920,
        "3-1.7B": 1_720_574_976,
        "3-4B": 4_022_468_096,
        "3-8B": 8_190_735_360,
        "3-14B": 14_768_307_200,
        "3-32B": 32_762_123_264,
    },
}
TINY = DecoderConfig(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=128, vocab_size=256)


@pytest.mark.parametrize("family, size", [(family, size) for family in FAMILIES for size in FAMILIES[family]])
def test_parameter_counts_are_the_published_ones(family, size):
    config = FAMILIES[family][size]
    with torch.device("meta"):
        model = Decoder(config, n_positions=16)
    assert sum(p.numel() for p in model.parameters()) == config.n_params
    assert size == "debug" or config.n_params == PUBLISHED[family][size]
    zero = [name for name, _ in model.named_parameters() if initial_std(config, name) == 0]
    assert all(name.endswith(".bias") for name in zero) and bool(zero) == config.qkv_bias


@pytest.mark.parametrize("switch", ["qkv_bias", "wo_bias", "qk_norm", "tie_embeddings"])
def test_switches_are_counted(switch):
    config = DecoderConfig(**{**vars(TINY), switch: True})
    assert sum(p.numel() for p in Decoder(config, 8).parameters()) == config.n_params != TINY.n_params


@pytest.mark.parametrize("tied, n_params", [(False, 106_816), (True, 90_432)])
def test_b75_parameters_and_flops(tied, n_params):
    config = DecoderConfig(**{**vars(TINY), "tie_embeddings": tied})
    assert config.n_params == n_params
    assert config.flops_per_token(128) == 739_200


def test_b48_llama3_rope_scaling():
    def ratios(head_dim, factor):
        shape = dict(dim=head_dim, n_layers=1, n_heads=1, n_kv_heads=1, ffn_dim=1, vocab_size=1, rope_theta=500_000.0)
        scaled = rotary_frequencies(DecoderConfig(**shape, rope_factor=factor))
        return (scaled / rotary_frequencies(DecoderConfig(**shape))).tolist()

    seen = ratios(64, 32.0)
    assert seen[:15] == [1.0] * 15 and seen[18:] == pytest.approx([1 / 32] * 14)
    assert seen[15:18] == pytest.approx([0.60557, 0.30374, 0.10345], abs=1e-5)
    seen = ratios(128, 8.0)
    assert seen[:29] == [1.0] * 29 and seen[35:] == pytest.approx([1 / 8] * 29)
    assert seen[29:35] == pytest.approx([0.82817, 0.64374, 0.49351, 0.37112, 0.27143, 0.19021], abs=1e-5)


def test_rotary_is_a_rotation_by_relative_position():
    table = rotary_table(TINY, 64)
    q, k = torch.randn(2, 1, 1, 1, 16)
    at = lambda x, position: rotate(x.expand(1, 64, 1, 16), table)[0, position, 0]  # noqa: E731
    torch.testing.assert_close(at(q, 5) @ at(k, 3), at(q, 40) @ at(k, 38), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(at(q, 17).norm(), q.norm())
    assert table.dtype == torch.float32


def test_causal_logits_ignore_the_future():
    model = Decoder(TINY, n_positions=32)
    tokens = torch.randint(0, 256, (1, 32))
    changed = tokens.clone()
    changed[0, 20:] = 0
    torch.testing.assert_close(model(tokens)[0, :20], model(changed)[0, :20])


def test_slices_are_slices_of_one_full_draw():
    shape = (5000, 1000)  # two blocks of rows
    full = draw_slice(0, "w", 0.02, shape, (0, 0), shape)
    for start, stop in (
        ((0, 0), (2500, 1000)),
        ((4100, 500), (4300, 1000)),
        ((4999, 0), (5000, 1)),
        ((7, 0), (7, 1000)),
    ):
        part = draw_slice(0, "w", 0.02, shape, start, stop)
        assert torch.equal(part, full[start[0] : stop[0], start[1] : stop[1]])
    assert full.std().item() == pytest.approx(0.02, rel=0.02) and abs(full.mean().item()) < 1e-4


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it hold at any moment."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.seen = weakref.WeakSet()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        storage = out.untyped_storage() if isinstance(out, torch.Tensor) else None
        if storage is not None and storage not in self.seen:
            self.seen.add(storage)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
            self.peak = max(self.peak, self.live)
        return out

    def _free(self, n_bytes: int) -> None:
        self.live -= n_bytes


@pytest.mark.parametrize(
    "start, stop",
    [((0, 0), (200_000, 64)), ((60_000, 0), (70_000, 64)), ((0, 32), (200_000, 48))],
    ids=["all", "rows", "columns"],
)
def test_drawing_a_slice_never_holds_the_whole(start, stop):
    """51 MB of parameter in blocks of 16 MiB: at most the slice and two blocks (numbers, and clamped)."""
    shape = (200_000, 64)
    with LiveBytes() as memory:
        part = draw_slice(0, "w", 0.02, shape, start, stop)
    own, block = part.untyped_storage().nbytes(), 1 << 24
    assert own <= memory.peak <= own + 2 * block


def test_b22_b23_draws_differ_by_name_row_and_seed():
    draw = lambda seed, name: draw_slice(seed, name, 0.02, (64, 64), (0, 0), (64, 64))  # noqa: E731
    first = draw(0, "layers.0.attention.wq.weight")
    assert not torch.equal(first, draw(0, "layers.1.attention.wq.weight"))
    assert not torch.equal(first, draw(1, "layers.0.attention.wq.weight"))
    assert not torch.equal(first[:32], first[32:])
    assert torch.equal(first, draw(0, "layers.0.attention.wq.weight"))


def test_depth_scaled_initialisation_uses_the_global_layer():
    std = [initial_std(TINY, f"layers.{layer}.feed_forward.w2.weight") for layer in range(4)]
    assert std == pytest.approx([0.02 / (2 * (layer + 1)) ** 0.5 for layer in range(4)])
    with pytest.raises(ValueError, match="no initialisation rule"):
        initial_std(TINY, "layers.0.router.weight")


def test_contradictions_are_listed_together():
    with pytest.raises(ValueError, match=r"(?s)n_heads = 6 is not a multiple.*head_dim = 3 is odd"):
        DecoderConfig(dim=64, n_layers=1, n_heads=6, n_kv_heads=4, head_dim=3, ffn_dim=1, vocab_size=1)
