"""The one decoder that serves every model family. Plain torch.nn, one device, no parallelism.

Shapes: B batch, S sequence, D model dim, H query heads, K kv heads, E head dim, F ffn dim, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from models.decoder_config import DecoderConfig
from models.documents import attend, document_mask
from models.rotary import rotary_table, rotate


class Attention(nn.Module):
    """Grouped-query attention: causal, and within documents if there is a mask (``models/documents.py``).

    The number of heads is read off the projections' width (``-1``), so a tensor-parallel rank that
    holds some of the heads runs the same code.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=config.wo_bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()

    def forward(self, x_BSD: torch.Tensor, table: torch.Tensor, mask=None) -> torch.Tensor:
        q_BSHE = rotate(self.q_norm(self.wq(x_BSD).unflatten(-1, (-1, self.head_dim))), table)
        k_BSKE = rotate(self.k_norm(self.wk(x_BSD).unflatten(-1, (-1, self.head_dim))), table)
        v_BSKE = self.wv(x_BSD).unflatten(-1, (-1, self.head_dim))
        out_BHSE = attend(q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2), mask)
        return self.wo(out_BHSE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1 x) * w3 x)`` (Shazeer 2020)."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x_BSD: torch.Tensor, table: torch.Tensor, mask=None) -> torch.Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), table, mask)
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD))


class Head(nn.Linear):
    """The last projection. With ``defers`` it gives (hidden, weight) to a loss that projects piece by piece."""

    defers = False

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if self.defers:
            return x_BSD, self.weight.view_as(self.weight)  # a view: FSDP2 puts a hook on what a module gives
        return F.linear(x_BSD, self.weight)


class Decoder(nn.Module):
    """Tokens int64 [B, S] to logits [B, S, V]; with positions int64 [B, S] each document of a row is on its own.

    Layers live in a ``ModuleDict`` keyed by their number in the whole model: a pipeline stage that
    keeps layers 4 and 5 still calls them ``layers.4`` and ``layers.5``. A part that a stage does not
    own is an ``nn.Identity``, so ``forward`` is the same everywhere.
    """

    def __init__(self, config: DecoderConfig, n_positions: int):
        super().__init__()
        self.config = config
        self.n_positions = n_positions
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = Head(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.register_buffer("rotary_table", torch.empty(0), persistent=False)
        if self.output.weight.device.type != "meta":
            self.rebuild_buffers(self.output.weight.device)

    def rebuild_buffers(self, device: torch.device | str) -> None:
        """Compute the tables that no checkpoint holds. Call after leaving the meta device."""
        self.rotary_table = rotary_table(self.config, self.n_positions).to(device)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        hidden_BSD = self.tok_embeddings(tokens)
        table, mask = self.rotary_table, None
        if positions is not None:
            table, mask = table[:, positions], document_mask(positions, hidden_BSD.dtype)
        for block in self.layers.values():
            hidden_BSD = block(hidden_BSD, table, mask)
        return self.output(self.norm(hidden_BSD))
