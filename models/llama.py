"""Llama's named sizes, with the published dimensions (Meta's model cards and config.json files)."""

from models.decoder_config import DecoderConfig, RopeScaling

_LLAMA3 = dict(vocab_size=128_256, rope_theta=500_000.0)
_3_1 = RopeScaling(factor=8.0)
_3_2 = RopeScaling(factor=32.0)

SIZES = {
    # Trains on a laptop in a minute; the byte tokenizer's 258 ids fit, with room to spare.
    "debug": DecoderConfig(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=320),
    # Llama 3.2
    "3.2-1B": DecoderConfig(
        dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, tie_embeddings=True, rope_scaling=_3_2, **_LLAMA3
    ),
    "3.2-3B": DecoderConfig(
        dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim=8192, tie_embeddings=True, rope_scaling=_3_2, **_LLAMA3
    ),
    # Llama 3 and 3.1 differ only in the scaling of the rotary frequencies.
    "3-8B": DecoderConfig(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, **_LLAMA3),
    "3-70B": DecoderConfig(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, **_LLAMA3),
    "3.1-8B": DecoderConfig(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336, rope_scaling=_3_1, **_LLAMA3
    ),
    "3.1-70B": DecoderConfig(
        dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672, rope_scaling=_3_1, **_LLAMA3
    ),
    "3.1-405B": DecoderConfig(
        dim=16_384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53_248, rope_scaling=_3_1, **_LLAMA3
    ),
}
