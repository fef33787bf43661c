"""Several documents in one row: attention that does not cross their borders.

A row says where its documents start by its positions, which restart at 0 there. Attention masked by them gives each
token the result that it would have in a row of its document alone.

Shapes: B batch, S sequence, H query heads, K kv heads, E head dim.
"""

import functools

import torch
import torch.nn.functional as F


def document_mask(positions_BS: torch.Tensor, dtype: torch.dtype):
    """Who may attend to whom, for ``attend``: earlier tokens of the same document, and itself.

    ``positions_BS`` int64. On a CPU a bias of 0 or -inf, ``dtype`` [B, 1, S, S]: SDPA would turn a boolean mask into
    one in every layer. On a GPU a ``BlockMask``. Made once a forward, for all layers.
    """
    documents_BS = (positions_BS == 0).cumsum(1)
    if positions_BS.is_cuda:
        return _block_mask(documents_BS)
    same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
    mask_BSS = torch.zeros(same_BSS.shape, dtype=dtype, device=positions_BS.device)
    return mask_BSS.masked_fill_(~same_BSS.tril(), float("-inf"))[:, None]


def attend(q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor, mask=None) -> torch.Tensor:
    """Grouped-query attention, [B, H, S, E]: causal, or as ``document_mask`` says."""
    grouped = q_BHSE.shape[1] != k_BKSE.shape[1]
    if mask is None or isinstance(mask, torch.Tensor):
        return F.scaled_dot_product_attention(
            q_BHSE, k_BKSE, v_BKSE, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
    return _compiled_flex()[1](q_BHSE, k_BKSE, v_BKSE, block_mask=mask, enable_gqa=grouped)


# The rest runs on a GPU alone (tests/gpu): FlexAttention, which skips blocks of the mask that are empty. It must be
# compiled, or it holds all scores; inside a compiled decoder block it becomes a part of that.


@functools.cache
def _compiled_flex() -> tuple:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(create_block_mask), torch.compile(flex_attention)


def _block_mask(documents_BS: torch.Tensor):
    def visible(b, h, q, k):
        return (q >= k) & (documents_BS[b, q] == documents_BS[b, k])

    n_rows, length = documents_BS.shape
    return _compiled_flex()[0](visible, n_rows, None, length, length, device=documents_BS.device)
