"""The initial value of every parameter: a pure function of (seed, name, shape).

A layout decides which slice of a parameter a rank holds, never its value. Matrices are drawn in
blocks of rows, each from a generator seeded by (seed, name, block), so a rank draws only the blocks
that its slice touches and never needs the whole matrix in memory.
"""

import hashlib
import math
import re

import torch

from models.decoder_config import DecoderConfig
from models.names import inputs_of, is_adapter

_BLOCK_NUMEL = 1 << 22  # 16 MiB of fp32 a block: few enough generators, small enough slices


def initial_std(config: DecoderConfig, name: str) -> float | None:
    """Standard deviation of the parameter called ``name``; None for a norm, which starts at one; 0 for a bias.

    0.02 everywhere (GPT-2), and for the two matrices that write to the residual stream
    ``0.02 / sqrt(2 (layer + 1))``, so that the stream's variance does not grow with depth.
    ``layer`` counts in the whole model, not in a pipeline stage. Of an adapter A has ``1 / sqrt(3 in)``, as PEFT's, and B is
    zero. Raises ``ValueError`` for a name that no rule covers: a new parameter must be given a start on purpose.
    """
    module, _, kind = name.rpartition(".")
    if is_adapter(name):
        return 1 / math.sqrt(3 * inputs_of(config, name)) if kind == "lora_a" else 0.0
    if kind == "bias" and re.fullmatch(r"layers\.\d+\.attention\.w[qkvo]", module):
        return 0.0
    if module == "norm" or re.fullmatch(r"layers\.\d+\.((attention|ffn)_norm|attention\.[qk]_norm)", module):
        return None
    if module in ("tok_embeddings", "output") or re.fullmatch(
        r"layers\.\d+\.(attention\.w[qkv]|feed_forward\.w[13])", module
    ):
        return 0.02
    if match := re.fullmatch(r"layers\.(\d+)\.(attention\.wo|feed_forward\.w2)", module):
        return 0.02 / math.sqrt(2 * (int(match[1]) + 1))
    raise ValueError(f"no initialisation rule for parameter {name!r}: add it to models/initialize.py")


def draw_slice(
    seed: int,
    name: str,
    std: float | None,
    shape: tuple[int, ...],
    start: tuple[int, ...],
    stop: tuple[int, ...],
) -> torch.Tensor:
    """The slice ``[start, stop)`` of the parameter's full initial value: fp32, on the CPU.

    Normal, clipped at three standard deviations; ones where ``std`` is None. Always drawn on the CPU: a GPU's
    generator deals its numbers out by the size of the chip.
    """
    slice_shape = tuple(hi - lo for lo, hi in zip(start, stop))
    if std is None:
        return torch.ones(slice_shape)
    out = torch.zeros(slice_shape)
    if out.numel() == 0 or std == 0:
        return out
    row_numel = math.prod(shape[1:])
    rows = max(1, _BLOCK_NUMEL // max(1, row_numel))
    columns = tuple(slice(lo, hi) for lo, hi in zip(start[1:], stop[1:]))
    for block in range(start[0] // rows, (stop[0] - 1) // rows + 1):
        first, last = block * rows, min((block + 1) * rows, shape[0])
        generator = torch.Generator().manual_seed(_block_seed(seed, name, block))
        values = torch.randn((last - first, *shape[1:]), generator=generator)
        values = values.clamp_(-3, 3).mul_(std)
        lo, hi = max(first, start[0]), min(last, stop[0])
        out[lo - start[0] : hi - start[0]] = values[(slice(lo - first, hi - first), *columns)]
    return out


def _block_seed(seed: int, name: str, block: int) -> int:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # a non-negative int64
