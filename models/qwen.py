"""Named sizes of Qwen2.5 and dense Qwen3, with the published dimensions (config.json of the base models).

Qwen2.5 has biases on the query, key and value projections; Qwen3 has none, a norm over each query and key head
instead, and head_dim 128 whatever the quotient. Qwen2.5's base models from 14B on have an epsilon of 1e-5, their
instruct models 1e-6: a Hugging Face directory says which (``model.hf_path``).
"""

from models.decoder_config import DecoderConfig

_ROPE = dict(rope_theta=1_000_000.0)
_2_5 = dict(qkv_bias=True, **_ROPE)
_2_5_SMALL = dict(vocab_size=151_936, norm_eps=1e-6, tie_embeddings=True, **_2_5)
_2_5_LARGE = dict(vocab_size=152_064, norm_eps=1e-5, **_2_5)
_3 = dict(vocab_size=151_936, norm_eps=1e-6, head_dim=128, qk_norm=True, n_kv_heads=8, **_ROPE)
_3_SMALL = dict(tie_embeddings=True, **_3)

SIZES = {
    "2.5-0.5B": DecoderConfig(dim=896, n_layers=24, n_heads=14, n_kv_heads=2, ffn_dim=4864, **_2_5_SMALL),
    "2.5-1.5B": DecoderConfig(dim=1536, n_layers=28, n_heads=12, n_kv_heads=2, ffn_dim=8960, **_2_5_SMALL),
    "2.5-3B": DecoderConfig(dim=2048, n_layers=36, n_heads=16, n_kv_heads=2, ffn_dim=11_008, **_2_5_SMALL),
    "2.5-7B": DecoderConfig(
        dim=3584, n_layers=28, n_heads=28, n_kv_heads=4, ffn_dim=18_944, **{**_2_5_LARGE, "norm_eps": 1e-6}
    ),
    "2.5-14B": DecoderConfig(dim=5120, n_layers=48, n_heads=40, n_kv_heads=8, ffn_dim=13_824, **_2_5_LARGE),
    "2.5-32B": DecoderConfig(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27_648, **_2_5_LARGE),
    "2.5-72B": DecoderConfig(dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=29_568, **_2_5_LARGE),
    "3-0.6B": DecoderConfig(dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, **_3_SMALL),
    "3-1.7B": DecoderConfig(dim=2048, n_layers=28, n_heads=16, ffn_dim=6144, **_3_SMALL),
    "3-4B": DecoderConfig(dim=2560, n_layers=36, n_heads=32, ffn_dim=9728, **_3_SMALL),
    "3-8B": DecoderConfig(dim=4096, n_layers=36, n_heads=32, ffn_dim=12_288, **_3),
    "3-14B": DecoderConfig(dim=5120, n_layers=40, n_heads=40, ffn_dim=17_408, **_3),
    "3-32B": DecoderConfig(dim=5120, n_layers=64, n_heads=64, ffn_dim=25_600, **_3),
}
