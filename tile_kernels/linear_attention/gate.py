"""Gates of the delta rule from their inputs, as logarithms of decays.

    x = g + dt_bias
    y = -e^{A_log} softplus(x)                       or, with `lower_bound` b < 0,   y = b sigmoid(e^{A_log} x)

    dg      = -dy e^{A_log} sigmoid(x)               or   dy b e^{A_log} s (1 - s)
    dA_log  = sum_t dy y                             or   sum_t dy b e^{A_log} x s (1 - s)
    ddt_bias = sum_t dg

A thread owns a column, that is a head, or a channel of a head. Partial sums of `ROWS` tokens are added in one order.
Memory bound. The kernels have not run on a GPU yet.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.engram.grad_w_reduce import sum_of_partials
from tile_kernels.linear_attention._checks import FLOATS

ROWS, THREADS = 64, 64
PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True}
LEAST_BOUND = -5.0


def _sigmoid(x: Any) -> Any:
    return T.float32(1.0) / (T.float32(1.0) + T.exp(-x))


def _softplus(x: Any) -> Any:
    return T.max(x, T.float32(0.0)) + T.log(T.float32(1.0) + T.exp(-T.abs(x)))


@kernel(pass_configs=PASS_CONFIGS)
def decay_gate_kernel(dtype: torch.dtype, bias: bool, bounded: bool, gradient: bool):
    """y, or with `gradient` dg and partial sums of the gradients of A_log and dt_bias."""
    num_rows, columns, heads, num_parts = (T.dynamic(n) for n in ('num_rows', 'columns', 'heads', 'num_parts'))
    elem = T.dtype(dtype)

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
        with T.Kernel(T.ceildiv(columns, THREADS), T.ceildiv(num_rows, ROWS), threads=THREADS) as (pid, part):
            column = pid * THREADS + T.get_thread_binding()
            a_sum = T.alloc_var(T.float32, init=0.0)
            bias_sum = T.alloc_var(T.float32, init=0.0)
            shift = T.alloc_var(T.float32, init=0.0)
            rate = T.alloc_var(T.float32, init=0.0)
            if column < columns:
                rate = T.exp(a_log[T.truncdiv(column, T.truncdiv(columns, heads))])
                if bias:
                    shift = dt_bias[column]
                for i in T.serial(ROWS):
                    row = part * ROWS + i
                    if row < num_rows:
                        x = T.cast(g[row, column], T.float32) + shift
                        if not gradient:
                            if bounded:
                                y[row, column] = lower_bound * _sigmoid(rate * x)
                            else:
                                y[row, column] = -rate * _softplus(x)
                        else:
                            dy = y[row, column]
                            if bounded:
                                slope = dy * lower_bound * rate * _sigmoid(rate * x) * _sigmoid(-rate * x)
                                a_sum = a_sum + slope * x
                                bias_sum = bias_sum + slope
                                dg[row, column] = T.cast(slope, elem)
                            else:
                                slope = -dy * rate * _sigmoid(x)
                                a_sum = a_sum - dy * rate * _softplus(x)
                                bias_sum = bias_sum + slope
                                dg[row, column] = T.cast(slope, elem)
                if gradient:
                    partial[part, 0, column] = a_sum
                    partial[part, 1, column] = bias_sum

    return decay_gate


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
        partial = torch.empty(-(-rows.shape[0] // ROWS), 2, columns, dtype=torch.float32, device=g.device)
        static = (g.dtype, dt_bias is not None, lower_bound < 0.0, True)
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
    static = (g.dtype, dt_bias is not None, lower_bound < 0.0, False)
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
