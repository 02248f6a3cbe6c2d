"""What rotary position embedding in place means, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.transform.rotary_embedding import rotary_embedding


def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Rotate pairs of channels of query and key in place."""
    rotated = rotary_embedding(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)
    for x, y in zip((query, key), rotated, strict=True):
        if x is not None:
            x.copy_(y)
