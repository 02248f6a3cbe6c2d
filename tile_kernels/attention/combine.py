"""Merge parts of attention that saw different keys.

    m      = max_n lse_partial[n, r]
    w[n]   = exp(lse_partial[n, r] - m)
    o[r]   = sum_n w[n] * out_partial[n, r] / (sum_n w[n] + exp(sink[h] - m))
    lse[r] = m + log sum_n w[n]                       without the sink

A part with lse = -inf counts for nothing, whatever its output holds. A row without any part is 0 and has lse = -inf.
A thread owns a 16-byte vector of a row and adds the parts in their order. Up to four parts are loaded at once. Of more
than eight, several threads own a vector: each adds adjacent parts, and their sums are added in order. Memory bound: the
floor is reading the parts.
"""

import math

import torch
from torch import Tensor

from tile_kernels.attention._checks import HALVES, dense
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, begin_early, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

THREADS = 128
AHEAD = 4  # parts that a thread loads before it adds them
MANY = 8  # the same with many parts, and the most parts of a row that are few
LN2, LOG2E = math.log(2), math.log2(math.e)
DTYPES = (torch.float32, *HALVES)

# Kernel -------------------------------------------------------------------------------------


@macro
def load_parts(out_partial, lse_partial, row, first, last, column, x, lses):
    """Load a vector of some parts from `first` on, and their lse; those from `last` on repeat another."""
    ahead = lses.shape[0]
    width = x.shape[0] // ahead
    for i in T.unroll(ahead):
        for e in T.vectorized(width):
            x[i * width + e] = out_partial[T.min(first + i, last - 1), row, column + e]
        lses[i] = lse_partial[T.min(first + i, last - 1), row]


@kernel(pass_configs={'TL_ENABLE_LOWER_LDGSTG': True})
def combine_few_kernel(
    value_dim: int, dtype: torch.dtype, out_dtype: torch.dtype, sink_dtype: torch.dtype | None, parts: int
):
    """One thread for 16 bytes of a row in every part; all parts are loaded at once."""
    num_rows, num_heads = T.dynamic('num_rows'), T.dynamic('num_heads')
    width = 16 // dtype.itemsize
    lanes = value_dim // width
    elem, out_elem = T.dtype(dtype), T.dtype(out_dtype)
    inf = math.inf
    rows = THREADS // lanes if THREADS % lanes == 0 else 0  # whole rows of a block, which store their lse together

    @T.prim_func
    def combine_few(
        out_partial: T.Tensor((parts, num_rows, value_dim), elem),
        lse_partial: T.Tensor((parts, num_rows), T.float32),
        sink: T.Tensor((num_heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((num_rows, value_dim), out_elem),
        lse: T.Tensor((num_rows,), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_rows * lanes, THREADS), threads=THREADS) as pid:
            thread = T.get_thread_binding()
            index = pid * THREADS + thread
            row = T.truncdiv(index, lanes)
            column = T.truncmod(index, lanes) * width
            x = T.alloc_local((parts, width), elem)
            lses = T.alloc_local((parts,), T.float32)
            acc = T.alloc_local((width,), T.float32)
            y = T.alloc_local((width,), out_elem)
            top = T.alloc_var(T.float32, init=-inf)
            total = T.alloc_var(T.float32, init=0.0)
            weight = T.alloc_var(T.float32)
            factor = T.alloc_var(T.float32)
            logit = T.alloc_var(T.float32, init=0.0)
            lse_shared = T.alloc_shared((max(rows, 1),), T.float32)
            begin_early()
            if row < num_rows:
                for n in T.unroll(parts):
                    for e in T.vectorized(width):
                        x[n, e] = out_partial[n, row, column + e]
                    lses[n] = lse_partial[n, row]
                if sink_dtype is not None:
                    logit = T.cast(sink[T.truncmod(row, num_heads)], T.float32)
                for n in T.unroll(parts):
                    top = T.max(top, lses[n])
                if top == -inf:
                    top = 0.0  # every part is empty, or NaN
                for e in T.unroll(width):
                    acc[e] = 0.0
                for n in T.unroll(parts):
                    if lses[n] != -inf:
                        weight = T.exp2((lses[n] - top) * LOG2E)
                        total += weight
                        for e in T.unroll(width):
                            acc[e] += weight * T.cast(x[n, e], T.float32)
                factor = total
                if sink_dtype is not None:
                    factor += T.exp2((logit - top) * LOG2E)
                factor = T.if_then_else(total == 0.0, T.float32(0.0), 1.0 / factor)
                for e in T.unroll(width):
                    y[e] = T.cast(acc[e] * factor, out_elem)
                for e in T.vectorized(width):
                    o[row, column + e] = y[e]
                if column == 0:
                    total = T.if_then_else(total == 0.0, T.float32(-inf), top + T.log2(total) * LN2)
                    if rows:
                        lse_shared[T.truncdiv(thread, lanes)] = total
                    else:
                        lse[row] = total
            if rows:
                T.sync_threads()
                if T.And(thread < rows, pid * rows + thread < num_rows):
                    lse[pid * rows + thread] = lse_shared[thread]

    return combine_few


@kernel()
def combine_kernel(value_dim: int, dtype: torch.dtype, out_dtype: torch.dtype, sink_dtype: torch.dtype | None):
    """One thread for 16 bytes of a part's row."""
    num_parts, num_rows, num_heads = T.dynamic('num_parts'), T.dynamic('num_rows'), T.dynamic('num_heads')
    width = 16 // dtype.itemsize
    lanes = value_dim // width
    elem, out_elem = T.dtype(dtype), T.dtype(out_dtype)
    inf = math.inf

    @T.prim_func
    def combine(
        out_partial: T.Tensor((num_parts, num_rows, value_dim), elem),
        lse_partial: T.Tensor((num_parts, num_rows), T.float32),
        sink: T.Tensor((num_heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((num_rows, value_dim), out_elem),
        lse: T.Tensor((num_rows,), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_rows * lanes, THREADS), threads=THREADS) as pid:
            index = pid * THREADS + T.get_thread_binding()
            row = T.truncdiv(index, lanes)
            column = T.truncmod(index, lanes) * width
            x = T.alloc_local((AHEAD * width,), elem)
            lses = T.alloc_local((AHEAD,), T.float32)
            acc = T.alloc_local((width,), T.float32)
            y = T.alloc_local((width,), out_elem)
            top = T.alloc_var(T.float32, init=-inf)
            total = T.alloc_var(T.float32, init=0.0)
            weight = T.alloc_var(T.float32)
            factor = T.alloc_var(T.float32)
            begin_early()
            if row < num_rows:
                for n in T.serial(num_parts):
                    top = T.max(top, lse_partial[n, row])
                if top == -inf:
                    top = 0.0  # every part is empty, or NaN
                for e in T.unroll(width):
                    acc[e] = 0.0
                for step in T.serial(T.ceildiv(num_parts, AHEAD)):
                    load_parts(out_partial, lse_partial, row, step * AHEAD, num_parts, column, x, lses)
                    for i in T.unroll(AHEAD):
                        if T.And(step * AHEAD + i < num_parts, lses[i] != -inf):
                            weight = T.exp2((lses[i] - top) * LOG2E)
                            total += weight
                            for e in T.unroll(width):
                                acc[e] += weight * T.cast(x[i * width + e], T.float32)
                factor = total
                if sink_dtype is not None:
                    factor += T.exp2((T.cast(sink[T.truncmod(row, num_heads)], T.float32) - top) * LOG2E)
                factor = T.if_then_else(total == 0.0, T.float32(0.0), 1.0 / factor)
                for e in T.unroll(width):
                    y[e] = T.cast(acc[e] * factor, out_elem)
                for e in T.vectorized(width):
                    o[row, column + e] = y[e]
                if column == 0:
                    lse[row] = T.if_then_else(total == 0.0, T.float32(-inf), top + T.log2(total) * LN2)

    return combine


@kernel(pass_configs={'TL_ENABLE_LOWER_LDGSTG': True})
def combine_many_kernel(value_dim: int, dtype: torch.dtype, out_dtype: torch.dtype, sink_dtype: torch.dtype | None):
    """One thread block for a row of many parts."""
    num_parts, num_rows, num_heads = T.dynamic('num_parts'), T.dynamic('num_rows'), T.dynamic('num_heads')
    width = 16 // dtype.itemsize
    lanes = value_dim // width
    threads = 128 if lanes <= 32 else 256 if lanes <= 64 else 512
    owners = threads // lanes  # threads of a vector
    elem, out_elem = T.dtype(dtype), T.dtype(out_dtype)
    inf = math.inf

    @T.prim_func
    def combine_many(
        out_partial: T.Tensor((num_parts, num_rows, value_dim), elem),
        lse_partial: T.Tensor((num_parts, num_rows), T.float32),
        sink: T.Tensor((num_heads,), T.dtype(sink_dtype or torch.float32)),
        o: T.Tensor((num_rows, value_dim), out_elem),
        lse: T.Tensor((num_rows,), T.float32),
    ):
        with T.Kernel(num_rows, threads=threads) as row:
            thread = T.get_thread_binding()
            owner = T.truncdiv(thread, lanes)
            column = T.truncmod(thread, lanes) * width
            x = T.alloc_local((MANY * width,), elem)
            lses = T.alloc_local((MANY,), T.float32)
            acc = T.alloc_local((width,), T.float32)
            y = T.alloc_local((width,), out_elem)
            top = T.alloc_var(T.float32, init=-inf)
            total = T.alloc_var(T.float32, init=0.0)
            weight = T.alloc_var(T.float32)
            factor = T.alloc_var(T.float32)
            top_shared = T.alloc_shared((threads // 32,), T.float32)
            total_shared = T.alloc_shared((owners,), T.float32)
            acc_shared = T.alloc_shared((owners, value_dim), T.float32)
            every = T.ceildiv(num_parts, owners)
            first, last = owner * every, T.min((owner + 1) * every, num_parts)
            begin_early()
            if T.And(owner < owners, first < last):  # these are in flight while the weights are found
                load_parts(out_partial, lse_partial, row, first, last, column, x, lses)
            for step in T.serial(T.ceildiv(num_parts, threads)):
                if step * threads + thread < num_parts:
                    top = T.max(top, lse_partial[step * threads + thread, row])
            top = T.warp_reduce_max(top)
            if T.truncmod(thread, 32) == 0:
                top_shared[T.truncdiv(thread, 32)] = top
            T.sync_threads()
            for i in T.unroll(threads // 32):
                top = T.max(top, top_shared[i])
            if top == -inf:
                top = 0.0  # every part is empty, or NaN
            for e in T.unroll(width):
                acc[e] = 0.0
            if owner < owners:
                for step in T.serial(T.ceildiv(T.max(last - first, 0), MANY)):
                    if step > 0:
                        load_parts(out_partial, lse_partial, row, first + step * MANY, last, column, x, lses)
                    for i in T.unroll(MANY):
                        if T.And(first + step * MANY + i < last, lses[i] != -inf):
                            weight = T.exp2((lses[i] - top) * LOG2E)
                            total += weight
                            for e in T.unroll(width):
                                acc[e] += weight * T.cast(x[i * width + e], T.float32)
                for e in T.vectorized(width):
                    acc_shared[owner, column + e] = acc[e]
                if column == 0:
                    total_shared[owner] = total
            T.sync_threads()
            if owner == 0:
                for other in T.unroll(1, owners):
                    total += total_shared[other]
                    for e in T.unroll(width):
                        acc[e] += acc_shared[other, column + e]
                factor = total
                if sink_dtype is not None:
                    factor += T.exp2((T.cast(sink[T.truncmod(row, num_heads)], T.float32) - top) * LOG2E)
                factor = T.if_then_else(total == 0.0, T.float32(0.0), 1.0 / factor)
                for e in T.unroll(width):
                    y[e] = T.cast(acc[e] * factor, out_elem)
                for e in T.vectorized(width):
                    o[row, column + e] = y[e]
                if column == 0:
                    lse[row] = T.if_then_else(total == 0.0, T.float32(-inf), top + T.log2(total) * LN2)

    return combine_many


def merge(out_partial: Tensor, lse_partial: Tensor, sink: Tensor | None, o: Tensor, lse: Tensor) -> None:
    """Launch the kernel for that many parts: (parts, ..., value_dim) and (parts, ...), all contiguous."""
    parts, value_dim, num_rows = out_partial.shape[0], o.shape[-1], lse.numel()
    many = parts > MANY and value_dim * out_partial.element_size() <= 512 * 16
    static: tuple = (value_dim, out_partial.dtype, o.dtype, None if sink is None else sink.dtype)
    few = isinstance(parts, int) and parts <= AHEAD
    launch(
        combine_few_kernel if few else combine_many_kernel if many else combine_kernel,
        (*static, parts) if few else static,
        out_partial.view(parts, num_rows, value_dim),
        lse_partial.view(parts, num_rows),
        sink,
        o.view(num_rows, value_dim),
        lse.view(num_rows),
        size=num_rows,
    )


# Op -----------------------------------------------------------------------------------------


@op(outputs='o lse')
def combine(
    out_partial: Tensor, lse_partial: Tensor, sink: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge parts of attention that saw different keys; see `flash_attn_combine`."""
    check.dtype(out_partial, 'out_partial', DTYPES)
    if out_partial.dim() < 2:
        check.fail('out_partial', 'must be (parts, ..., value_dim)', check.describe(out_partial))
    if tuple(check.tensor(lse_partial, 'lse_partial').shape) != tuple(out_partial.shape[:-1]):
        check.fail('lse_partial', 'must have the shape of out_partial without its last', check.describe(lse_partial))
    check.dtype(lse_partial, 'lse_partial', torch.float32)
    check.contiguous(out_partial, 'out_partial')
    check.contiguous(lse_partial, 'lse_partial')
    parts, *rows, value_dim = out_partial.shape
    if value_dim == 0 or value_dim % 8:
        check.fail('the last extent of out_partial', 'must be a positive multiple of 8', str(value_dim))
    if out_partial.numel() and check.vector_bytes(out_partial) < 16:
        fact = check.describe(out_partial)
        check.fail('out_partial', 'must begin at a multiple of 16 bytes', fact, hint='pass out_partial.clone()')
    if out_dtype is not None:
        check.one_of(out_dtype, DTYPES, 'out_dtype')
    if sink is not None:
        if not rows:
            check.fail('sink', 'must come with parts that have heads', check.describe(out_partial))
        check.packed(sink, 'sink', 'heads', DTYPES, heads=rows[-1])
    check.same_device(out_partial=out_partial, lse_partial=lse_partial, sink=sink)
    o = torch.empty(*rows, value_dim, dtype=out_dtype or out_partial.dtype, device=out_partial.device)
    lse = torch.empty(rows, dtype=torch.float32, device=out_partial.device)
    if parts == 0:
        return o.zero_(), lse.fill_(-math.inf)
    merge(out_partial, lse_partial, sink, o, lse)
    return o, lse


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, *, sink: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Merge parts of attention that saw different keys, such as split keys, a shared prefix or a ring of GPUs.

    Args:
        out_partial: (parts, ..., value_dim) float32, bfloat16 or float16; value_dim is a multiple of 8. Slices with
            gaps are copied, also of `lse_partial`.
        lse_partial: (parts, ...) float32, natural logarithms without the sink. A part with -inf counts for nothing,
            even if its output is NaN.
        sink: (heads,) logits that join the denominator; heads are the last dimension of `lse_partial`.
        out_dtype: dtype of the result, that of the parts unless given.

    Returns:
        The merged output (..., value_dim) and its lse (...), which has no sink. Parts are added in their order, so
        results have the same bits in every run.
    """
    lse_partial = check.tensor(lse_partial, 'lse_partial').contiguous()
    return combine(dense(out_partial, 'out_partial'), lse_partial, sink, out_dtype)


# Cases --------------------------------------------------------------------------------------


def _make(
    rows: tuple, value_dim: int, dtype: torch.dtype, parts: int, sink: torch.dtype | None = None, half: bool = False
) -> dict:
    out, lse = torch.randn(parts, *rows, value_dim).to(dtype), torch.randn(parts, *rows) * 3
    if parts > 1:  # empty parts, which hold NaN, and rows without any
        empty = (torch.rand(parts, *rows) < 0.3) | (torch.rand(rows) < 0.2)
        lse = lse.masked_fill(empty, -math.inf)
        out = out.masked_fill(empty.unsqueeze(-1), math.nan)
    logits = None if sink is None else torch.randn(rows[-1]).to(sink)
    if logits is not None and len(logits) > 2:
        logits[0], logits[1] = math.inf, -math.inf
    return dict(out_partial=out, lse_partial=lse, sink=logits, out_dtype=torch.bfloat16 if half else None)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
combine.cases(
    make=_make,
    match=dict(rtol=1e-5, atol=1e-6),
    smoke=grid(rows=[(0, 2), (1, 1), (5, 3)], value_dim=[64], dtype=[F32], parts=[1, 3])
    + grid(rows=[(7,)], value_dim=[72], dtype=[BF16], parts=[4], sink=[BF16])
    + grid(rows=[(2, 3, 4)], value_dim=[8], dtype=[F32], parts=[5], sink=[F32], half=[True])
    + grid(rows=[(2, 9)], value_dim=[136], dtype=[F16], parts=[2, 9], sink=[F32])
    + grid(rows=[(1, 2)], value_dim=[64, 72, 320], dtype=[F32], parts=[40], sink=[F32], half=[True]),
    full=grid(rows=[(33, 1, 24)], value_dim=[80, 512], dtype=[F32, BF16], parts=[1, 17, 200], sink=[F32])
    + grid(rows=[(300_000, 32)], value_dim=[128], dtype=[BF16], parts=[2]),  # past 2^31 elements
    bench=grid(rows=[(32, 1, 32), (64, 1, 128)], value_dim=[128], dtype=[F32], parts=[4, 16], half=[True])
    + grid(rows=[(4, 8192, 32)], value_dim=[128], dtype=[BF16], parts=[2], sink=[F32])
    + grid(rows=[(4096, 32)], value_dim=[512], dtype=[F32], parts=[8], half=[True]),
)
