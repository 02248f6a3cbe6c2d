"""Rotary position embedding: turn pairs of channels of every head by an angle that grows with the position.

    c, s = cos_sin_cache[p, i], cos_sin_cache[p, R/2 + i]   p = positions[t] + seqlen_offset, i < R/2
    a'   = fma(a, c, -(b * s))                              float32, one rounding at the end
    b'   = fma(a, s, b * c)

The pair (a, b) is channels (i, R/2 + i), or (2i, 2i + 1) if interleaved; `conjugate` turns the other way, which is also
the gradient. Channels from R on stay as they are. Query and key go in one launch. Memory bound: the floor is reading
and writing the channels that are turned.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.transform.rotary_kernels import rotary_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
POSITIONS = (torch.int32, torch.int64)

# Ops ----------------------------------------------------------------------------------------


def _check(query: Tensor, cos_sin_cache: Tensor, key: Tensor | None, positions: Tensor | None) -> int:
    """Check what all ops share; returns the number of channels that are turned."""
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


def _turn(
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
    """Launch the kernel; without outputs it works in place."""
    rotary = _check(query, cos_sin_cache, key, positions)
    in_place = query_out is None
    tail = 0 if in_place else max(x.shape[-1] - rotary for x in (query, key) if x is not None)
    vector = check.vector_bytes(query, key, query_out, key_out) // query.element_size()
    width = math.gcd(vector, 16 // query.element_size(), rotary // 2, tail)
    cache_width = math.gcd(4, width, check.vector_bytes(cos_sin_cache) // 4)
    batched = query.dim() == 4
    num_tokens = query.shape[0] * query.shape[1] if batched else query.shape[0]
    static = (query.dtype, rotary, width, cache_width, tail, interleaved, batched)
    static += (None if positions is None else positions.dtype, key is not None, in_place)
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


@op()
def apply_rotary_(
    query: Mut,
    cos_sin_cache: Tensor,
    key: Mut | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> None:
    """Turn the first channels of every head of `query` and `key` in place.

    Args:
        query: (num_tokens, num_heads, channels) or (batch, num_tokens, num_heads, channels) bfloat16, float16 or
            float32, any strides but the last; its first R channels are turned, the others not touched.
        cos_sin_cache: (length, R) float32, contiguous: cosines and then sines of R / 2 angles for every position.
        key: like query, with its own number of heads and channels, or None.
        positions: (num_tokens,) or (batch, num_tokens) int32 or int64; None counts the tokens of each batch from 0.
        interleaved: pairs are neighbouring channels, not channels R / 2 apart.
        conjugate: turn the other way.
        seqlen_offset: added to every position.

    A position outside of the cache turns a head into NaN.
    """
    _turn(query, key, None, None, cos_sin_cache, positions, interleaved, conjugate, seqlen_offset)


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
    _turn(query, key, query_out, None if key is None else key_out, *options)
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
    """Gradients of `rotary_embedding`: the gradients of its results, turned back.

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
def rotary_embedding(
    query: Tensor,
    cos_sin_cache: Tensor,
    key: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Turn the first channels of every head of `query` and `key`; arguments as of `apply_rotary_`.

    Args:
        query: (num_tokens, num_heads, channels) or (batch, num_tokens, num_heads, channels).
        cos_sin_cache: (length, R) float32; not differentiable.
        key: like query, with its own number of heads, or None.
        positions: (num_tokens,) or (batch, num_tokens) int32 or int64, or None.
        interleaved: pairs are neighbouring channels.
        conjugate: turn the other way.
        seqlen_offset: added to every position.

    Returns:
        The turned query and key, contiguous; the latter has shape (0,) without a key.
    """
    return _rotated(query, key, cos_sin_cache, positions, interleaved, conjugate, seqlen_offset)


# Cases --------------------------------------------------------------------------------------


def _heads(rows: tuple, num_heads: int, channels: int, pitch: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*rows, num_heads, pitch or channels).to(dtype)[..., :channels]


def _make(
    rows: tuple,
    num_heads: int,
    rotary: int,
    dtype: torch.dtype,
    key_heads: int = 0,
    channels: int = 0,
    pitch: int = 0,
    positions: torch.dtype | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> dict:
    length = rows[-1] + 5
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    channels = channels or rotary
    return dict(
        query=_heads(rows, num_heads, channels, pitch, dtype),
        cos_sin_cache=torch.cat((angle.cos(), angle.sin()), dim=1),
        key=_heads(rows, key_heads, channels, pitch, dtype) if key_heads else None,
        positions=None if positions is None else torch.randint(0, length - seqlen_offset, rows).to(positions),
        interleaved=interleaved,
        conjugate=conjugate,
        seqlen_offset=seqlen_offset,
    )


def _make_bwd(**case) -> dict:
    made = _make(**case)
    made['drotated_query'], key = made.pop('query').contiguous(), made.pop('key')
    made['drotated_key'] = torch.empty(0, dtype=made['drotated_query'].dtype) if key is None else key.contiguous()
    return made


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
INT = [torch.int32, torch.int64]
SMOKE = (
    grid(rows=[(0,), (1,), (7,)], num_heads=[3], rotary=[64], dtype=BF16)
    + grid(rows=[(5,)], num_heads=[5], rotary=[64], dtype=BF16, key_heads=[1], interleaved=[False, True], positions=INT)
    + grid(rows=[(2, 3)], num_heads=[2], rotary=[32], dtype=F32, key_heads=[2], positions=INT[:1], conjugate=[True])
    + grid(rows=[(3,)], num_heads=[2], rotary=[18], dtype=F16, key_heads=[1], interleaved=[True], seqlen_offset=[2])
    + grid(rows=[(2, 3)], num_heads=[1], rotary=[6], dtype=BF16, pitch=[11], seqlen_offset=[2])
)
PARTIAL = (
    grid(rows=[(4,)], num_heads=[3], rotary=[32], dtype=BF16, key_heads=[1], channels=[48])
    + grid(rows=[(2, 2)], num_heads=[2], rotary=[16], dtype=F16, channels=[25], interleaved=[True])
    + grid(rows=[(3,)], num_heads=[2], rotary=[32], dtype=BF16, channels=[40], pitch=[56])
)
FULL = (
    grid(rows=[(4001,)], num_heads=[1, 5, 128], rotary=[64, 128], dtype=BF16, key_heads=[1], positions=INT[1:])
    + grid(rows=[(3, 517)], num_heads=[32], rotary=[64, 66], dtype=F32, interleaved=[True], pitch=[192])
    + grid(rows=[(70001,)], num_heads=[256], rotary=[128], dtype=BF16)  # more than 2^31 elements
)
BENCH = (
    grid(
        rows=[(64,), (4096,), (16384,)], num_heads=[128], rotary=[64], dtype=BF16, key_heads=[1], positions=INT[1:]
    )  # as in latent attention
    + grid(rows=[(4, 2048)], num_heads=[32], rotary=[128], dtype=BF16, key_heads=[8], interleaved=[False, True])
    + grid(rows=[(4001,)], num_heads=[128], rotary=[64], dtype=BF16, key_heads=[1], pitch=[192], positions=INT[1:])
    + grid(rows=[(8001,)], num_heads=[24], rotary=[96], dtype=F32, key_heads=[24])
)
apply_rotary_.cases(make=_make, match='bitwise', smoke=SMOKE + PARTIAL, full=FULL, bench=BENCH)
rotary_embedding.cases(make=_make, match='bitwise', smoke=SMOKE + PARTIAL, full=FULL[:8], bench=BENCH[1:5:2])
rotary_embedding_bwd.cases(
    make=_make_bwd, match='bitwise', smoke=[*SMOKE[2:5], PARTIAL[1]], full=FULL[:1], bench=BENCH[1:2]
)
