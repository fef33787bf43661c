"""The numbers that define a decoder, and what follows from them by arithmetic alone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DecoderConfig:
    """Architecture of a decoder-only transformer of the Llama family.

    ``head_dim`` None means ``dim // n_heads``. ``rope_factor`` above 1 stretches the rotary frequencies to longer
    contexts as Llama 3.1 does: those whose wavelength exceeds ``rope_original_positions / rope_low_freq_factor``
    positions are divided by it, those below ``rope_original_positions / rope_high_freq_factor`` are kept, and between
    the two the scale is interpolated. Raises ``ValueError`` that lists every contradiction.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int | None = None
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rope_factor: float = 1.0
    rope_low_freq_factor: float = 1.0
    rope_high_freq_factor: float = 4.0
    rope_original_positions: int = 8192
    tie_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2
    wo_bias: bool = False  # with qkv_bias, Hugging Face's attention_bias of Llama
    qk_norm: bool = False  # Qwen3: an RMSNorm over each query and key head

    def __post_init__(self):
        problems = [
            f"{name} = {getattr(self, name)}: must be at least 1"
            for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
            if getattr(self, name) < 1
        ]
        if not problems:
            if self.head_dim is None:
                if self.dim % self.n_heads:
                    problems.append(
                        f"dim = {self.dim} is not a multiple of n_heads = {self.n_heads}: "
                        "choose n_heads that divides dim, or set head_dim"
                    )
                object.__setattr__(self, "head_dim", self.dim // self.n_heads)
            if self.n_heads % self.n_kv_heads:
                problems.append(
                    f"n_heads = {self.n_heads} is not a multiple of n_kv_heads = {self.n_kv_heads}: "
                    "every group of query heads shares one key/value head"
                )
            if self.head_dim % 2:
                problems.append(f"head_dim = {self.head_dim} is odd: rotary embedding turns pairs of channels")
            if self.rope_low_freq_factor >= self.rope_high_freq_factor:
                problems.append(
                    f"rope_low_freq_factor = {self.rope_low_freq_factor} must be below "
                    f"rope_high_freq_factor = {self.rope_high_freq_factor}"
                )
        if problems:
            raise ValueError("; ".join(problems))

    @property
    def n_params(self) -> int:
        """Trainable parameters; a tied matrix counts once."""
        qkv_channels = self.head_dim * (self.n_heads + 2 * self.n_kv_heads)
        attention = self.dim * (qkv_channels + self.head_dim * self.n_heads)
        attention += qkv_channels * self.qkv_bias + self.dim * self.wo_bias + 2 * self.head_dim * self.qk_norm
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        matrices = 1 if self.tie_embeddings else 2
        return self.n_layers * block + matrices * self.vocab_size * self.dim + self.dim

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward FLOPs per token at ``seq_len``, the full-attention convention.

        ``6 N + 12 L H E S`` with N the parameters that take part in a matmul or scale a vector: the
        input embedding is a look-up and does not count, the output matrix counts even when tied
        (PaLM, Chowdhery et al. 2022, appendix B).
        """
        n_active = self.n_params - (0 if self.tie_embeddings else self.vocab_size * self.dim)
        return 6 * n_active + 12 * self.n_layers * self.n_heads * self.head_dim * seq_len

    def unit_flops_per_token(self, seq_len: int) -> tuple[int, int]:
        """The same of (one block, the head: final norm, output matrix and loss). The embedding is a look-up: none."""
        head = 6 * self.dim * (self.vocab_size + 1)
        return (self.flops_per_token(seq_len) - head) // self.n_layers, head
