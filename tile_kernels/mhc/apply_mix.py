"""Apply a mix: the input of a layer as the weighted sum of the residual streams.

    y[t, h] = sum_c mix[t, c] x[t, c, h]
    dx[t, c, h] = mix[t, c] dy[t, h]                        dmix[t, c] = sum_h dy[t, h] x[t, c, h]

`row_threads` threads own a token. Sums are float32 in a fixed order, c ascending, and results are rounded once.
Backward can add to an existing gradient (`dx + mix dy`, rounded once). Memory bound: the minimum is one read or write
of each tensor.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, empty, op
from tile_kernels.mhc._checks import BF16, F32, check_streams, flat, lead_of, mix_width, reshaped, vector_width
from tile_kernels.mhc._macros import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    WARP,
    apply_to_vector,
    load_mix,
    load_streams,
    load_vector,
    row_threads_for,
    rows_for,
    store_streams,
    store_vector,
    sum_scattered,
)
from tile_kernels.mhc._samples import STREAM_BENCH, STREAM_FULL, STREAM_SMOKE

#: Numbers of threads that may own a token in backward, which does little work for a vector.
BWD_THREADS = tuple(range(WARP, 513, WARP))

# Config ------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, width: int, coef_width: int, num_tokens: int) -> dict:
    """Two vectors of every stream in flight for each thread."""
    row_threads = row_threads_for(hidden // width, 2)
    return dict(row_threads=row_threads, rows=rows_for(row_threads), vectors=2)


def choose_bwd(hidden: int, num_streams: int, width: int, coef_width: int, adds_to: str, num_tokens: int) -> dict:
    """One vector for each thread, up to 512 threads."""
    row_threads = row_threads_for(hidden // width, 1, BWD_THREADS)
    return dict(row_threads=row_threads, rows=rows_for(row_threads))


# Kernels -----------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(row_threads=ROW_THREADS, rows=(1, 2, 4, 8), vectors=(1, 2, 4)),
    pass_configs=ROW_PASS_CONFIGS,
)
def apply_mix_kernel(
    hidden: int, num_streams: int, width: int, coef_width: int, *, row_threads: int, rows: int, vectors: int
):
    """Rows of `hidden` elements, `width` in an access; a thread loads `vectors` vectors before it stores one."""
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


@kernel(
    choose=choose_bwd,
    space=dict(row_threads=BWD_THREADS, rows=(1, 2, 4)),
    pass_configs=ROW_PASS_CONFIGS,
    fixed='row_threads',
)
def apply_mix_bwd_kernel(
    hidden: int, num_streams: int, width: int, coef_width: int, adds_to: str, *, row_threads: int, rows: int
):
    """Both gradients. `adds_to` is 'dx' to add that of x to dx, '' to overwrite dx, 'nothing' to skip dx."""
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


# Ops ---------------------------------------------------------------------------------------


def _check(x: Tensor, mix: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Check the inputs; returns the leading shape, the number of streams and hidden."""
    lead = lead_of(x, 'x', 'num_streams hidden', BF16)
    num_streams, hidden = x.shape[-2:]
    check_streams(num_streams, hidden)
    lead_of(mix, 'mix', 'num_streams one', F32, lead, num_streams=num_streams, one=1)
    check.same_device(x=x, mix=mix)
    return lead, num_streams, hidden


def launch_apply_bwd(dy: Tensor, x: Tensor, mix: Tensor, dx: Tensor | None, adds_to: str) -> Tensor:
    """Returns the gradient of mix and writes that of x to dx; `adds_to` as in `apply_mix_bwd_kernel`."""
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
    """Gradients of `apply_mix`, that of x added to dx.

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


@op(outputs='y', backward=apply_mix_bwd, out=True)
def apply_mix(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams; differentiable.

    Args:
        x: (..., num_streams, hidden) bfloat16, contiguous; 2, 4 or 8 streams, hidden a multiple of 64.
        mix: (..., num_streams, 1) float32, contiguous; the weight of every stream.

    Returns:
        (..., hidden) bfloat16, rounded once.
    """
    lead, num_streams, hidden = _check(x, mix)
    y = empty('y', (*lead, hidden), BF16, x.device)
    mix_flat = flat(mix, lead, num_streams, 1)
    launch(
        apply_mix_kernel,
        (hidden, num_streams, vector_width(x, y), mix_width(num_streams, mix_flat)),
        flat(x, lead, num_streams, hidden),
        mix_flat,
        flat(y, lead, hidden),
    )
    return y


def mhc_mix_apply(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams; differentiable.

    Args:
        x: (..., n, hidden) bfloat16, contiguous.
        mix: (..., n, 1) float32, contiguous.

    Returns:
        (..., hidden) bfloat16.
    """
    return apply_mix(x, mix)


def mhc_pre_apply_mix_fwd(x: Tensor, mix: Tensor, o: Tensor) -> None:
    """Write sum_c mix[c] x[c] of x (..., n, hidden) and mix (..., n) or (..., n, 1) into o (..., hidden)."""
    apply_mix.out(x, reshaped(mix, 'mix', *check.tensor(x, 'x').shape[:-1], 1), y=o)


def mhc_pre_apply_mix_bwd(o_grad: Tensor, x: Tensor, mix: Tensor, x_grad: Tensor) -> Tensor:
    """Add the gradient of x to x_grad; returns that of mix."""
    shape = check.tensor(x, 'x').shape
    return apply_mix_bwd_(o_grad, x, reshaped(mix, 'mix', *shape[:-1], 1), x_grad).view(mix.shape)


# Cases -------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(x=torch.randn(*lead, num_streams, hidden, dtype=BF16), mix=torch.rand(*lead, num_streams, 1))


def _make_bwd(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(dy=torch.randn(*lead, hidden, dtype=BF16)) | _make(lead, hidden, num_streams)


def _make_bwd_(lead: tuple, hidden: int, num_streams: int) -> dict:
    made = _make_bwd(lead, hidden, num_streams)
    return made | dict(dx=torch.randn(*lead, num_streams, hidden, dtype=BF16))


ROUNDED_ONCE, SUMMED = dict(rtol=1e-5, atol=1e-5), dict(rtol=1e-4, atol=1e-4)
apply_mix.cases(make=_make, match=ROUNDED_ONCE, smoke=STREAM_SMOKE, full=STREAM_FULL, bench=STREAM_BENCH)
apply_mix_bwd.cases(make=_make_bwd, match=SUMMED, smoke=STREAM_SMOKE, full=STREAM_FULL, bench=STREAM_BENCH)
apply_mix_bwd_.cases(make=_make_bwd_, match=SUMMED, smoke=STREAM_SMOKE, bench=STREAM_BENCH[:2])
