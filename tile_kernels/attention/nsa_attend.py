"""Attention of every token to a list of key blocks, which all query heads of a kv head share: NSA's selected branch.

    p[i, j] = exp(scale * sum_d q[i, d] * k[j, d]) / sum_j ...           over the keys of the listed blocks, j <= i
    o[i, d] = sum_j p[i, j] * v[j, d]

Block n are the keys from n * block_size on of the own sequence. Entries below 0 and blocks behind the token are none,
and a block that is listed twice counts twice. The kernels are in `nsa_attend_kernels`. Every token reads its blocks,
mostly from the L2 cache. With 16 query heads per kv head this takes longer than the products.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import HALVES, check_dim, check_heads, check_vectors
from tile_kernels.attention._samples import SUMS
from tile_kernels.attention.nsa_attend_kernels import (
    LOG2E,
    key_launches,
    nsa_attend_dkv_kernel,
    nsa_attend_dq_kernel,
    nsa_attend_kernel,
    num_rows,
)
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

MAX_GROUP = 64
SIZES = (16, 32, 64, 128)


def check_tokens(q: Tensor, k: Tensor, v: Tensor, block_size: int, cu_seqlens: Tensor | None) -> int:
    """Check operands of NSA; returns the number of sequences."""
    batch, tokens, q_heads, dim = check.shape(q, 'q', 'batch tokens heads dim', dtype=HALVES)
    kv_heads = check.shape(k, 'k', 'batch tokens heads dim', dtype=q.dtype, batch=batch, tokens=tokens, dim=dim)[2]
    same = dict(batch=batch, tokens=tokens, heads=kv_heads)
    value_dim = check.shape(v, 'v', 'batch tokens heads dim', dtype=q.dtype, **same)[3]
    check_dim(dim, 'the last extent of q')
    check_dim(value_dim, 'the last extent of v')
    check_heads(q_heads, kv_heads)
    check.at_most(q_heads // kv_heads, MAX_GROUP, 'query heads of a kv head')
    check.one_of(block_size, SIZES, 'block_size')
    check.at_most(batch * tokens, (1 << 31) - (1 << 17), 'the number of tokens')
    check.packed(cu_seqlens, 'cu_seqlens', 'sequences+1', torch.int32)
    if cu_seqlens is None:
        return batch
    check.equal(batch, 1, 'the batch of packed sequences')
    check.at_least(cu_seqlens.shape[0], 1, 'the extent of cu_seqlens')
    return cu_seqlens.shape[0] - 1


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_counts: Tensor | None,
    cu_seqlens: Tensor | None,
    block_size: int,
) -> int:
    number = check_tokens(q, k, v, block_size, cu_seqlens)
    check_vectors(q=q, k=k, v=v)
    batch, tokens, heads = k.shape[:3]
    same = dict(batch=batch, tokens=tokens, heads=heads)
    check.packed(block_indices, 'block_indices', 'batch tokens heads listed', torch.int32, **same)
    check.packed(block_counts, 'block_counts', 'batch tokens heads', torch.int32, **same)
    lists = dict(block_indices=block_indices, block_counts=block_counts, cu_seqlens=cu_seqlens)
    check.same_device(q=q, k=k, v=v, **lists)
    return number


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 0


def listed_tokens(
    block_indices: Tensor, block_counts: Tensor | None, cu_seqlens: Tensor | None, size: int
) -> tuple[Tensor, Tensor, int]:
    """The transposed lists: tokens sorted by the block they list, where those of a block start, and how many blocks.

    Equal blocks keep the order of tokens. Entries that are none come last.
    """
    batch, tokens, heads, listed = block_indices.shape
    device = block_indices.device
    token = torch.arange(tokens, device=device)
    if cu_seqlens is None:
        blocks = batch * -(-tokens // size)
        base = torch.arange(batch, device=device)[:, None] * -(-tokens // size)
        position = token[None]
    else:
        number = cu_seqlens.shape[0] - 1
        blocks = tokens // size + number + 1
        sequence = torch.searchsorted(cu_seqlens, token.to(torch.int32), right=True) - 1
        start = cu_seqlens[sequence]
        base = (start // size + sequence)[None]
        position = torch.where(sequence < number, token - start, -1)[None]
    index = block_indices.long()
    valid = (index >= 0) & (index * size <= position[:, :, None, None])
    if block_counts is not None:
        valid = valid & (torch.arange(listed, device=device) < block_counts[..., None])
    head = torch.arange(heads, device=device)[:, None]
    entry = torch.where(valid, (base[:, :, None, None] + index) * heads + head, blocks * heads).flatten()
    entry, order = torch.sort(entry, stable=True)
    first = torch.searchsorted(entry, torch.arange(blocks * heads + 1, device=device))
    return (order // (heads * max(listed, 1))).int(), first.int(), blocks


# Ops ----------------------------------------------------------------------------------------


@op(outputs='dq dk dv')
def nsa_attend_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    block_indices: Tensor,
    block_counts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_size: int = 64,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `nsa_attend`; equal bits in every run.

    Args:
        do: gradient of o, contiguous.
        q: as in `nsa_attend`, as all that is not said here.
        k: as there.
        v: as there.
        o: first result of `nsa_attend`.
        lse: second result.
        block_indices: as there.
        block_counts: as there.
        cu_seqlens: as there.
        block_size: as there.
        scale: as there.

    Returns:
        Gradients of q, k and v, contiguous.
    """
    number = _check(q, k, v, block_indices, block_counts, cu_seqlens, block_size)
    batch, tokens, q_heads, dim = q.shape
    value_dim = v.shape[3]
    shape = (*q.shape[:-1], value_dim)
    for name, x in (('do', do), ('o', o)):
        check.dtype(x, name, q.dtype)
        if tuple(x.shape) != shape:
            check.fail(name, f'must be {shape}', check.describe(x))
        check.contiguous(x, name)
        check_vectors(**{name: x})
    check.packed(lse, 'lse', 'batch heads tokens', torch.float32, batch=batch, heads=q_heads, tokens=tokens)
    check.same_device(q=q, do=do, o=o, lse=lse)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if q.numel() == 0:
        return dq, dk.zero_(), dv.zero_()
    below, delta = torch.empty(2, batch, tokens, q_heads, dtype=torch.float32, device=q.device)
    tile, packed = num_rows(q_heads // k.shape[2]), cu_seqlens is not None
    static = (dim, value_dim, q.dtype, block_size)
    lists = (block_indices, block_counts, cu_seqlens)
    options = (number, _bits(number), scale * LOG2E, scale)
    launch(
        nsa_attend_dq_kernel,
        (*static, tile, packed, block_counts is not None),
        q,
        k,
        v,
        *lists,
        o,
        do,
        lse,
        below,
        delta,
        dq,
        *options,
        size=batch * tokens,
    )
    listed, first, blocks = listed_tokens(block_indices, block_counts, cu_seqlens, block_size)
    for result in key_launches(dim, value_dim):
        launch(
            nsa_attend_dkv_kernel,
            (*static, packed, result),
            q,
            k,
            v,
            do,
            below,
            delta,
            listed,
            first,
            cu_seqlens,
            dk,
            dv,
            blocks,
            *options,
            size=blocks,
        )
    return dq, dk, dv


@op(outputs='o lse', backward=nsa_attend_bwd)
def nsa_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    block_indices: Tensor,
    block_counts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    block_size: int = 64,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Attention of every token to listed blocks of keys up to itself; see `parallel_nsa`.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16; dim is a multiple of 8 up to 256. The last dimension is
            dense, base and other strides are multiples of 16 bytes.
        k: (batch, tokens, kv_heads, dim); heads is a multiple of kv_heads, up to 64 times as many.
        v: (batch, tokens, kv_heads, value_dim).
        block_indices: (batch, tokens, kv_heads, listed) int32, blocks of the own sequence; -1 is none.
        block_counts: (batch, tokens, kv_heads) int32, how many entries of a list count; all unless given.
        cu_seqlens: (sequences + 1,) int32, where packed sequences start, and the end of the last; batch is then 1.
        block_size: keys of a block: 16, 32, 64 or 128.
        scale: factor of the scores.

    Returns:
        o (batch, tokens, heads, value_dim) of the dtype of q, and lse (batch, heads, tokens) float32. A token that
        sees no key has o = 0 and lse = -inf.
    """
    number = _check(q, k, v, block_indices, block_counts, cu_seqlens, block_size)
    batch, tokens, q_heads, dim = q.shape
    o = torch.empty(*q.shape[:-1], v.shape[3], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, q_heads, tokens, dtype=torch.float32, device=q.device)
    tile = num_rows(q_heads // k.shape[2])
    launch(
        nsa_attend_kernel,
        (dim, v.shape[3], q.dtype, block_size, tile, cu_seqlens is not None, block_counts is not None),
        q,
        k,
        v,
        block_indices,
        block_counts,
        cu_seqlens,
        o,
        lse,
        number,
        _bits(number),
        scale * LOG2E,
        size=batch * tokens,
    )
    return o, lse


# Cases --------------------------------------------------------------------------------------


def random_lists(
    tokens: Any,
    heads: tuple[int, int],
    dims: tuple[int, int] = (64, 64),
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    block_size: int = 16,
    listed: int = 3,
    counted: bool = False,
    behind: int = 0,
    hidden: bool = False,
) -> dict:
    """Arguments of `nsa_attend`; `tokens` are the lengths of packed sequences if it is a tuple.

    Lists have -1, blocks behind the token and blocks that are listed twice. `behind` tokens follow the last sequence;
    they hold NaN. With `hidden` so do all tokens of block 1, which no list has.
    """
    packed = isinstance(tokens, tuple)
    number = sum(tokens) + behind if packed else tokens
    shapes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    q, k, v = (torch.randn(batch, number, h, d).to(dtype) for h, d in shapes)
    longest = max(tokens, default=0) if packed else tokens
    blocks = -(-longest // block_size)
    indices = torch.randint(-1, max(blocks, 1) + 1, (batch, number, heads[1], listed), dtype=torch.int32)
    if hidden:
        indices = indices.masked_fill(indices == 1, 0)
        k[:, block_size : 2 * block_size], v[:, block_size : 2 * block_size] = math.nan, math.nan
    made: dict[str, Any] = dict(q=q, k=k, v=v, block_indices=indices, block_size=block_size, scale=dims[0] ** -0.5)
    if counted:
        made['block_counts'] = torch.randint(-1, listed + 2, (batch, number, heads[1]), dtype=torch.int32)
    if packed:
        made['cu_seqlens'] = torch.tensor([0, *tokens]).cumsum(0).int()
        if behind:
            for x in (q, k, v):
                x[:, -behind:] = math.nan
    return made


def _products(q: Tensor, v: Tensor, block_indices: Tensor, block_size: int, **others: object) -> int:
    return 2 * q.shape[:-1].numel() * block_indices.shape[3] * block_size * (q.shape[3] + v.shape[3])


F16 = torch.float16
SMOKE = (
    grid(tokens=[0, 1, 37], heads=[(4, 2)], dims=[(32, 32)], counted=[True], hidden=[False])
    + grid(tokens=[33], heads=[(17, 1)], dims=[(40, 24)], dtype=[F16], batch=[2], hidden=[True])
    + grid(tokens=[(0, 20, 0, 33, 1)], heads=[(6, 2)], dims=[(32, 32)], behind=[2], counted=[False, True])
    + grid(tokens=[9], heads=[(40, 1)], block_size=[64], dims=[(192, 128)], listed=[2])
    + grid(tokens=[70], heads=[(1, 1)], dims=[(32, 32)], block_size=[64], listed=[2])
    + grid(tokens=[132], heads=[(1, 1)], dims=[(32, 32)], block_size=[128], listed=[1])
)
FULL = grid(tokens=[1, 700], heads=[(3, 3), (64, 1)], batch=[2], block_size=[16, 32, 64, 128], listed=[16]) + grid(
    tokens=[tuple(range(1, 120))], heads=[(16, 1)], dims=[(128, 128), (256, 256)], block_size=[64]
)
BENCH = grid(tokens=[32768], heads=[(64, 4)], dims=[(128, 128)], block_size=[64], listed=[16]) + grid(
    tokens=[8001], heads=[(24, 8)], dims=[(128, 128)], block_size=[64], listed=[16]
)
nsa_attend.cases(make=random_lists, match=SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=_products)


def _make_bwd(**case: Any) -> dict:
    """Results and their gradient beside the arguments; the results are those of the twin."""
    given = random_lists(**case)
    shape = (*given['q'].shape[:-1], given['v'].shape[-1])
    small = given['q'].numel() < 1 << 20
    if type(given['q']) is Tensor and (small or given['q'].is_cuda):
        o, lse = (nsa_attend.twin if small else nsa_attend.call)(**given)
    else:  # a dry run
        o = torch.randn(shape).to(given['q'].dtype)
        lse = torch.full((shape[0], shape[2], shape[1]), 8.0)
    return dict(do=torch.randn(shape).to(o.dtype), o=o, lse=lse, **given)


nsa_attend_bwd.cases(
    make=_make_bwd,
    match=dict(rtol=2e-2, atol=2e-2),
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
    flops=lambda do, o, lse, **given: 5 * _products(**given) // 2,
)
