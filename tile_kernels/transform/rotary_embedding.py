"""Rotary position embedding: rotate pairs of channels of every head by an angle that grows with the position.

    c, s = cos_sin_cache[p, i], cos_sin_cache[p, R/2 + i]   p = positions[t] + seqlen_offset, i < R/2
    a'   = fma(a, c, -(b * s))                              float32, one rounding at the end
    b'   = fma(a, s, b * c)

The pair (a, b) is channels (i, R/2 + i), or (2i, 2i + 1) if interleaved. `conjugate` rotates by the negative angle,
which is also the gradient. Channels from R on do not change. One launch processes query and key. Memory bound: the
floor is reading and writing the rotated channels.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.front import replayed
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.transform._samples import BENCH, FULL, PARTIAL, SMOKE, random_heads
from tile_kernels.transform.rotary_embedding_kernels import rotary_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POSITIONS = (torch.int32, torch.int64)


def _check(query: Tensor, cos_sin_cache: Tensor, key: Tensor | None, positions: Tensor | None) -> int:
    """Check the common arguments of all ops; returns the number of rotated channels."""
    check.tensor(query, 'query')
    if query.dim() not in (3, 4):
        check.fail(
            'query', 'must be (tokens, heads, channels) or (batch, tokens, heads, channels)', check.describe(query)
        )
    _, rotary = check.shape(cos_sin_cache, 'cos_sin_cache', 'length rotary', dtype=torch.float32)
    check.contiguous(cos_sin_cache, 'cos_sin_cache')
    if rotary == 0 or rotary % 2:
        check.fail('cos_sin_cache', 'must have an even number of columns, half of them cosines', str(rotary))
    rows = tuple(query.shape[:-2])
    for name, x in (('query', query), ('key', key)):
        if x is None:
            continue
        check.dtype(x, name, DTYPES if name == 'query' else query.dtype)
        if x.dim() != query.dim() or tuple(x.shape[:-2]) != rows:
            extents = ', '.join(str(extent) for extent in rows)
            check.fail(name, f'must be ({extents}, num_heads, channels)', check.describe(x))
        check.at_least(x.shape[-1], rotary, f'channels of {name}')
        check.unit_stride(x, name)
    if positions is not None:
        check.dtype(positions, 'positions', POSITIONS)
        if tuple(positions.shape) != rows:
            check.fail('positions', f'must be {rows}', check.describe(positions))
        check.contiguous(positions, 'positions')
    check.same_device(query=query, cos_sin_cache=cos_sin_cache, key=key, positions=positions)
    return rotary


def rotate(
    query: Tensor,
    key: Tensor | None,
    query_out: Tensor | None,
    key_out: Tensor | None,
    cos_sin_cache: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
) -> None:
    """Launch the kernel; without outputs it writes in place."""
    rotary = _check(query, cos_sin_cache, key, positions)
    in_place = query_out is None
    tail = 0 if in_place else max(x.shape[-1] - rotary for x in (query, key) if x is not None)
    vector = check.vector_bytes(query, key, query_out, key_out) // query.element_size()
    width = math.gcd(vector, 16 // query.element_size(), rotary // 2, tail)
    cache_width = math.gcd(4, width, check.vector_bytes(cos_sin_cache) // 4)
    batched = query.dim() == 4
    num_tokens = query.shape[0] * query.shape[1] if batched else query.shape[0]
    position_dtype = None if positions is None else positions.dtype
    layout = (query.dtype, rotary, width, cache_width, tail, interleaved, batched)
    static = (*layout, position_dtype, key is not None, in_place)
    num_heads = query.shape[-2] + (0 if key is None else key.shape[-2])
    launch(
        rotary_kernel,
        static,
        query,
        key,
        query_out,
        key_out,
        cos_sin_cache,
        positions,
        num_tokens,
        query.shape[-3],
        seqlen_offset,
        -1.0 if conjugate else 1.0,
        size=num_tokens * num_heads,
    )


def _rotated(
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    positions: Tensor | None,
    interleaved: bool,
    conjugate: bool,
    seqlen_offset: int,
) -> tuple[Tensor, Tensor]:
    if key is not None and check.tensor(key, 'key').shape[-1:] != check.tensor(query, 'query').shape[-1:]:
        check.fail('key', 'must have as many channels as query', check.describe(key))
    query_out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shape = (0,) if key is None else key.shape
    key_out = torch.empty(shape, dtype=query.dtype, device=query.device)
    options = (cos_sin_cache, positions, interleaved, conjugate, seqlen_offset)
    rotate(query, key, query_out, None if key is None else key_out, *options)
    return query_out, key_out


@op(outputs='dquery dkey')
def rotary_embedding_bwd(
    drotated_query: Tensor,
    drotated_key: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Gradients of `rotary_embedding`: the gradients of its results, rotated back.

    Args:
        drotated_query: gradient of the first result.
        drotated_key: gradient of the second; empty if there was no key.
        cos_sin_cache: as in the forward pass.
        positions: as in the forward pass.
        interleaved: as in the forward pass.
        conjugate: as in the forward pass.
        seqlen_offset: as in the forward pass.

    Returns:
        Gradients of query and key; the latter empty if there was no key.
    """
    key = None if drotated_key.dim() == 1 else drotated_key
    return _rotated(drotated_query, key, cos_sin_cache, positions, interleaved, not conjugate, seqlen_offset)


@op(outputs='rotated_query rotated_key', backward=rotary_embedding_bwd)
def _rotary_embedding(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Rotate pairs of channels of query and key into new tensors; arguments as for the public function.

    Returns:
        The rotated query and key, contiguous; the latter has shape (0,) without a key.
    """
    return _rotated(query, key, cos_sin_cache, positions, interleaved, conjugate, seqlen_offset)


@_rotary_embedding.public
@replayed
def rotary_embedding(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Apply rotary position embedding to the first R channels of every head; differentiable in query and key.

    Args:
        query: (num_tokens, num_heads, channels) or (batch, num_tokens, num_heads, channels) bfloat16, float16 or
            float32, any strides but the last.
        cos_sin_cache: (length, R) float32, contiguous, R even: cosines and then sines of R / 2 angles per position.
        key: like query, with its own number of heads, or None.
        positions: (num_tokens,) or (batch, num_tokens) int32 or int64; None counts the tokens of each batch from 0.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, R / 2 + i).
        conjugate: rotate by the negative angle.
        seqlen_offset: added to every position. A position outside the cache gives NaN.

    Returns:
        The rotated query, or the pair of query and key if there is a key.
    """
    rotated = rotary_embedding.call(query, cos_sin_cache, key, positions, interleaved, conjugate, seqlen_offset)
    return rotated[0] if key is None else rotated


# Cases --------------------------------------------------------------------------------------


def _make_bwd(**case) -> dict:
    made = random_heads(**case)
    made['drotated_query'], key = made.pop('query').contiguous(), made.pop('key')
    made['drotated_key'] = torch.empty(0, dtype=made['drotated_query'].dtype) if key is None else key.contiguous()
    return made


rotary_embedding.cases(make=random_heads, match='bitwise', smoke=SMOKE + PARTIAL, full=FULL[:8], bench=BENCH[1:5:2])
rotary_embedding_bwd.cases(
    make=_make_bwd, match='bitwise', smoke=[*SMOKE[2:5], PARTIAL[1]], full=FULL[:1], bench=BENCH[1:2]
)
