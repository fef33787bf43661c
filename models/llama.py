"""Named sizes of the Llama architecture, with the published dimensions (model cards and config.json files)."""

from models.decoder_config import DecoderConfig

_LLAMA3 = dict(vocab_size=128_256, rope_theta=500_000.0)
_3_1 = dict(rope_factor=8.0, **_LLAMA3)
_3_2 = dict(rope_factor=32.0, tie_embeddings=True, **_LLAMA3)
_8B = dict(dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14_336)
_70B = dict(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28_672)
_SMOLLM2 = dict(vocab_size=49_152, tie_embeddings=True)

SIZES = {
    # Trains on a laptop in a minute; the byte tokenizer's 257 ids fit, with room to spare.
    "debug": DecoderConfig(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=320),
    # Llama 3, 3.1 and 3.3 differ only in the scaling of the rotary frequencies and in the weights.
    "3-8B": DecoderConfig(**_8B, **_LLAMA3),
    "3-70B": DecoderConfig(**_70B, **_LLAMA3),
    "3.1-8B": DecoderConfig(**_8B, **_3_1),
    "3.1-70B": DecoderConfig(**_70B, **_3_1),
    "3.1-405B": DecoderConfig(dim=16_384, n_layers=126, n_heads=128, n_kv_heads=8, ffn_dim=53_248, **_3_1),
    "3.2-1B": DecoderConfig(dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, ffn_dim=8192, **_3_2),
    "3.2-3B": DecoderConfig(dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, ffn_dim=8192, **_3_2),
    "3.3-70B": DecoderConfig(**_70B, **_3_1),
    # SmolLM2 (Allal et al. 2025) has the same architecture.
    "smollm2-135M": DecoderConfig(
        dim=576, n_layers=30, n_heads=9, n_kv_heads=3, ffn_dim=1536, rope_theta=100_000.0, **_SMOLLM2
    ),
    "smollm2-360M": DecoderConfig(
        dim=960, n_layers=32, n_heads=15, n_kv_heads=5, ffn_dim=2560, rope_theta=100_000.0, **_SMOLLM2
    ),
    "smollm2-1.7B": DecoderConfig(
        dim=2048, n_layers=24, n_heads=32, n_kv_heads=32, ffn_dim=8192, rope_theta=130_000.0, **_SMOLLM2
    ),
}
