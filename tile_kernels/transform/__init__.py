"""Rotary position embedding."""

from torch import Tensor

from tile_kernels.transform.rotary import apply_rotary_
from tile_kernels.transform.rotary import rotary_embedding as rotary_op

__all__ = ['apply_rotary', 'rotary_embedding']


def __dir__() -> list[str]:
    return __all__


def apply_rotary(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Turn pairs of channels of query and key by the angle of their position, in place and in one launch.

    Args:
        query: (num_tokens, num_heads, channels) or (batch, num_tokens, num_heads, channels) bfloat16, float16 or
            float32, any strides but the last; its first R channels are turned, the others not touched.
        cos_sin_cache: (length, R) float32, R even: cosines and then sines of R / 2 angles for every position.
        key: like query, with its own number of heads, or None.
        positions: (num_tokens,) or (batch, num_tokens) int32 or int64; None counts the tokens of each batch from 0.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, R / 2 + i).
        conjugate: turn the other way.
        seqlen_offset: added to every position. A position outside of the cache gives NaN.
    """
    apply_rotary_(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)


def rotary_embedding(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """`apply_rotary` that returns new tensors and is differentiable in query and key; arguments as there.

    Returns:
        The turned query, or the pair of query and key if there is a key.
    """
    turned = rotary_op(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)
    return turned[0] if key is None else turned
