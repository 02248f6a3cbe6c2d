"""What rotary position embedding means, in plain PyTorch: float32, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """The sum a * b + c, rounded once: float64 holds the product of two float32."""
    return (a.double() * b.double() + c.double()).float()


def _angles(
    x: Tensor, cos_sin_cache: Tensor, positions: Tensor | None, conjugate: bool, seqlen_offset: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines for every token, (..., 1, R / 2); NaN outside of the cache."""
    if positions is None:
        positions = torch.arange(x.shape[-3], device=x.device).expand(x.shape[:-2])
    row = positions.long() + seqlen_offset
    known = (row >= 0) & (row < cos_sin_cache.shape[0])
    padded = torch.nn.functional.pad(cos_sin_cache, (0, 0, 0, 1))  # there may be no angles at all
    found = padded[torch.where(known, row, 0)]
    cos, sin = torch.where(known.unsqueeze(-1), found, torch.nan).unsqueeze(-2).chunk(2, dim=-1)
    return cos, -sin if conjugate else sin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate the pairs of the first channels."""
    rotary = 2 * cos.shape[-1]
    rotated, rest = x[..., :rotary].float(), x[..., rotary:]
    a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, dim=-1)
    pairs = _fma(a, cos, -(b * sin)), _fma(a, sin, b * cos)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat((rotated.to(x.dtype), rest), dim=-1)


def rotary_embedding(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of channels of query and key."""
    cos, sin = _angles(query, cos_sin_cache, positions, conjugate, seqlen_offset)
    nothing = query.flatten()[:0].clone()
    rotated_key = nothing if key is None else _rotate(key, cos, sin, interleaved)
    return _rotate(query, cos, sin, interleaved), rotated_key


def rotary_embedding_bwd(
    drotated_query: Tensor,
    drotated_key: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rotary_embedding`: the inverse rotation."""
    key = None if drotated_key.dim() == 1 else drotated_key
    options = (positions, interleaved, not conjugate, seqlen_offset)
    return rotary_embedding(drotated_query, cos_sin_cache, key, *options)


def rotary_embedding_ref(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    seqlen_offsets: int = 0,
    interleaved: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate pairs of channels of one tensor, cosines and sines given apart as (length, R / 2)."""
    cache = torch.cat((cos, sin), dim=-1).float()
    return _rotate(x, *_angles(x, cache, positions, conjugate, seqlen_offsets), interleaved)
