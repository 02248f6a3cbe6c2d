"""Scores of the lightning indexer in half precision, with gradients: for training.

    logits[i, j] = sum_h relu(sum_d q[i, h, d] * k[j, d]) * weights[i, h]           start[i] <= j < end[i], else -inf

`mqa_logits_kernels` describes the kernels, which run on every GPU by mma. Compute bound.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import HALVES, check_vectors, dense, lengths_int32
from tile_kernels.attention.fp8_mqa_logits import check_heads_and_dim, padded_rows
from tile_kernels.attention.mqa_logits_kernels import (
    mqa_logits_dk_kernel,
    mqa_logits_dq_kernel,
    mqa_logits_half_kernel,
)
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op


def _check(q: Tensor, k: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> tuple[int, int]:
    tokens, heads, dim = check.shape(q, 'q', 'tokens heads dim', dtype=HALVES)
    check_heads_and_dim(heads, dim)
    keys, _ = check.shape(k, 'k', 'keys dim', dtype=q.dtype, dim=dim)
    check.packed(weights, 'weights', 'tokens heads', torch.float32, tokens=tokens, heads=heads)
    check.packed(start, 'start', 'tokens', torch.int32, tokens=tokens)
    check.packed(end, 'end', 'tokens', torch.int32, tokens=tokens)
    check.contiguous(q, 'q')
    check.contiguous(k, 'k')
    check_vectors(q=q, k=k)
    check.same_device(q=q, k=k, weights=weights, start=start, end=end)
    return tokens, keys


# Ops ----------------------------------------------------------------------------------------


@op(outputs='dq dk dweights')
def mqa_logits_bwd(
    dlogits: Tensor, q: Tensor, k: Tensor, weights: Tensor, start: Tensor, end: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `mqa_logits`; equal bits in every run.

    Args:
        dlogits: (tokens, keys) float32 with dense rows; what lies outside the bounds is ignored.
        q: as in `mqa_logits`, as all that follows.
        k: as there.
        weights: as there.
        start: as there.
        end: as there.

    Returns:
        Gradients of q, k and weights.
    """
    tokens, keys = _check(q, k, weights, start, end)
    check.shape(dlogits, 'dlogits', 'tokens keys', dtype=torch.float32, tokens=tokens, keys=keys)
    check.unit_stride(dlogits, 'dlogits')
    check.same_device(q=q, dlogits=dlogits)
    heads, dim = q.shape[1:]
    new = torch.zeros if q.numel() == 0 or k.numel() == 0 else torch.empty
    dq, dk, dweights = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, weights))
    operands = (q.view(-1, dim), k, weights.view(-1), start, end, dlogits)
    size = 0 if new is torch.zeros else tokens
    launch(mqa_logits_dq_kernel, (heads, dim, q.dtype), *operands, dq.view(-1, dim), dweights.view(-1), size=size)
    launch(mqa_logits_dk_kernel, (heads, dim, q.dtype), *operands, dk, size=size)
    return dq, dk, dweights


@op(outputs='logits', backward=mqa_logits_bwd)
def _mqa_logits(q: Tensor, k: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """See `mqa_logits`."""
    tokens, keys = _check(q, k, weights, start, end)
    heads, dim = q.shape[1:]
    logits = padded_rows(tokens, keys, q.device)
    launch(
        mqa_logits_half_kernel,
        (heads, dim, q.dtype),
        q.view(tokens * heads, dim),
        k,
        weights.view(tokens * heads),
        start,
        end,
        logits,
        size=tokens if keys else 0,
    )
    return logits


@_mqa_logits.public
@check.names(start='cu_seq_len_k_start', end='cu_seq_len_k_end')
def mqa_logits(q: Tensor, k: Tensor, weights: Tensor, cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor) -> Tensor:
    """Scores of all keys for every query, summed over heads; differentiable in q, k and weights.

    Args:
        q: (tokens, heads, dim) bfloat16 or float16; heads is a multiple of 8 up to 64, dim is 32, 64 or 128. Slices
            with gaps are copied, also of k and weights.
        k: (keys, dim).
        weights: (tokens, heads) float32.
        cu_seq_len_k_start: (tokens,) int32 or int64, the first key that a query sees.
        cu_seq_len_k_end: the same, the key behind the last one; both are clamped to [0, keys].

    Returns:
        (tokens, keys) float32, -inf outside the bounds; its rows are a multiple of 16 bytes apart.
    """
    start = lengths_int32(cu_seq_len_k_start, 'cu_seq_len_k_start')
    end = lengths_int32(cu_seq_len_k_end, 'cu_seq_len_k_end')
    return mqa_logits.call(dense(q, 'q'), dense(k, 'k'), dense(weights, 'weights'), start, end)


# Cases --------------------------------------------------------------------------------------


def _make(tokens: int, keys: int, heads: int = 64, dim: int = 128, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Random bounds, some of them empty or beyond the keys."""
    start = torch.randint(-3, max(keys - 2, 1), (tokens,), dtype=torch.int32)
    end = start + torch.randint(-2, keys + 3, (tokens,), dtype=torch.int32)
    return dict(
        q=torch.randn(tokens, heads, dim).to(dtype),
        k=torch.randn(keys, dim).to(dtype),
        weights=torch.randn(tokens, heads) / (heads * dim) ** 0.5,
        start=start,
        end=end,
    )


def _make_bwd(**case: Any) -> dict:
    given = _make(**case)
    column = torch.arange(given['k'].shape[0])
    seen = (column >= given['start'][:, None]) & (column < given['end'][:, None])
    dlogits = torch.randn(given['q'].shape[0], given['k'].shape[0])
    return dict(dlogits=dlogits.masked_fill(~seen, float('nan')), **given)


def _flops(q: Tensor, k: Tensor, **others: object) -> int:
    return 2 * q.numel() * k.shape[0]


SMOKE = (
    grid(tokens=[0, 3], keys=[0, 2, 70], heads=[64], dim=[32])
    + grid(tokens=[9], keys=[70], heads=[24], dim=[64], dtype=[torch.float16])
    + grid(tokens=[17], keys=[65], heads=[8], dim=[128])
)
FULL = grid(tokens=[1, 501], keys=[1, 1000], heads=[8, 24, 40, 64], dim=[32, 64, 128])
BENCH = grid(tokens=[4096], keys=[4096], heads=[64], dim=[128])
mqa_logits.cases(make=_make, match=dict(rtol=2e-3, atol=2e-3), smoke=SMOKE, full=FULL, bench=BENCH, flops=_flops)
mqa_logits_bwd.cases(
    make=_make_bwd,
    match=dict(rtol=2e-2, atol=2e-2),
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
    flops=lambda dlogits, **given: 4 * _flops(**given),
)
