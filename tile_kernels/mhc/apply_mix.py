"""Apply a mix: the input of a layer as the weighted sum of the residual streams.

    y[t, h] = sum_c mix[t, c] x[t, c, h]
    dx[t, c, h] = mix[t, c] dy[t, h]                        dmix[t, c] = sum_h dy[t, h] x[t, c, h]

`row_threads` threads own a token; sums are float32 in a fixed order, c ascending, results rounded once. Backward may
add to a gradient that is there already (`dx + mix dy`, rounded once). Memory bound: the floor is reading and writing
each tensor once.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, Out, op
from tile_kernels.mhc._rows import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    STREAMS,
    WARP,
    apply_to_vector,
    check_streams,
    flat,
    lead_of,
    load_mix,
    load_streams,
    load_vector,
    mix_width,
    row_threads_for,
    rows_for,
    store_streams,
    store_vector,
    sum_scattered,
    vector_width,
)

BF16, F32 = torch.bfloat16, torch.float32

#: Threads that may own a token of the gradient, which has little to do for a vector.
BWD_THREADS = tuple(range(WARP, 513, WARP))

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, width: int, coef_width: int, num_tokens: int) -> dict:
    """Two vectors of every stream in flight for each thread."""
    row_threads = row_threads_for(hidden // width, 2)
    return dict(row_threads=row_threads, rows=rows_for(row_threads), vectors=2)


def choose_bwd(hidden: int, num_streams: int, width: int, coef_width: int, adds_to: str, num_tokens: int) -> dict:
    """A vector for each thread, up to 512 threads."""
    row_threads = row_threads_for(hidden // width, 1, BWD_THREADS)
    return dict(row_threads=row_threads, rows=rows_for(row_threads))


# Kernels ------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(row_threads=ROW_THREADS, rows=(1, 2, 4, 8), vectors=(1, 2, 4)),
    pass_configs=ROW_PASS_CONFIGS,
)
def apply_mix_kernel(
    hidden: int, num_streams: int, width: int, coef_width: int, *, row_threads: int, rows: int, vectors: int
):
    """Rows of `hidden` elements, `width` of them in an access; `vectors` of a thread are read before one is written."""
    num_vectors = hidden // width
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def apply_mix(
        x: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        y: T.Tensor((num_tokens, hidden), T.bfloat16),
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=rows * row_threads) as pid:
            x_local = T.alloc_local((vectors * num_streams, width), T.bfloat16)
            y_local = T.alloc_local((1, width), T.bfloat16)
            mix_local = T.alloc_local((num_streams,), T.float32)
            tx = T.get_thread_binding()
            token = pid * rows + tx // row_threads

            if token < num_tokens:
                load_mix(mix, token, mix_local, coef_width)
                for part in T.serial(T.ceildiv(num_vectors, vectors * row_threads)):
                    first = part * vectors * row_threads + tx % row_threads
                    for v in T.unroll(vectors):
                        if first + v * row_threads < num_vectors:
                            load_streams(x, token, first + v * row_threads, x_local, v * num_streams)
                    for v in T.unroll(vectors):
                        if first + v * row_threads < num_vectors:
                            apply_to_vector(x_local, v * num_streams, mix_local, y_local)
                            store_vector(y_local, 0, y, token, 0, first + v * row_threads)

    return apply_mix


@kernel(choose=choose_bwd, space=dict(row_threads=BWD_THREADS, rows=(1, 2, 4)), pass_configs=ROW_PASS_CONFIGS)
def apply_mix_bwd_kernel(
    hidden: int, num_streams: int, width: int, coef_width: int, adds_to: str, *, row_threads: int, rows: int
):
    """Both gradients; `adds_to` is 'dx' if that of x is added to what is there, 'nothing' if it is not wanted."""
    num_vectors = hidden // width
    row_warps = row_threads // WARP
    adds = adds_to == 'dx'
    num_threads = rows * row_threads
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def apply_mix_bwd(
        dy: T.Tensor((num_tokens, hidden), T.bfloat16),
        x: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        dx: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        dmix: T.Tensor((num_tokens, num_streams, 1), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=num_threads) as pid:
            dy_local = T.alloc_local((1, width), T.bfloat16)
            x_local = T.alloc_local((num_streams, width), T.bfloat16)
            dx_local = T.alloc_local((num_streams, width), T.bfloat16)
            mix_local = T.alloc_local((num_streams,), T.float32)
            dmix_local = T.alloc_local((num_streams,), T.float32)
            sums_shared = T.alloc_shared((rows * row_warps, num_streams), T.float32)
            tx = T.get_thread_binding()
            token = pid * rows + tx // row_threads
            lane, warp = tx % WARP, tx // WARP

            T.clear(dmix_local)
            if token < num_tokens:
                load_mix(mix, token, mix_local, coef_width)
                for part in T.serial(T.ceildiv(num_vectors, row_threads)):
                    index = part * row_threads + tx % row_threads
                    if index < num_vectors:
                        load_vector(dy, token, 0, index, dy_local, 0)
                        load_streams(x, token, index, x_local, 0)
                        if adds:
                            load_streams(dx, token, index, dx_local, 0)
                        for c in T.unroll(num_streams):
                            for e in T.unroll(width):
                                dy_value = T.cast(dy_local[0, e], T.float32)
                                dmix_local[c] = T.ieee_fmaf(dy_value, T.cast(x_local[c, e], T.float32), dmix_local[c])
                                there = T.cast(dx_local[c, e], T.float32) if adds else T.float32(0.0)
                                dx_local[c, e] = T.cast(T.ieee_fmaf(mix_local[c], dy_value, there), T.bfloat16)
                        if adds_to != 'nothing':
                            store_streams(dx_local, dx, token, index)

            sum_scattered(dmix_local, num_streams)
            if lane % (WARP // num_streams) == 0:
                sums_shared[warp, lane // (WARP // num_streams)] = dmix_local[0]
            T.sync_threads()
            if tx < rows * num_streams and pid * rows + tx // num_streams < num_tokens:
                total = T.alloc_var(T.float32, init=0.0)
                for w in T.unroll(row_warps):
                    total = total + sums_shared[tx // num_streams * row_warps + w, tx % num_streams]
                dmix[pid * rows + tx // num_streams, tx % num_streams, 0] = total

    return apply_mix_bwd


# Ops ----------------------------------------------------------------------------------------


def _check(x: Tensor, mix: Tensor) -> tuple[tuple, int, int]:
    """Check the inputs; returns the leading shape, the number of streams and hidden."""
    lead = lead_of(x, 'x', 'num_streams hidden', BF16)
    num_streams, hidden = x.shape[-2:]
    check_streams(num_streams, hidden)
    lead_of(mix, 'mix', 'num_streams one', F32, lead, num_streams=num_streams, one=1)
    check.same_device(x=x, mix=mix)
    return lead, num_streams, hidden


def launch_apply_bwd(dy: Tensor, x: Tensor, mix: Tensor, dx: Tensor | None, adds_to: str) -> Tensor:
    """Gradient of mix, and that of x in dx: added to what is there with 'dx', not computed with 'nothing'."""
    lead, num_streams, hidden = _check(x, mix)
    lead_of(dy, 'dy', 'hidden', BF16, lead, hidden=hidden)
    check.same_device(x=x, dy=dy)
    if dx is not None:
        lead_of(dx, 'dx', 'num_streams hidden', BF16, lead, num_streams=num_streams, hidden=hidden)
        check.same_device(x=x, dx=dx)
    dmix = torch.empty_like(mix)
    mix_flat = flat(mix, lead, num_streams, 1)
    launch(
        apply_mix_bwd_kernel,
        (hidden, num_streams, vector_width(dy, x, dx), mix_width(num_streams, mix_flat), adds_to),
        flat(dy, lead, hidden),
        flat(x, lead, num_streams, hidden),
        mix_flat,
        None if dx is None else flat(dx, lead, num_streams, hidden),
        flat(dmix, lead, num_streams, 1),
    )
    return dmix


@op(outputs='dmix')
def apply_mix_bwd_(dy: Tensor, x: Tensor, mix: Tensor, dx: Mut) -> Tensor:
    """Gradients of `apply_mix`, that of x added to what is there.

    Args:
        dy: (..., hidden) bfloat16, contiguous.
        x: (..., num_streams, hidden), as given to `apply_mix`.
        mix: (..., num_streams, 1), as given to `apply_mix`.
        dx: (..., num_streams, hidden) bfloat16, contiguous; added to in float32, rounded once.

    Returns:
        Gradient of mix; deterministic.
    """
    return launch_apply_bwd(dy, x, mix, dx, 'dx')


@op(outputs='dx dmix')
def apply_mix_bwd(dy: Tensor, x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `apply_mix`.

    Args:
        dy: (..., hidden) bfloat16, contiguous.
        x: (..., num_streams, hidden), as given to `apply_mix`.
        mix: (..., num_streams, 1), as given to `apply_mix`.

    Returns:
        Gradients of x and of mix; deterministic.
    """
    dx = torch.empty_like(x)
    return dx, launch_apply_bwd(dy, x, mix, dx, '')


@op()
def apply_mix_(x: Tensor, mix: Tensor, y: Out) -> None:
    """Apply a mix into memory of the caller; see `apply_mix`.

    Args:
        x: (..., num_streams, hidden) bfloat16, contiguous.
        mix: (..., num_streams, 1) float32, contiguous.
        y: (..., hidden) bfloat16, contiguous; overwritten.
    """
    lead, num_streams, hidden = _check(x, mix)
    lead_of(y, 'y', 'hidden', BF16, lead, hidden=hidden)
    check.same_device(x=x, y=y)
    mix_flat = flat(mix, lead, num_streams, 1)
    launch(
        apply_mix_kernel,
        (hidden, num_streams, vector_width(x, y), mix_width(num_streams, mix_flat)),
        flat(x, lead, num_streams, hidden),
        mix_flat,
        flat(y, lead, hidden),
    )


@op(outputs='y', backward=apply_mix_bwd)
def apply_mix(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams; differentiable.

    Args:
        x: (..., num_streams, hidden) bfloat16, contiguous; 2, 4 or 8 streams, hidden a multiple of 64.
        mix: (..., num_streams, 1) float32, contiguous; the share of every stream.

    Returns:
        (..., hidden) bfloat16, rounded once.
    """
    lead = lead_of(x, 'x', 'num_streams hidden', BF16)
    y = x.new_empty((*lead, x.shape[-1]))
    apply_mix_.fn(x, mix, y)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(x=torch.randn(*lead, num_streams, hidden, dtype=BF16), mix=torch.rand(*lead, num_streams, 1))


def _make_(lead: tuple, hidden: int, num_streams: int) -> dict:
    return _make(lead, hidden, num_streams) | dict(y=torch.empty(*lead, hidden, dtype=BF16))


def _make_bwd(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(dy=torch.randn(*lead, hidden, dtype=BF16)) | _make(lead, hidden, num_streams)


def _make_bwd_(lead: tuple, hidden: int, num_streams: int) -> dict:
    made = _make_bwd(lead, hidden, num_streams)
    return made | dict(dx=torch.randn(*lead, num_streams, hidden, dtype=BF16))


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
ROUNDED_ONCE, SUMMED = dict(rtol=1e-5, atol=1e-5), dict(rtol=1e-4, atol=1e-4)
apply_mix.cases(make=_make, match=ROUNDED_ONCE, smoke=SMOKE, full=FULL, bench=BENCH)
apply_mix_.cases(make=_make_, match=ROUNDED_ONCE, smoke=SMOKE[:2] + SMOKE[-1:], bench=BENCH[:1])
apply_mix_bwd.cases(make=_make_bwd, match=SUMMED, smoke=SMOKE, full=FULL, bench=BENCH)
apply_mix_bwd_.cases(make=_make_bwd_, match=SUMMED, smoke=SMOKE, bench=BENCH[:2])
