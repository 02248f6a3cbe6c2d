"""Helpers to compare quantized tensors."""

from __future__ import annotations

import torch
from torch import Tensor

SF_PER_WORD = 4


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def clear_unused_sf(sf: Tensor, hidden: int, num_per_channels: int) -> Tensor:
    """Zero the bytes of packed UE8M0 factors that belong to no block, so that two tensors can be compared.

    Args:
        sf: int32 (num_tokens, words), four factors of neighbouring channel blocks per word, in any layout; modified in
            place if it is contiguous.
        hidden: channels of the data.
        num_per_channels: channels per factor.

    Returns:
        uint8 (num_tokens, 4 * words): one byte per factor in the order of the channels.
    """
    num_blocks = _ceil_div(hidden, num_per_channels)
    rows, words = sf.shape
    flat = sf.contiguous().as_strided((sf.numel(),), (1,))
    sf_bytes = flat.view(torch.uint8).view(rows, SF_PER_WORD * words)
    sf_bytes[:, num_blocks:] = 0
    return sf_bytes


def clear_unused_sf_col_pack(sf: Tensor, num_tokens: int, num_per_tokens: int) -> Tensor:
    """The same for factors packed along the tokens.

    Args:
        sf: int32 (words, hidden), four factors of consecutive token blocks per word; modified in place if it is
            contiguous.
        num_tokens: rows of the data.
        num_per_tokens: rows per factor.

    Returns:
        uint8 (words, hidden, 4).
    """
    num_blocks = _ceil_div(num_tokens, num_per_tokens)
    words, hidden = sf.shape
    flat = sf.contiguous().as_strided((sf.numel(),), (1,))
    sf_bytes = flat.view(torch.uint8).view(words, hidden, SF_PER_WORD)
    used = num_blocks - SF_PER_WORD * (words - 1)
    if words:
        sf_bytes[-1, :, used:] = 0
    return sf_bytes


def quant_level_rank(x: Tensor, fmt: str) -> Tensor:
    """Rank of every code among the values of its format: ranks of two codes k levels apart differ by k.

    Args:
        x: codes, float8_e4m3fn / float8_e5m2, or int8 with two e2m1 per byte (even column in the low nibble).
        fmt: 'e4m3', 'e5m2' or 'e2m1'.

    Returns:
        int32; 0 for both zeros, negative for negative codes. The last dimension is twice as long for e2m1.
    """
    if fmt not in ('e4m3', 'e5m2', 'e2m1'):
        raise ValueError(f"quant_level_rank: fmt must be 'e4m3', 'e5m2' or 'e2m1', got {fmt!r}")
    codes = x.contiguous().view(torch.uint8).to(torch.int32)
    if fmt == 'e2m1':
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    sign = 8 if fmt == 'e2m1' else 128
    return torch.where(codes >= sign, sign - codes, codes)
