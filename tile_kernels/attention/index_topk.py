"""Scores of the lightning indexer and the k best keys of every query, without the matrix of all scores in memory.

The formulas are those of `fp8_mqa_logits` and `topk_indices`. Both run for some queries after the other, so many that
their scores take 128 MiB at most. Compute bound, as the scores are.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import dense, lengths_int32
from tile_kernels.attention.fp8_mqa_logits import check_operands, score
from tile_kernels.attention.topk_indices import MAX_COLUMNS, MAX_K, select
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.op import op

#: Scores that are in memory at a time, at most.
SCORES_BYTES = 128 << 20


def chunk_rows(rows: Any, columns: Any) -> Any:
    """Queries whose scores are in memory at a time."""
    if not isinstance(rows, int) or not isinstance(columns, int):
        return rows  # fake tensors: nothing is launched
    return max(1, min(rows, SCORES_BYTES // (4 * max(columns, 1))))


# Op -----------------------------------------------------------------------------------------


@op(outputs='indices')
def _index_topk(q: Tensor, kv: Tensor, sf: Tensor, weights: Tensor, start: Tensor, end: Tensor, k: int) -> Tensor:
    """See `index_topk`; `sf` are the factors of the keys."""
    rows, columns = check_operands(q, kv, sf, weights, start, end)
    check.at_most(columns, MAX_COLUMNS, 'the keys of kv')
    check.at_least(k, 0, 'k')
    check.at_most(k, MAX_K, 'k')
    step = chunk_rows(rows, columns)
    if not isinstance(rows, int) or step == rows:
        return select(score(q, kv, sf, weights, start, end, False), k, start, end, False)[0]
    indices = torch.empty((rows, k), dtype=torch.int32, device=q.device)
    for first in range(0, rows, step):
        own = slice(first, first + step)
        bounds = start[own], end[own]
        indices[own] = select(score(q[own], kv, sf, weights[own], *bounds, False), k, *bounds, False)[0]
    return indices


@_index_topk.public
def index_topk(q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, start: Tensor, end: Tensor, k: int) -> Tensor:
    """The k keys of largest score of every query: `topk_indices` of `fp8_mqa_logits`. There is no gradient.

    Args:
        q: (tokens, heads, dim) float8_e4m3fn; heads is a multiple of 8 up to 64, dim is 32, 64 or 128. Slices with gaps
            are copied, also of keys and weights.
        kv: keys (keys, dim) float8_e4m3fn and their factors (keys,) float32.
        weights: (tokens, heads) float32, with the factors of q.
        start: (tokens,) int32 or int64, the first key that a query sees.
        end: the same, the key behind the last one; both are clamped to [0, keys].
        k: how many, up to 4096.

    Returns:
        (tokens, k) int32, keys relative to `start`, in rising order; -1 follows them if a query sees fewer.
    """
    keys, sf = check.pair(kv, 'kv', 'codes, factors')
    check.integer(k, 'k', least=0)
    starts: Any = lengths_int32(check.tensor(start, 'start'), 'start')
    ends: Any = lengths_int32(check.tensor(end, 'end'), 'end')
    rows = dense(q, 'q'), dense(keys, 'kv[0]'), sf, dense(weights, 'weights')
    return index_topk.call(*rows, starts, ends, k)


# Cases --------------------------------------------------------------------------------------


def _make(tokens: int, keys: int, k: int, heads: int = 8, dim: int = 32) -> dict:
    """Whole numbers, so that scores and their order are exact; random bounds, some of them empty."""
    q, kv = (torch.randint(-2, 3, shape).float() for shape in ((tokens, heads, dim), (keys, dim)))
    start = torch.randint(-3, max(keys - 2, 1), (tokens,), dtype=torch.int32)
    return dict(
        q=q.to(torch.float8_e4m3fn),
        kv=kv.to(torch.float8_e4m3fn),
        sf=2.0 ** torch.randint(-2, 3, (keys,)).float(),
        weights=torch.randint(-2, 3, (tokens, heads)).float(),
        start=start,
        end=start + torch.randint(-2, keys + 3, (tokens,), dtype=torch.int32),
        k=k,
    )


index_topk.cases(
    make=_make,
    match='bitwise',
    smoke=grid(tokens=[0, 3], keys=[0, 70], k=[5]) + grid(tokens=[5], keys=[200], k=[33], heads=[24], dim=[64]),
    full=grid(tokens=[300], keys=[8191], k=[2048], heads=[64], dim=[128])
    + grid(tokens=[5], keys=[1 << 20], k=[64], heads=[8], dim=[128]),
    bench=grid(tokens=[4096], keys=[8192, 65536], k=[2048], heads=[64], dim=[128]),
    flops=lambda q, kv, **_: 2 * q.numel() * kv.shape[0],
)
