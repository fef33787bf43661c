"""Rotary position embedding (Su et al. 2021), in Hugging Face's half-split convention.

Everything here is fp32, whatever the model computes in: at position 100,000 a bf16 angle is noise.
"""

import math

import torch

from models.decoder_config import DecoderConfig


def rotary_frequencies(config: DecoderConfig) -> torch.Tensor:
    """Angle per position of each channel pair: fp32 [E/2], in radians."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_factor == 1:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    turns = config.rope_original_positions / wavelengths  # full turns within the original context
    kept = (turns - config.rope_low_freq_factor) / (config.rope_high_freq_factor - config.rope_low_freq_factor)
    kept = kept.clamp(0.0, 1.0)  # 0: divide by the factor; 1: leave alone
    return (1 - kept) * frequencies / config.rope_factor + kept * frequencies


def rotary_table(config: DecoderConfig, n_positions: int) -> torch.Tensor:
    """Cosines and sines of positions 0 ... n_positions - 1: fp32 [2, n_positions, E/2].

    Always computed on the CPU, so that every device and every rank holds the same bits.
    """
    with torch.device("cpu"):
        angles = torch.outer(torch.arange(n_positions, dtype=torch.float32), rotary_frequencies(config))
        return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BSHE: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Turn each channel pair (i, i + E/2) of ``x`` by its position's angle; keeps x's shape and dtype.

    ``table``: of positions 0, 1, ... [2, P, E/2], or of each token's own position [2, B, S, E/2]. The length is read off ``x``, which after the projection always spans the whole sequence, even
    where the block's input was only a shard of it.
    """
    cos, sin = table[..., : x_BSHE.shape[1], None, :]
    first, second = x_BSHE.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x_BSHE)
