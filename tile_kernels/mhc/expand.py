"""Expand: copy the hidden states of every token into all of its residual streams.

    y[t, c, h] = x[t, h]                                    gradient: dx[t, h] = sum_c dy[t, c, h]

A thread reads one vector of a row and writes it num_streams times; backward `row_threads` threads own a token and sum
its vectors in float32, c ascending. Memory bound: the floor is reading x and writing y.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.mhc._rows import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    STREAMS,
    WARP,
    check_streams,
    flat,
    lead_of,
    load_streams,
    load_vector,
    row_threads_for,
    rows_for,
    store_vector,
    vector_width,
)

BF16 = torch.bfloat16

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, width: int, num_tokens: int) -> dict:
    """Single warps: no more than 1024 threads of an SM run, and what all of them write lies close together."""
    return dict(num_threads=WARP)


def choose_bwd(hidden: int, num_streams: int, width: int, num_tokens: int) -> dict:
    """Two vectors of every stream in flight for each thread."""
    row_threads = row_threads_for(hidden // width, 2)
    return dict(row_threads=row_threads, rows=rows_for(row_threads))


# Kernels ------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_threads=(32, 64, 128, 256)), pass_configs=ROW_PASS_CONFIGS)
def expand_kernel(hidden: int, num_streams: int, width: int, *, num_threads: int):
    """A vector for each thread, `parts` blocks for each token."""
    num_vectors = hidden // width
    parts = -(-num_vectors // num_threads)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def expand(
        x: T.Tensor((num_tokens, hidden), T.bfloat16), y: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16)
    ):
        with T.Kernel(num_tokens * parts, threads=num_threads) as pid:
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


# Ops ----------------------------------------------------------------------------------------


@op()
def expand_bwd_(dy: Tensor, dx: Out) -> None:
    """Gradient of `expand` into memory of the caller.

    Args:
        dy: (..., num_streams, hidden) bfloat16, contiguous.
        dx: (..., hidden) bfloat16, contiguous; overwritten.
    """
    lead = lead_of(dy, 'dy', 'num_streams hidden', BF16)
    num_streams, hidden = dy.shape[-2:]
    check_streams(num_streams, hidden)
    lead_of(dx, 'dx', 'hidden', BF16, lead, hidden=hidden)
    check.same_device(dy=dy, dx=dx)
    static = (hidden, num_streams, vector_width(dy, dx))
    launch(expand_bwd_kernel, static, flat(dy, lead, num_streams, hidden), flat(dx, lead, hidden))


@op(outputs='dx')
def expand_bwd(dy: Tensor) -> Tensor:
    """Gradient of `expand`: the sum over streams.

    Args:
        dy: (..., num_streams, hidden) bfloat16, contiguous.

    Returns:
        (..., hidden) bfloat16, summed in float32.
    """
    lead = lead_of(dy, 'dy', 'num_streams hidden', BF16)
    dx = dy.new_empty((*lead, dy.shape[-1]))
    expand_bwd_.fn(dy, dx)
    return dx


@op()
def expand_(x: Tensor, y: Out) -> None:
    """Expand into memory of the caller; see `expand`.

    Args:
        x: (..., hidden) bfloat16, contiguous.
        y: (..., num_streams, hidden) bfloat16, contiguous; overwritten.
    """
    lead = lead_of(x, 'x', 'hidden', BF16)
    hidden = x.shape[-1]
    lead_of(y, 'y', 'num_streams hidden', BF16, lead, hidden=hidden)
    num_streams = y.shape[-2]
    check_streams(num_streams, hidden)
    check.same_device(x=x, y=y)
    static = (hidden, num_streams, vector_width(x, y))
    launch(expand_kernel, static, flat(x, lead, hidden), flat(y, lead, num_streams, hidden))


@op(outputs='y', backward=expand_bwd)
def expand(x: Tensor, num_streams: int = 4) -> Tensor:
    """Copy the hidden states of every token into all of its residual streams; differentiable.

    Args:
        x: (..., hidden) bfloat16, contiguous; hidden a multiple of 64.
        num_streams: 2, 4 or 8.

    Returns:
        (..., num_streams, hidden).
    """
    lead = lead_of(x, 'x', 'hidden', BF16)
    check_streams(num_streams, x.shape[-1])
    y = x.new_empty((*lead, num_streams, x.shape[-1]))
    expand_.fn(x, y)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(x=torch.randn(*lead, hidden, dtype=BF16), num_streams=num_streams)


def _make_(lead: tuple, hidden: int, num_streams: int) -> dict:
    y = torch.empty(*lead, num_streams, hidden, dtype=BF16)
    return dict(x=torch.randn(*lead, hidden, dtype=BF16), y=y)


def _make_bwd(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(dy=torch.randn(*lead, num_streams, hidden, dtype=BF16))


def _make_bwd_(lead: tuple, hidden: int, num_streams: int) -> dict:
    return _make_bwd(lead, hidden, num_streams) | dict(dx=torch.empty(*lead, hidden, dtype=BF16))


SMOKE = (
    grid(lead=[(0,), (), (2, 3)], hidden=[128], num_streams=[4])  # no token, no leading dimension
    + grid(lead=[(5,)], hidden=[64, 576], num_streams=STREAMS)  # idle threads, tail of a row
    + grid(lead=[(2,)], hidden=[4160], num_streams=[2])  # several parts
)
FULL = grid(lead=[(4001,), (3, 1001)], hidden=[1280, 2560, 7168], num_streams=STREAMS) + grid(
    lead=[(90001,)],
    hidden=[7168],
    num_streams=[4],  # more than 2^31 elements
)
BENCH = (
    grid(lead=[(64,), (4096,), (16384,)], hidden=[4096], num_streams=[4])
    + grid(lead=[(8192,)], hidden=[2048, 7168], num_streams=[4])
    + grid(lead=[(4001,)], hidden=[2560], num_streams=[4])
)
expand.cases(make=_make, smoke=SMOKE, full=FULL, bench=BENCH)
expand_.cases(make=_make_, smoke=SMOKE[:2] + SMOKE[-1:], bench=BENCH[:1])
expand_bwd.cases(make=_make_bwd, smoke=SMOKE, full=FULL, bench=BENCH)
expand_bwd_.cases(make=_make_bwd_, smoke=SMOKE[:2] + SMOKE[-1:], bench=BENCH[:1])
