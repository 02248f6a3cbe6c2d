"""Expand: copy the hidden states of every token into all of its residual streams.

    y[t, c, h] = x[t, h]                                    gradient: dx[t, h] = sum_c dy[t, c, h]

A thread reads one vector of a row and writes it num_streams times. In backward `row_threads` threads own a token and
sum its vectors in float32, c ascending. Memory bound: the minimum is one read of x and one write of y.
"""

import torch
from torch import Tensor

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, T, begin_early, is_short
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op
from tile_kernels.mhc._checks import BF16, check_streams, flat, lead_of, vector_width
from tile_kernels.mhc._macros import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    WARP,
    load_streams,
    load_vector,
    row_threads_for,
    rows_for,
    store_vector,
)
from tile_kernels.mhc._samples import STREAM_BENCH, STREAM_FULL, STREAM_SMOKE

# Config ------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, width: int, num_tokens: int) -> dict:
    """Blocks of one warp: at most 1024 threads of an SM run then, and their writes are close together.

    Where the next kernel starts early and blocks are many, the warps that wait need fewer and larger blocks.
    """
    num_bytes = num_tokens * (num_streams + 1) * hidden * 2
    early = is_short(num_bytes)
    return dict(num_threads=4 * WARP if early and num_bytes > 1 << 21 else WARP, early=early)


def choose_bwd(hidden: int, num_streams: int, width: int, num_tokens: int) -> dict:
    """Two vectors of every stream in flight for each thread."""
    row_threads = row_threads_for(hidden // width, 2)
    return dict(row_threads=row_threads, rows=rows_for(row_threads))


# Kernels -----------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_threads=(32, 64, 128, 256), early=EARLY), pass_configs=ROW_PASS_CONFIGS)
def expand_kernel(hidden: int, num_streams: int, width: int, *, num_threads: int, early: bool = False):
    """One vector for each thread, `parts` blocks for each token."""
    num_vectors = hidden // width
    parts = -(-num_vectors // num_threads)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def expand(
        x: T.Tensor((num_tokens, hidden), T.bfloat16), y: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16)
    ):
        with T.Kernel(num_tokens * parts, threads=num_threads) as pid:
            if early:
                begin_early()
            x_local = T.alloc_local((1, width), T.bfloat16)
            token, index = pid // parts, pid % parts * num_threads + T.get_thread_binding()

            if index < num_vectors:
                load_vector(x, token, 0, index, x_local, 0)
                for c in T.unroll(num_streams):
                    store_vector(x_local, 0, y, token, c, index)

    return expand


@kernel(choose=choose_bwd, space=dict(row_threads=ROW_THREADS, rows=(1, 2, 4, 8)), pass_configs=ROW_PASS_CONFIGS)
def expand_bwd_kernel(hidden: int, num_streams: int, width: int, *, row_threads: int, rows: int):
    """The sum over streams, in float32."""
    num_vectors = hidden // width
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def expand_bwd(
        dy: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16), dx: T.Tensor((num_tokens, hidden), T.bfloat16)
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=rows * row_threads) as pid:
            dy_local = T.alloc_local((num_streams, width), T.bfloat16)
            dx_local = T.alloc_local((1, width), T.bfloat16)
            tx = T.get_thread_binding()
            token = pid * rows + tx // row_threads

            if token < num_tokens:
                for part in T.serial(T.ceildiv(num_vectors, row_threads)):
                    index = part * row_threads + tx % row_threads
                    if index < num_vectors:
                        load_streams(dy, token, index, dy_local, 0)
                        for e in T.unroll(width):
                            total = T.alloc_var(T.float32, init=0.0)
                            for c in T.unroll(num_streams):
                                total = total + T.cast(dy_local[c, e], T.float32)
                            dx_local[0, e] = T.cast(total, T.bfloat16)
                        store_vector(dx_local, 0, dx, token, 0, index)

    return expand_bwd


# Ops ---------------------------------------------------------------------------------------


@op(outputs='dx', out=True)
def expand_bwd(dy: Tensor) -> Tensor:
    """Gradient of `expand`: the sum over streams.

    Args:
        dy: (..., num_streams, hidden) bfloat16, contiguous.

    Returns:
        (..., hidden) bfloat16, summed in float32.
    """
    lead = lead_of(dy, 'dy', 'num_streams hidden', BF16)
    num_streams, hidden = dy.shape[-2:]
    check_streams(num_streams, hidden)
    dx = empty('dx', (*lead, hidden), BF16, dy.device)
    static = (hidden, num_streams, vector_width(dy, dx))
    launch(expand_bwd_kernel, static, flat(dy, lead, num_streams, hidden), flat(dx, lead, hidden))
    return dx


@op(outputs='y', backward=expand_bwd, out=True)
def expand(x: Tensor, num_streams: int = 4) -> Tensor:
    """Copy the hidden states of every token into all of its residual streams; differentiable.

    Args:
        x: (..., hidden) bfloat16, contiguous; hidden a multiple of 64.
        num_streams: 2, 4 or 8.

    Returns:
        (..., num_streams, hidden).
    """
    lead = lead_of(x, 'x', 'hidden', BF16)
    hidden = x.shape[-1]
    check_streams(num_streams, hidden)
    y = empty('y', (*lead, num_streams, hidden), BF16, x.device)
    static = (hidden, num_streams, vector_width(x, y))
    launch(expand_kernel, static, flat(x, lead, hidden), flat(y, lead, num_streams, hidden))
    return y


def expand_to_mhc_fwd(x: Tensor, o: Tensor) -> None:
    """Copy x (..., hidden) into all streams of o (..., n, hidden)."""
    lead_of(o, 'o', 'n hidden', BF16)
    expand.out(x, o.shape[-2], y=o)


def expand_to_mhc_bwd(o_grad: Tensor, x_grad: Tensor) -> None:
    """Write the sum over the streams of o_grad (..., n, hidden) into x_grad (..., hidden)."""
    expand_bwd.out(o_grad, dx=x_grad)


# Cases -------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(x=torch.randn(*lead, hidden, dtype=BF16), num_streams=num_streams)


def _make_bwd(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(dy=torch.randn(*lead, num_streams, hidden, dtype=BF16))


expand.cases(make=_make, smoke=STREAM_SMOKE, full=STREAM_FULL, bench=STREAM_BENCH)
expand_bwd.cases(make=_make_bwd, smoke=STREAM_SMOKE, full=STREAM_FULL, bench=STREAM_BENCH)
