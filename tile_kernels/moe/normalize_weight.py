"""Normalize weights: divide the chosen weights of a token by their sum.

    denominator[t]   = 1e-20 + w[t, 0] + w[t, 1] + ...      added up in this order
    normalized[t, k] = w[t, k] / denominator[t]

A block reads a tile of rows into shared memory, so that global memory sees whole sectors for any num_topk. One thread
adds up each row. With `direct` a thread reads and writes its row, without shared memory.
The gradient is dw[t, k] = (dn[t, k] - sum_j dn[t, j] n[t, j]) / denominator[t] + ddenominator[t]. Memory bound: the
floor is reading the weights and writing the result.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, T, begin_early, is_short, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

MAX_TOPK = 4096
EPSILON = 1e-20

#: Weights of a row that a thread may keep in registers.
MAX_DIRECT = 16

# Config -------------------------------------------------------------------------------------


def choose(num_topk: int, width: int, num_tokens: int) -> dict:
    """Small tiles: many blocks hide the latency of their few loads. The direct form has no second round of latency."""
    early = is_short(num_tokens * num_topk * 8)
    if early and num_tokens >= 64:
        return dict(num_threads=32, direct=True, early=True)
    return dict(num_threads=128, direct=False, early=early)


def choose_bwd(num_topk: int, num_tokens: int) -> dict:
    """Small tiles, as for the op."""
    return dict(num_threads=128)


# Kernels ------------------------------------------------------------------------------------


def _rows(num_topk: int, num_threads: int) -> int:
    """Rows of a tile: at most one row and about eight slots per thread."""
    return max(1, min(num_threads, num_threads * 8 // num_topk))


@macro
def load_tile(x, first, left, num_threads, tile_shared):
    """Read `left` elements of the rows from `first` on into shared memory; the odd pitch avoids bank conflicts."""
    num_topk = x.shape[1]
    rows = tile_shared.shape[0]
    for i in T.unroll(T.ceildiv(rows * num_topk, num_threads), unroll_factor=8):
        item = i * num_threads + T.get_thread_binding()
        if item < left:
            tile_shared[item // num_topk, item % num_topk] = x[first + item // num_topk, item % num_topk]


@macro
def normalize_tile(x, first, num_threads, denominator, normalized):
    """The rows from `first` on, through shared memory."""
    num_tokens, num_topk = x.shape
    rows = _rows(num_topk, num_threads)
    tile_shared = T.alloc_shared((rows, num_topk | 1), T.float32)
    sum_shared = T.alloc_shared((rows,), T.float32)
    total = T.alloc_var(T.float32)
    tx = T.get_thread_binding()
    left = T.min(num_tokens - first, rows) * num_topk

    load_tile(x, first, left, num_threads, tile_shared)
    T.sync_threads()
    if tx < rows and tx * num_topk < left:
        total = T.float32(EPSILON)
        for k in T.unroll(num_topk, unroll_factor=16):
            total += tile_shared[tx, k]
        sum_shared[tx] = total
        denominator[first + tx] = total
    T.sync_threads()
    for i in T.unroll(T.ceildiv(rows * num_topk, num_threads), unroll_factor=8):
        row, k = (i * num_threads + tx) // num_topk, (i * num_threads + tx) % num_topk
        if i * num_threads + tx < left:
            normalized[first + row, k] = T.ieee_fdiv(tile_shared[row, k], sum_shared[row])


@macro
def normalize_row(x, row, width, denominator, normalized):
    """One row by one thread, from registers."""
    num_topk = x.shape[1]
    row_local = T.alloc_local((num_topk,), T.float32)
    total = T.alloc_var(T.float32, init=EPSILON)
    for i in T.unroll(num_topk // width):
        for e in T.vectorized(width):
            row_local[i * width + e] = x[row, i * width + e]
    for k in T.unroll(num_topk):
        total += row_local[k]
    denominator[row] = total
    for k in T.unroll(num_topk):
        row_local[k] = T.ieee_fdiv(row_local[k], total)
    for i in T.unroll(num_topk // width):
        for e in T.vectorized(width):
            normalized[row, i * width + e] = row_local[i * width + e]


@kernel(
    choose=choose,
    space=dict(num_threads=(32, 64, 128, 256), direct=(False, True), early=EARLY),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def normalize_weight_kernel(num_topk: int, width: int, *, num_threads: int, direct: bool = False, early: bool = False):
    """Rows of `num_topk` weights, `width` in an access. Rows of more than 16 are never direct."""
    direct = direct and num_topk <= MAX_DIRECT
    rows = num_threads if direct else _rows(num_topk, num_threads)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def normalize_weight(
        topk_weights: T.Tensor((num_tokens, num_topk), T.float32),
        denominator: T.Tensor((num_tokens,), T.float32),
        normalized: T.Tensor((num_tokens, num_topk), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=num_threads) as pid:
            if early:
                begin_early()
            tx = T.get_thread_binding()
            if direct:
                if pid * rows + tx < num_tokens:
                    normalize_row(topk_weights, pid * rows + tx, width, denominator, normalized)
            else:
                normalize_tile(topk_weights, pid * rows, num_threads, denominator, normalized)

    return normalize_weight


@kernel(choose=choose_bwd, space=dict(num_threads=(64, 128, 256)), pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def normalize_weight_bwd_kernel(num_topk: int, *, num_threads: int):
    """Rows of `num_topk` weights."""
    rows = _rows(num_topk, num_threads)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def normalize_weight_bwd(
        ddenominator: T.Tensor((num_tokens,), T.float32),
        dnormalized: T.Tensor((num_tokens, num_topk), T.float32),
        denominator: T.Tensor((num_tokens,), T.float32),
        normalized: T.Tensor((num_tokens, num_topk), T.float32),
        dtopk_weights: T.Tensor((num_tokens, num_topk), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=num_threads) as pid:
            grad_shared = T.alloc_shared((rows, num_topk | 1), T.float32)
            tile_shared = T.alloc_shared((rows, num_topk | 1), T.float32)
            mean_shared = T.alloc_shared((rows,), T.float32)
            mean = T.alloc_var(T.float32)
            tx = T.get_thread_binding()
            left = T.min(num_tokens - pid * rows, rows) * num_topk

            load_tile(dnormalized, pid * rows, left, num_threads, grad_shared)
            load_tile(normalized, pid * rows, left, num_threads, tile_shared)
            T.sync_threads()
            if tx < rows and tx * num_topk < left:
                mean = T.float32(0.0)
                for k in T.unroll(num_topk, unroll_factor=16):
                    mean += grad_shared[tx, k] * tile_shared[tx, k]
                mean_shared[tx] = mean
            T.sync_threads()
            for i in T.unroll(T.ceildiv(rows * num_topk, num_threads), unroll_factor=8):
                row, k = (i * num_threads + tx) // num_topk, (i * num_threads + tx) % num_topk
                if i * num_threads + tx < left:
                    quotient = T.ieee_fdiv(grad_shared[row, k] - mean_shared[row], denominator[pid * rows + row])
                    dtopk_weights[pid * rows + row, k] = quotient + ddenominator[pid * rows + row]

    return normalize_weight_bwd


# Ops ----------------------------------------------------------------------------------------


@op(outputs='dtopk_weights')
def normalize_weight_bwd(ddenominator: Tensor, dnormalized: Tensor, denominator: Tensor, normalized: Tensor) -> Tensor:
    """Gradient of `normalize_weight`.

    Args:
        ddenominator: (num_tokens,) float32.
        dnormalized: (num_tokens, num_topk) float32.
        denominator: (num_tokens,) float32, as returned by the forward.
        normalized: (num_tokens, num_topk) float32, as returned by the forward.

    Returns:
        (num_tokens, num_topk) float32.
    """
    num_tokens, num_topk = check.shape(normalized, 'normalized', 'num_tokens num_topk', dtype=torch.float32)
    known = {'num_tokens': num_tokens, 'num_topk': num_topk}
    check.shape(dnormalized, 'dnormalized', 'num_tokens num_topk', dtype=torch.float32, **known)
    check.shape(denominator, 'denominator', 'num_tokens', dtype=torch.float32, num_tokens=num_tokens)
    check.shape(ddenominator, 'ddenominator', 'num_tokens', dtype=torch.float32, num_tokens=num_tokens)
    for name, x in (('dnormalized', dnormalized), ('normalized', normalized)):
        check.contiguous(x, name)
    check.same_device(
        normalized=normalized, dnormalized=dnormalized, denominator=denominator, ddenominator=ddenominator
    )
    check.at_least(num_topk, 1, 'num_topk')
    dtopk_weights = torch.empty_like(normalized)
    launch(normalize_weight_bwd_kernel, (num_topk,), ddenominator, dnormalized, denominator, normalized, dtopk_weights)
    return dtopk_weights


@op(outputs='denominator normalized', backward=normalize_weight_bwd)
def normalize_weight(topk_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Divide each row of weights by its sum.

    Args:
        topk_weights: (num_tokens, num_topk) float32, contiguous.

    Returns:
        The sums (num_tokens,), added up from 1e-20 one weight after another, and the quotients (num_tokens, num_topk).
    """
    num_tokens, num_topk = check.shape(topk_weights, 'topk_weights', 'num_tokens num_topk', dtype=torch.float32)
    check.contiguous(topk_weights, 'topk_weights')
    check.at_least(num_topk, 1, 'num_topk')
    check.at_most(num_topk, MAX_TOPK, 'num_topk')
    denominator, normalized = topk_weights.new_empty(num_tokens), torch.empty_like(topk_weights)
    width = math.gcd(num_topk, check.vector_bytes(topk_weights, normalized) // 4)
    launch(normalize_weight_kernel, (num_topk, width), topk_weights, denominator, normalized)
    return denominator, normalized


def weight_normalize(topk_weights: Tensor) -> Tensor:
    """Weights divided by their row sum; a zero row stays zero. Differentiable.

    Args:
        topk_weights: (num_tokens, num_topk) float32, contiguous.

    Returns:
        (num_tokens, num_topk) float32.
    """
    return normalize_weight(topk_weights)[1]


# Cases --------------------------------------------------------------------------------------


def _make_bwd(num_tokens: int, num_topk: int) -> dict:
    weights = torch.rand(num_tokens, num_topk)
    denominator = weights.sum(1)
    return dict(
        ddenominator=torch.randn(num_tokens),
        dnormalized=torch.randn(num_tokens, num_topk),
        denominator=denominator,
        normalized=weights / denominator.unsqueeze(1),
    )


SMOKE = grid(num_tokens=[0, 1, 301], num_topk=[6]) + grid(num_tokens=[19], num_topk=[1, 9, 64, 1500])
BENCH = grid(num_tokens=[64, 4096, 16384], num_topk=[8]) + grid(num_tokens=[8001], num_topk=[6, 9])

normalize_weight.cases(
    make=lambda num_tokens, num_topk: dict(topk_weights=torch.rand(num_tokens, num_topk)),
    match='bitwise',
    smoke=SMOKE,
    full=grid(num_tokens=[4001, 100003], num_topk=[1, 2, 6, 8, 9]),
    bench=BENCH,
)
normalize_weight_bwd.cases(make=_make_bwd, match=dict(rtol=1e-4, atol=1e-5), smoke=SMOKE, bench=BENCH[:2])
