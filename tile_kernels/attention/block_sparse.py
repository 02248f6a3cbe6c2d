"""Attention of blocks of queries to listed blocks of keys.

    o[i] = sum_j p[i, j] * v[j]          p as in `attend`, over the keys of the blocks that the block of i lists

Every batch, query head and block of queries has a list of its own. A band may hide keys of listed blocks. Compute
bound: the floor is the time of the products of the listed blocks. The kernels are in `block_sparse_kernels`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import (
    HALVES,
    SINKS,
    bound,
    check_band,
    check_dim,
    check_heads,
    check_sink,
    check_vectors,
    refuse,
    table_int32,
    take,
    take_margin,
    window_of,
)
from tile_kernels.attention._samples import SUMS
from tile_kernels.attention.attend_bwd_kernels import attend_delta_kernel, attend_dsink_kernel, key_launches
from tile_kernels.attention.block_sparse_kernels import (
    LOG2E,
    block_sparse_dkv_kernel,
    block_sparse_dq_kernel,
    block_sparse_kernel,
)
from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

SIZES = (64, 128)
#: Thread blocks of the second and third dimension of a grid.
MAX_GRID = 65535


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor,
    sink: Tensor | None,
    block: int,
    left: int,
    right: int,
    softcap: float,
) -> None:
    batch, queries, heads, dim = check.shape(q, 'q', 'batch tokens heads dim', dtype=HALVES)
    _, keys, kv_heads, _ = check.shape(k, 'k', 'batch tokens heads dim', dtype=q.dtype, batch=batch, dim=dim)
    same = dict(batch=batch, tokens=keys, heads=kv_heads)
    value_dim = check.shape(v, 'v', 'batch tokens heads dim', dtype=q.dtype, **same)[3]
    check_dim(dim, 'the last extent of q')
    check_dim(value_dim, 'the last extent of v')
    check_heads(heads, kv_heads)
    check_vectors(q=q, k=k, v=v)
    check_sink(sink, heads, q.dtype)
    check_band(left, right)
    check.one_of(block, SIZES, 'block')
    check.number(softcap, 'softcap')
    check.at_least(softcap, 0.0, 'softcap')
    check.at_most(max(batch, heads), MAX_GRID, 'batch and heads')
    check.at_most(max(queries, keys), (1 << 30), 'the number of tokens')
    lists = dict(batch=batch, heads=heads, blocks=-(-queries // block))
    check.packed(indices, 'indices', 'batch heads blocks listed', torch.int32, **lists)
    check.packed(counts, 'counts', 'batch heads blocks', torch.int32, **lists)
    check.same_device(q=q, k=k, v=v, indices=indices, counts=counts, sink=sink)


def listed_by(indices: Tensor, counts: Tensor, number: int) -> Tensor:
    """Which blocks of queries list a block of keys: (batch, heads, number, blocks) bytes of 0 or 1."""
    place = torch.arange(indices.shape[3], device=indices.device)
    valid = (place < counts.unsqueeze(-1)) & (indices >= 0) & (indices < number)
    lists = torch.zeros(*indices.shape[:3], number + 1, dtype=torch.uint8, device=indices.device)
    lists.scatter_(3, torch.where(valid, indices, number).long(), 1)
    return lists[..., :number].transpose(2, 3).contiguous()


# Ops ----------------------------------------------------------------------------------------


@op(outputs='dq dk dv dsink')
def block_sparse_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    indices: Tensor,
    counts: Tensor,
    sink: Tensor | None = None,
    block: int = 128,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `block_sparse`; equal bits in every run.

    Args:
        do: gradient of o, contiguous.
        q: as in `block_sparse`, as all that is not said here.
        k: as there.
        v: as there.
        o: first result of `block_sparse`.
        lse: second result.
        indices: as there.
        counts: as there.
        sink: as there.
        block: as there.
        scale: as there.
        left: as there.
        right: as there.
        softcap: as there.
        dlse: gradient of lse, contiguous.

    Returns:
        Gradients of q, k, v and sink in their dtypes, contiguous; the last has shape (0,) without a sink.
    """
    _check(q, k, v, indices, counts, sink, block, left, right, softcap)
    batch, queries, heads, dim = q.shape
    value_dim, keys = v.shape[3], k.shape[1]
    rows = dict(batch=batch, tokens=queries, heads=heads)
    for name, x in (('do', do), ('o', o)):
        check.packed(x, name, 'batch tokens heads dim', q.dtype, **rows, dim=value_dim)
        check_vectors(**{name: x})
    for name, stats in (('lse', lse), ('dlse', dlse)):
        check.packed(stats, name, 'batch heads tokens', torch.float32, **rows)
    check.same_device(q=q, do=do, o=o, lse=lse, dlse=dlse)
    idle = q.numel() == 0 or k.numel() == 0 or indices.shape[3] == 0
    new = torch.zeros if idle else torch.empty
    dq, dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsink = torch.empty(0, device=q.device) if sink is None else new(sink.shape, dtype=sink.dtype, device=q.device)
    if idle:
        return dq, dk, dv, dsink
    sink_dtype = None if sink is None else sink.dtype
    both = sink is not None and dlse is not None
    below, delta, *plain = torch.empty(3 if both else 2, q.shape[:-1].numel(), dtype=torch.float32, device=q.device)
    given = (o.view(-1, value_dim), do.view(-1, value_dim), lse, dlse, sink)
    delta_static = (value_dim, q.dtype, sink_dtype, dlse is not None)
    launch(attend_delta_kernel, delta_static, *given, below, delta, plain[0] if both else None)
    if sink is not None:
        own_delta = (plain[0] if both else delta).view(-1, heads)
        launch(attend_dsink_kernel, (sink.dtype,), below.view(-1, heads), own_delta, sink, dsink)
    static: tuple = (dim, value_dim, q.dtype, block, left >= 0 or right >= 0, softcap > 0)
    own_scale = scale / softcap if softcap > 0 else scale * LOG2E
    options = (own_scale, softcap * LOG2E, bound(left), bound(right), scale)
    launch(block_sparse_dq_kernel, static, q, k, v, indices, counts, do, below, delta, dq, *options, size=queries)
    lists = listed_by(indices, counts, -(-keys // block))
    for result in key_launches(dim, value_dim):
        own = (*static, result)
        launch(block_sparse_dkv_kernel, own, q, k, v, lists, do, below, delta, dk, dv, *options, size=keys)
    return dq, dk, dv, dsink


@op(outputs='o lse', backward=block_sparse_bwd)
def block_sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor,
    sink: Tensor | None = None,
    block: int = 128,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention of blocks of queries to listed blocks of keys; see `block_sparse_attn_func`.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16.
        k: (batch, keys, kv_heads, dim).
        v: (batch, keys, kv_heads, value_dim).
        indices: (batch, heads, blocks, listed) int32, rising: the blocks of keys that a block of queries sees.
        counts: (batch, heads, blocks) int32, how many entries of a list count.
        sink: (heads,) logits that join the denominator.
        block: queries and keys of a block, 64 or 128.
        scale: factor of the scores.
        left: keys before the own position that a query sees; -1 is all.
        right: keys behind it.
        softcap: bound of the scores, 0 for none.

    Returns:
        o, contiguous with the dtype of q, and lse (batch, heads, tokens) float32.
    """
    _check(q, k, v, indices, counts, sink, block, left, right, softcap)
    batch, queries, heads, dim = q.shape
    value_dim = v.shape[3]
    o = torch.empty(batch, queries, heads, value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    if k.numel() == 0 or indices.shape[3] == 0:
        return o.zero_(), lse.fill_(-math.inf)
    static: tuple = (dim, value_dim, q.dtype, block, left >= 0 or right >= 0, softcap > 0)
    static += (None if sink is None else sink.dtype,)
    own_scale = scale / softcap if softcap > 0 else scale * LOG2E
    operands = (q, k, v, indices, counts, sink, o, lse)
    options = (own_scale, softcap * LOG2E, bound(left), bound(right))
    launch(block_sparse_kernel, static, *operands, *options, size=queries if q.numel() else 0)
    return o, lse


# Public function ----------------------------------------------------------------------------


def block_sparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of blocks of queries to listed blocks of keys, differentiable in q, k, v and sink.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16; dim is a multiple of 8 up to 256.
        k: (batch, keys, kv_heads, dim); heads is a multiple of kv_heads.
        v: (batch, keys, kv_heads, value_dim).
        indices: (batch, heads, blocks, listed) int32 or int64: the blocks of keys that a block of queries sees, rising.
            Entries outside the keys, such as -1, are none.
        counts: (batch, heads, blocks) int32 or int64: how many entries of a list count.
        block: queries and keys of a block, (64, 64) or (128, 128).
        softmax_scale: factor of the scores, 1 / sqrt(dim) unless given.
        causal: a query sees no key behind its own position; the last query stands at the last key.
        window_size: keys before and behind its own position that a query sees; -1 or None is no bound.
        softcap: bound of the scores, 0 for none.
        sink: (heads,) logits that join the denominator; also `learnable_sink`, `s_aux` and `attn_sink`.
        deterministic: without effect, since all gradients have the same bits in every run.
        return_lse: also return lse; also `return_attn_probs`.
        foreign: arguments of FlashAttention that have no meaning here, at their neutral value.

    Returns:
        o (batch, tokens, heads, value_dim), with `return_lse` also lse (batch, heads, tokens) float32 without the sink.
        A query that sees no key has o = 0 and lse = -inf.
    """
    sink = take(foreign, sink, None, *SINKS)
    return_lse = bool(return_lse or foreign.pop('return_attn_probs', False))
    take_margin(foreign)
    refuse(foreign)
    if not isinstance(block, (tuple, list)) or tuple(block) not in [(size, size) for size in SIZES]:
        check.fail('block', 'must be (64, 64) or (128, 128)', str(block))
    dim = check.shape(q, 'q', 'batch tokens heads dim')[3]
    left, right = window_of(causal, window_size)
    if softmax_scale is not None:
        check.number(softmax_scale, 'softmax_scale')
    lists: Any = table_int32(check.tensor(indices, 'indices'), 'indices')
    number: Any = table_int32(check.tensor(counts, 'counts'), 'counts')
    q, k, v = autocast(q, k, v)
    options: dict[str, Any] = dict(left=left, right=right, softcap=softcap, block=block[0])
    options['scale'] = max(dim, 1) ** -0.5 if softmax_scale is None else softmax_scale
    o, lse = block_sparse(q, k, v, lists, number, sink, **options)
    return (o, lse) if return_lse else o


# Cases --------------------------------------------------------------------------------------


def _make(
    queries: int,
    keys: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    block: int = 64,
    share: float = 0.5,
    band: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: torch.dtype | None = None,
) -> dict:
    """Rising lists of about `share` of all blocks, and blocks that do not exist behind them. The second is hidden."""
    shapes = ((queries, heads[0], dims[0]), (keys, heads[1], dims[0]), (keys, heads[1], dims[1]))
    q, k, v = (torch.randn(batch, *shape).to(dtype) for shape in shapes)
    rows, columns = -(-queries // block), -(-keys // block)
    listed = torch.rand(batch, heads[0], rows, columns) < share
    if columns > 2:
        listed[..., 1] = False
        k[:, block : 2 * block], v[:, block : 2 * block] = math.nan, math.nan
    column = torch.arange(columns, dtype=torch.int32)
    indices = torch.where(listed, column, columns + 1).sort(-1).values
    counts = listed.sum(-1, dtype=torch.int32) + (torch.rand(listed.shape[:3]) < 0.5)
    made = dict(q=q, k=k, v=v, indices=indices.contiguous(), counts=counts.int(), block=block)
    made['sink'] = None if sink is None else torch.randn(heads[0]).to(sink)
    return made | dict(scale=dims[0] ** -0.5, left=band[0], right=band[1], softcap=softcap)


def _products(q: Tensor, v: Tensor, indices: Tensor, block: int, **others: object) -> int:
    """If every list is full."""
    return 2 * q.shape[:3].numel() * indices.shape[3] * block * (q.shape[3] + v.shape[3])


F16, F32 = torch.float16, torch.float32
SMOKE = (
    grid(queries=[0, 5], keys=[0, 70], heads=[(2, 1)], dims=[(64, 64)])
    + grid(queries=[140], keys=[200], heads=[(2, 1)], dims=[(64, 64)], band=[(-1, -1), (-1, 0)], sink=[F32])
    + grid(queries=[70], keys=[150], heads=[(2, 2)], dims=[(72, 40)], dtype=[F16], band=[(30, 9)], softcap=[2.0])
    + grid(queries=[130], keys=[260], heads=[(1, 1)], dims=[(192, 128)], block=[128], batch=[2])
)
FULL = grid(queries=[1000], keys=[3000], heads=[(6, 2)], dims=[(128, 128), (256, 256)], block=[64, 128], band=[(-1, 0)])
BENCH = grid(queries=[8192], keys=[8192], heads=[(32, 8)], dims=[(128, 128)], block=[128], share=[0.25])
block_sparse.cases(make=_make, match=SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=_products)


def _make_bwd(**case: Any) -> dict:
    """Results and their gradient beside the arguments; the results are those of the twin."""
    given = _make(**case)
    shape = (*given['q'].shape[:-1], given['v'].shape[-1])
    small = given['q'].numel() < 1 << 20 and given['k'].numel() < 1 << 20
    if type(given['q']) is Tensor and (small or given['q'].is_cuda):
        o, lse = (block_sparse.twin if small else block_sparse.call)(**given)
    else:  # a dry run
        o = torch.randn(shape).to(given['q'].dtype)
        lse = torch.full((shape[0], shape[2], shape[1]), 8.0)
    return dict(do=torch.randn(shape).to(o.dtype), o=o, lse=lse, **given)


block_sparse_bwd.cases(
    make=_make_bwd,
    match=dict(rtol=2e-2, atol=2e-2),
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
    flops=lambda do, o, lse, **given: 5 * _products(**given) // 2,
)
