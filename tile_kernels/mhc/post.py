"""Post: mix the output of a layer and the residual streams into the next residual streams.

    y[t, o, h] = post_mix[t, o] x[t, h] + sum_i comb_mix[t, i, o] residual[t, i, h]

With dy the gradient of y:

    dx[t, h]           = sum_o post_mix[t, o] dy[t, o, h]
    dresidual[t, i, h] = sum_o comb_mix[t, i, o] dy[t, o, h]
    dpost_mix[t, o]    = sum_h x[t, h] dy[t, o, h]
    dcomb_mix[t, i, o] = sum_h residual[t, i, h] dy[t, o, h]

A thread has one vector of every stream, and the coefficients in registers. In backward `row_threads` threads own a
token. All sums are float32 in a fixed order, and results are rounded once. Memory bound: the minimum is one read or
write of each tensor.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.front import replayed
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, T, begin_early, is_short
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op
from tile_kernels.mhc._checks import BF16, F32, check_streams, flat, lead_of, mix_width, vector_width
from tile_kernels.mhc._macros import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    WARP,
    load_mix,
    load_streams,
    load_vector,
    part_threads_for,
    post_to_vector,
    row_threads_for,
    rows_for,
    store_streams,
    store_vector,
    sum_scattered,
)
from tile_kernels.mhc._samples import STREAM_BENCH, STREAM_FULL, STREAM_SMOKE

# Config ------------------------------------------------------------------------------------

#: Up to this many tokens, blocks of the forward are small.
FEW_TOKENS = 16


def choose(hidden: int, num_streams: int, width: int, coef_width: int, num_tokens: int) -> dict:
    """The largest blocks without idle threads; few tokens get small ones, which spread over the SMs."""
    early = is_short(num_tokens * (2 * num_streams + 1) * hidden * 2)
    return dict(num_threads=64 if num_tokens <= FEW_TOKENS else part_threads_for(hidden // width), early=early)


def choose_bwd(hidden: int, num_streams: int, width: int, coef_width: int, num_tokens: int) -> dict:
    """About four vectors for each thread: one reduction over the row serves all of them."""
    row_threads = row_threads_for(hidden // width, 4)
    return dict(row_threads=row_threads, rows=rows_for(row_threads))


# Kernels -----------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_threads=ROW_THREADS, early=EARLY), pass_configs=ROW_PASS_CONFIGS)
def post_kernel(hidden: int, num_streams: int, width: int, coef_width: int, *, num_threads: int, early: bool = False):
    """One vector of every stream for each thread, `parts` blocks for each token."""
    num_vectors = hidden // width
    parts = -(-num_vectors // num_threads)
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def post(
        x: T.Tensor((num_tokens, hidden), T.bfloat16),
        residual: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        post_mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        comb_mix: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        y: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
    ):
        with T.Kernel(num_tokens * parts, threads=num_threads) as pid:
            if early:
                begin_early()
            x_local = T.alloc_local((1, width), T.bfloat16)
            residual_local = T.alloc_local((num_streams, width), T.bfloat16)
            y_local = T.alloc_local((num_streams, width), T.bfloat16)
            post_local = T.alloc_local((num_streams,), T.float32)
            comb_local = T.alloc_local((num_streams * num_streams,), T.float32)
            token, index = pid // parts, pid % parts * num_threads + T.get_thread_binding()

            if index < num_vectors:
                load_vector(x, token, 0, index, x_local, 0)
                load_streams(residual, token, index, residual_local, 0)
                load_mix(post_mix, token, post_local, coef_width)
                load_mix(comb_mix, token, comb_local, coef_width)
                post_to_vector(x_local, 0, residual_local, 0, post_local, comb_local, y_local)
                store_streams(y_local, y, token, index)

    return post


@kernel(
    choose=choose_bwd,
    space=dict(row_threads=ROW_THREADS, rows=(1, 2, 4, 8)),
    pass_configs=ROW_PASS_CONFIGS,
    fixed='row_threads',
)
def post_bwd_kernel(hidden: int, num_streams: int, width: int, coef_width: int, *, row_threads: int, rows: int):
    """The four gradients. Sums over a row use shuffles within a warp, then shared memory between warps."""
    num_vectors = hidden // width
    num_pairs = num_streams * num_streams
    per_scatter = min(num_pairs, WARP)
    scatters = num_pairs // per_scatter
    row_warps = row_threads // WARP
    num_threads = rows * row_threads
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def post_bwd(
        dy: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        x: T.Tensor((num_tokens, hidden), T.bfloat16),
        residual: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        post_mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        comb_mix: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        dx: T.Tensor((num_tokens, hidden), T.bfloat16),
        dresidual: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        dpost_mix: T.Tensor((num_tokens, num_streams, 1), T.float32),
        dcomb_mix: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=num_threads) as pid:
            dy_local = T.alloc_local((num_streams, width), T.bfloat16)
            x_local = T.alloc_local((1, width), T.bfloat16)
            residual_local = T.alloc_local((num_streams, width), T.bfloat16)
            dx_local = T.alloc_local((1, width), T.bfloat16)
            post_local = T.alloc_local((num_streams,), T.float32)
            comb_local = T.alloc_local((num_pairs,), T.float32)
            dpost_local = T.alloc_local((num_streams,), T.float32)
            dcomb_local = T.alloc_local((scatters, per_scatter), T.float32)
            scatter_local = T.alloc_local((per_scatter,), T.float32)
            sums_shared = T.alloc_shared((rows * row_warps, num_pairs + num_streams), T.float32)
            tx = T.get_thread_binding()
            token = pid * rows + tx // row_threads
            lane, warp = tx % WARP, tx // WARP

            T.clear(dpost_local)
            T.clear(dcomb_local)
            if token < num_tokens:
                load_mix(post_mix, token, post_local, coef_width)
                load_mix(comb_mix, token, comb_local, coef_width)
                for part in T.serial(T.ceildiv(num_vectors, row_threads)):
                    index = part * row_threads + tx % row_threads
                    if index < num_vectors:
                        load_streams(dy, token, index, dy_local, 0)
                        load_vector(x, token, 0, index, x_local, 0)
                        load_streams(residual, token, index, residual_local, 0)
                        for e in T.unroll(width):
                            total = T.alloc_var(T.float32, init=0.0)
                            for o in T.unroll(num_streams):
                                dy_value = T.cast(dy_local[o, e], T.float32)
                                total = T.ieee_fmaf(post_local[o], dy_value, total)
                                dpost_local[o] = T.ieee_fmaf(T.cast(x_local[0, e], T.float32), dy_value, dpost_local[o])
                            dx_local[0, e] = T.cast(total, T.bfloat16)
                        store_vector(dx_local, 0, dx, token, 0, index)
                        for i in T.unroll(num_streams):
                            for e in T.unroll(width):
                                value = T.cast(residual_local[i, e], T.float32)
                                total = T.alloc_var(T.float32, init=0.0)
                                for o in T.unroll(num_streams):
                                    pair = i * num_streams + o
                                    dy_value = T.cast(dy_local[o, e], T.float32)
                                    total = T.ieee_fmaf(comb_local[pair], dy_value, total)
                                    dcomb_local[pair // per_scatter, pair % per_scatter] = T.ieee_fmaf(
                                        value, dy_value, dcomb_local[pair // per_scatter, pair % per_scatter]
                                    )
                                residual_local[i, e] = T.cast(total, T.bfloat16)
                        store_streams(residual_local, dresidual, token, index)

            for s in T.unroll(scatters):
                for i in T.unroll(per_scatter):
                    scatter_local[i] = dcomb_local[s, i]
                sum_scattered(scatter_local, per_scatter)
                if lane % (WARP // per_scatter) == 0:
                    sums_shared[warp, s * per_scatter + lane // (WARP // per_scatter)] = scatter_local[0]
            sum_scattered(dpost_local, num_streams)
            if lane % (WARP // num_streams) == 0:
                sums_shared[warp, num_pairs + lane // (WARP // num_streams)] = dpost_local[0]
            T.sync_threads()
            for step in T.serial(T.ceildiv(rows * (num_pairs + num_streams), num_threads)):
                slot = step * num_threads + tx
                row, which = slot // (num_pairs + num_streams), slot % (num_pairs + num_streams)
                if row < rows and pid * rows + row < num_tokens:
                    total = T.alloc_var(T.float32, init=0.0)
                    for w in T.unroll(row_warps):
                        total = total + sums_shared[row * row_warps + w, which]
                    if which < num_pairs:
                        dcomb_mix[pid * rows + row, which // num_streams, which % num_streams] = total
                    else:
                        dpost_mix[pid * rows + row, which - num_pairs, 0] = total

    return post_bwd


# Ops ---------------------------------------------------------------------------------------


def check_post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> tuple[tuple[int, ...], int, int]:
    """Check the inputs of `post`; returns the leading shape, the number of streams and hidden."""
    lead = lead_of(residual, 'residual', 'num_streams hidden', BF16)
    num_streams, hidden = residual.shape[-2:]
    check_streams(num_streams, hidden)
    lead_of(x, 'x', 'hidden', BF16, lead, hidden=hidden)
    lead_of(post_mix, 'post_mix', 'num_streams one', F32, lead, num_streams=num_streams, one=1)
    lead_of(comb_mix, 'comb_mix', 'num_streams outputs', F32, lead, num_streams=num_streams, outputs=num_streams)
    check.same_device(residual=residual, x=x, post_mix=post_mix, comb_mix=comb_mix)
    return lead, num_streams, hidden


@op(outputs='dx dresidual dpost_mix dcomb_mix')
def post_bwd(
    dy: Tensor, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `post`.

    Args:
        dy: (..., num_streams, hidden) bfloat16, contiguous.
        x: (..., hidden), as given to `post`.
        residual: (..., num_streams, hidden), as given to `post`.
        post_mix: (..., num_streams, 1), as given to `post`.
        comb_mix: (..., num_streams, num_streams), as given to `post`.

    Returns:
        Gradients of x, residual, post_mix and comb_mix, in their dtypes; deterministic.
    """
    lead, num_streams, hidden = check_post(x, residual, post_mix, comb_mix)
    lead_of(dy, 'dy', 'num_streams hidden', BF16, lead, num_streams=num_streams, hidden=hidden)
    check.same_device(residual=residual, dy=dy)
    dx, dresidual = torch.empty_like(x), torch.empty_like(residual)
    dpost_mix, dcomb_mix = torch.empty_like(post_mix), torch.empty_like(comb_mix)
    post_flat, comb_flat = flat(post_mix, lead, num_streams, 1), flat(comb_mix, lead, num_streams, num_streams)
    launch(
        post_bwd_kernel,
        (hidden, num_streams, vector_width(dy, x, residual), mix_width(num_streams, post_flat, comb_flat)),
        flat(dy, lead, num_streams, hidden),
        flat(x, lead, hidden),
        flat(residual, lead, num_streams, hidden),
        post_flat,
        comb_flat,
        flat(dx, lead, hidden),
        flat(dresidual, lead, num_streams, hidden),
        flat(dpost_mix, lead, num_streams, 1),
        flat(dcomb_mix, lead, num_streams, num_streams),
    )
    return dx, dresidual, dpost_mix, dcomb_mix


@op(outputs='y', backward=post_bwd, out=True)
def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Tensor:
    """Mix the output of a layer and the residual streams into the next residual streams; differentiable.

    Args:
        x: (..., hidden) bfloat16, contiguous; the output of the layer. hidden is a multiple of 64.
        residual: (..., num_streams, hidden) bfloat16, contiguous; 2, 4 or 8 streams.
        post_mix: (..., num_streams, 1) float32, contiguous; the weight of x in every stream.
        comb_mix: (..., num_streams, num_streams) float32, contiguous; [i, o] is the weight of stream i in stream o.

    Returns:
        (..., num_streams, hidden) bfloat16, rounded once.
    """
    lead, num_streams, hidden = check_post(x, residual, post_mix, comb_mix)
    y = empty('y', residual.shape, BF16, residual.device)
    post_flat, comb_flat = flat(post_mix, lead, num_streams, 1), flat(comb_mix, lead, num_streams, num_streams)
    launch(
        post_kernel,
        (hidden, num_streams, vector_width(x, residual, y), mix_width(num_streams, post_flat, comb_flat)),
        flat(x, lead, hidden),
        flat(residual, lead, num_streams, hidden),
        post_flat,
        comb_flat,
        flat(y, lead, num_streams, hidden),
    )
    return y


#: The op, for functions that have a parameter of its name.
_post = post


@replayed
def mhc_post_fwd(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, out: Tensor | None = None) -> Tensor:
    """`out[o] = post[o] x + sum_i comb[i, o] residual[i]`, shapes as the op `post` takes them."""
    if out is None:
        return _post(x, residual, post, comb)
    _post.out(x, residual, post, comb, y=out)
    return out


@replayed
def mhc_post_bwd(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, d_o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, post and comb of `mhc_post_fwd`."""
    return post_bwd(d_o, x, residual, post, comb)


# Cases -------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int) -> dict:
    """Coefficients as in a model: post between 0 and 2, rows of comb that sum to one."""
    return dict(
        x=torch.randn(*lead, hidden, dtype=BF16),
        residual=torch.randn(*lead, num_streams, hidden, dtype=BF16),
        post_mix=torch.rand(*lead, num_streams, 1) * 2,
        comb_mix=torch.randn(*lead, num_streams, num_streams).softmax(-1),
    )


def _make_bwd(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(dy=torch.randn(*lead, num_streams, hidden, dtype=BF16)) | _make(lead, hidden, num_streams)


ROUNDED_ONCE, SUMMED = dict(rtol=1e-5, atol=1e-5), dict(rtol=1e-4, atol=1e-4)
post.cases(make=_make, match=ROUNDED_ONCE, smoke=STREAM_SMOKE, full=STREAM_FULL, bench=STREAM_BENCH)
post_bwd.cases(make=_make_bwd, match=SUMMED, smoke=STREAM_SMOKE, full=STREAM_FULL, bench=STREAM_BENCH)
