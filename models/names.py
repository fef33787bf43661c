"""What the names of a decoder's parameters say. Loads no torch."""

from models.decoder_config import DecoderConfig


def is_adapter(name: str) -> bool:
    """Whether a parameter is A or B of a low-rank adapter (``models/lora.py``)."""
    return name.rpartition(".")[2] in ("lora_a", "lora_b")


def inputs_of(config: DecoderConfig, name: str) -> int:
    """Input features of the projection in a block that holds the parameter ``name``."""
    projection = name.split(".")[-2]
    return {"wo": config.n_heads * config.head_dim, "w2": config.ffn_dim}.get(projection, config.dim)
