"""Gates of the delta rule from their inputs, as logarithms of decays.

    x = g + dt_bias
    y = -e^{A_log} softplus(x)                       or, with `lower_bound` b < 0,   y = b sigmoid(e^{A_log} x)

    dg      = -dy e^{A_log} sigmoid(x)               or   dy b e^{A_log} s (1 - s)
    dA_log  = sum_t dy y                             or   sum_t dy b e^{A_log} x s (1 - s)
    ddt_bias = sum_t dg

A column is a head, or a channel of a head. A thread owns neighboring columns of some tokens, and loads several tokens
before it uses the first. Partial sums of its tokens are added in one order. Memory bound.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.engram._macros import FAST_EXP2
from tile_kernels.engram.grad_w_reduce import sum_of_partials
from tile_kernels.linear_attention._checks import FLOATS

THREADS, AHEAD = 128, 8  # of a block, and rows that a thread loads before it uses the first
PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True}
LEAST_BOUND = -5.0
LOG2E = math.log2(math.e)


@kernel(pass_configs=PASS_CONFIGS)
def decay_gate_kernel(
    dtype: torch.dtype, bias: bool, bounded: bool, gradient: bool, width: int, lanes: int, part_rows: int
):
    """y, or with `gradient` dg and partial sums of the gradients of A_log and dt_bias.

    `lanes` threads own `width` columns each, of `part_rows` rows.
    """
    num_rows, columns, heads, num_parts = (T.dynamic(n) for n in ('num_rows', 'columns', 'heads', 'num_parts'))
    elem = T.dtype(dtype)
    groups = THREADS // lanes

    @T.prim_func
    def decay_gate(
        g: T.Tensor((num_rows, columns), elem),
        a_log: T.Tensor((heads,), T.float32),
        dt_bias: T.Tensor((columns,), T.float32),
        y: T.Tensor((num_rows, columns), T.float32),
        dg: T.Tensor((num_rows, columns), elem),
        partial: T.Tensor((num_parts, 2, columns), T.float32),
        lower_bound: T.float32,
    ):
        with T.Kernel(T.ceildiv(columns, lanes * width), T.ceildiv(num_rows, groups * part_rows), threads=THREADS) as (
            pid,
            block,
        ):
            T.import_source(FAST_EXP2)
            T.assume(columns % width == 0)
            g_local = T.alloc_local((AHEAD, width), elem)
            dy_local = T.alloc_local((AHEAD, width), T.float32)
            y_local = T.alloc_local((width,), T.float32)
            dg_local = T.alloc_local((width,), elem)
            sums = T.alloc_local((2, width), T.float32)
            rate = T.alloc_local((width,), T.float32)
            shift = T.alloc_local((width,), T.float32)
            x = T.alloc_var(T.float32)
            power = T.alloc_var(T.float32)
            share = T.alloc_var(T.float32)
            slope = T.alloc_var(T.float32)
            thread = T.get_thread_binding()
            column = (pid * lanes + thread % lanes) * width
            part = block * groups + thread // lanes
            T.clear(sums)
            if T.And(column < columns, part * part_rows < num_rows):
                for e in T.unroll(width):
                    rate[e] = T.exp(a_log[T.truncdiv(column + e, T.truncdiv(columns, heads))])
                    shift[e] = dt_bias[column + e] if bias else T.float32(0.0)
                for step in T.serial(part_rows // AHEAD):
                    first = part * part_rows + step * AHEAD
                    if first < num_rows:
                        for i in T.unroll(AHEAD):
                            row = T.alloc_var(T.int32)
                            row = T.min(first + i, num_rows - 1)
                            for e in T.vectorized(width):
                                g_local[i, e] = g[row, column + e]
                            if gradient:
                                for e in T.vectorized(width):
                                    dy_local[i, e] = y[row, column + e]
                        for i in T.unroll(AHEAD):
                            if first + i < num_rows:
                                for e in T.unroll(width):
                                    x = T.cast(g_local[i, e], T.float32) + shift[e]
                                    if bounded:
                                        power = T.call_extern('float32', 'ex2_approx', T.abs(rate[e] * x) * -LOG2E)
                                    else:
                                        power = T.call_extern('float32', 'ex2_approx', T.abs(x) * -LOG2E)
                                    share = T.fast_rcp(T.float32(1.0) + power)  # sigmoid of the absolute value
                                    if not gradient:
                                        if bounded:
                                            y_local[e] = lower_bound * T.if_then_else(x < 0.0, power * share, share)
                                        else:
                                            y_local[e] = -rate[e] * (T.max(x, 0.0) + T.log(T.float32(1.0) + power))
                                    else:
                                        if bounded:
                                            slope = dy_local[i, e] * lower_bound * rate[e] * (power * share * share)
                                            sums[0, e] = sums[0, e] + slope * x
                                        else:
                                            slope = -dy_local[i, e] * rate[e]
                                            sums[0, e] = sums[0, e] + slope * (
                                                T.max(x, 0.0) + T.log(T.float32(1.0) + power)
                                            )
                                            slope = slope * T.if_then_else(x < 0.0, power * share, share)
                                        sums[1, e] = sums[1, e] + slope
                                        dg_local[e] = T.cast(slope, elem)
                                if gradient:
                                    for e in T.vectorized(width):
                                        dg[first + i, column + e] = dg_local[e]
                                else:
                                    for e in T.vectorized(width):
                                        y[first + i, column + e] = y_local[e]
                if gradient:
                    for kind in T.unroll(2):
                        for e in T.vectorized(width):
                            partial[part, kind, column + e] = sums[kind, e]

    return decay_gate


def _shape_of(columns: int, *operands: Tensor) -> tuple[int, int, int]:
    """Columns of a thread, threads of a row, and rows of a partial sum: many threads even of few columns."""
    aligned = all(check.vector_bytes(x) >= 4 * x.element_size() for x in operands)
    width = 4 if columns % 4 == 0 and aligned else 1
    lanes = 128 if columns >= 128 * width else 16
    return width, lanes, 64 if columns >= 4096 else 16


def _check(g: Tensor, a_log: Tensor, dt_bias: Tensor | None, lower_bound: float) -> tuple[int, int]:
    """Returns the columns and the heads."""
    if check.tensor(g, 'g').dim() not in (3, 4):
        check.fail('g', 'must be (batch, tokens, heads) or (batch, tokens, heads, dim)', check.describe(g))
    check.dtype(g, 'g', FLOATS)
    check.contiguous(g, 'g')
    heads = g.shape[2]
    columns = heads * (g.shape[3] if g.dim() == 4 else 1)
    check.packed(check.tensor(a_log, 'a_log'), 'a_log', 'heads', torch.float32, heads=heads)
    check.packed(dt_bias, 'dt_bias', 'columns', torch.float32, columns=columns)
    check.at_most(lower_bound, 0.0, 'lower_bound')
    check.at_least(lower_bound, LEAST_BOUND, 'lower_bound')
    check.same_device(g=g, a_log=a_log, dt_bias=dt_bias)
    return columns, heads


@op(outputs='dg da_log ddt_bias')
def gate_bwd(
    dy: Tensor, g: Tensor, a_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `gate`; equal bits in every run.

    Args:
        dy: gradient of y, contiguous.
        g: as in `gate`, as all that follows.
        a_log: as there.
        dt_bias: as there.
        lower_bound: as there.

    Returns:
        Gradients of g, a_log and dt_bias; the last has extent 0 without a bias.
    """
    columns, heads = _check(g, a_log, dt_bias, lower_bound)
    check.equal(tuple(check.tensor(dy, 'dy').shape), tuple(g.shape), 'the shape of dy')
    check.dtype(dy, 'dy', torch.float32)
    check.contiguous(dy, 'dy')
    check.same_device(g=g, dy=dy)
    dg = torch.empty_like(g)
    if g.numel() == 0:
        sums = torch.zeros(2, columns, dtype=torch.float32, device=g.device)
    else:
        rows = g.view(-1, columns)
        shape = _shape_of(columns, g, dy)
        partial = torch.empty(-(-rows.shape[0] // shape[2]), 2, columns, dtype=torch.float32, device=g.device)
        static = (g.dtype, dt_bias is not None, lower_bound < 0.0, True, *shape)
        operands = (rows, a_log, dt_bias, dy.view(-1, columns), dg.view(-1, columns), partial, lower_bound)
        launch(decay_gate_kernel, static, *operands, size=g.numel())
        sums = sum_of_partials(partial)
    da_log = sums[0].view(heads, columns // max(heads, 1)).sum(1)
    ddt_bias = sums[1].clone() if dt_bias is not None else sums.new_empty(0)
    return dg, da_log, ddt_bias


@op(outputs='y', backward=gate_bwd)
def gate(g: Tensor, a_log: Tensor, dt_bias: Tensor | None = None, lower_bound: float = 0.0) -> Tensor:
    """Gates as logarithms of decays.

    Args:
        g: (batch, tokens, heads) or (batch, tokens, heads, dim), contiguous; any floating dtype.
        a_log: (heads,) float32, logarithms of rates.
        dt_bias: (heads,) or (heads * dim,) float32.
        lower_bound: 0 for the softplus form; the bound of the sigmoid form otherwise, at least -5.

    Returns:
        y like g in float32.
    """
    columns, _ = _check(g, a_log, dt_bias, lower_bound)
    y = torch.empty(g.shape, dtype=torch.float32, device=g.device)
    width, lanes, _ = _shape_of(columns, g)
    static = (g.dtype, dt_bias is not None, lower_bound < 0.0, False, width, lanes, AHEAD)
    operands = (g.view(-1, columns), a_log, dt_bias, y.view(-1, columns), None, None, lower_bound)
    launch(decay_gate_kernel, static, *operands, size=g.numel())
    return y


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMOKE = (
    grid(shape=[(2, 0, 3), (2, 37, 3)])
    + grid(shape=[(1, 70, 2, 16)], dtype=[BF16], bias=[True])
    + grid(shape=[(1, 5, 2, 48)], dtype=[F16], bias=[True], lower_bound=[-5.0])
)
BENCH = grid(shape=[(1, 32768, 64), (1, 8192, 96, 128)], dtype=[BF16], bias=[True])


def _make(shape: tuple, dtype: torch.dtype = F32, bias: bool = False, lower_bound: float = 0.0) -> dict:
    columns = shape[2] * (shape[3] if len(shape) == 4 else 1)
    return dict(
        g=torch.randn(shape).to(dtype),
        a_log=torch.randn(shape[2]),
        dt_bias=torch.randn(columns) if bias else None,
        lower_bound=lower_bound,
    )


def _make_bwd(**case: Any) -> dict:
    made = _make(**case)
    return dict(dy=torch.randn(made['g'].shape), **made)


BOUNDS = dict(rtol=1e-2, atol=1e-4)
gate.cases(make=_make, match=dict(rtol=1e-5, atol=1e-5), smoke=SMOKE, full=BENCH, bench=BENCH)
gate_bwd.cases(make=_make_bwd, match=BOUNDS, smoke=SMOKE, full=BENCH, bench=BENCH)
