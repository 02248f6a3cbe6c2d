"""Rotary position embedding in place; `rotary_embedding` has the mathematics and the kernel."""

from torch import Tensor

from tile_kernels.core.op import Mut, op
from tile_kernels.transform._samples import BENCH, FULL, PARTIAL, SMOKE, random_heads
from tile_kernels.transform.rotary_embedding import rotate


@op()
def apply_rotary(
    query: Mut,
    cos_sin_cache: Tensor,
    key: Mut | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Apply rotary position embedding to the first R channels of every head, in place and in one launch.

    Args:
        query: (num_tokens, num_heads, channels) or (batch, num_tokens, num_heads, channels) bfloat16, float16 or
            float32, any strides but the last; channels from R on are not changed.
        cos_sin_cache: (length, R) float32, contiguous, R even: cosines and then sines of R / 2 angles per position.
        key: like query, with its own number of heads and channels, or None.
        positions: (num_tokens,) or (batch, num_tokens) int32 or int64; None counts the tokens of each batch from 0.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, R / 2 + i).
        conjugate: rotate by the negative angle.
        seqlen_offset: added to every position. A position outside the cache gives NaN.
    """
    rotate(query, key, None, None, cos_sin_cache, positions, interleaved, conjugate, seqlen_offset)


apply_rotary.cases(make=random_heads, match='bitwise', smoke=SMOKE + PARTIAL, full=FULL, bench=BENCH)
