"""Kernel of the gradient of the Engram gate; `gate_bwd.py` has the mathematics."""

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.engram._checks import bwd_config
from tile_kernels.engram._macros import (
    ROW_PASS_CONFIGS,
    SLOT,
    load_row,
    row_layout,
    store_row,
    store_slot,
    sum_over_row,
)

#: The longest row whose weights fit into shared memory together with the partial sum.
MAX_STAGED = 16384


#: Channels in 16 bytes of float32.
HALF = SLOT // 2


def choose(hidden: int, num_streams: int, piece: int, masked: bool, residual: bool, size: int) -> dict:
    """The config also determines the number of partial sums, so `bwd_config` decides both."""
    return bwd_config(hidden)


@macro
def dot_rows(a_local, b_local, sums):
    """sums[0] = a . b over the channels of a thread."""
    T.clear(sums)
    for i in T.unroll(a_local.shape[0]):
        for e in T.unroll(SLOT):
            sums[0] = sums[0] + T.cast(a_local[i, e], T.float32) * T.cast(b_local[i, e], T.float32)


@macro
def gate_slope(grad, score, dot, inv_x, inv_k, clamp_value, hidden):
    """Gradient of dot; 0 if the clamp was active."""
    s = inv_x * inv_k * (hidden**-0.5)
    slope = grad * score * (T.float32(1.0) - score) * T.float32(0.5) * T.sqrt(s / T.abs(dot))
    return T.if_then_else(T.abs(dot) * s < clamp_value, T.float32(0.0), slope)


@macro
def stage_weights(weight, stream, row_threads, piece, weight_shared):
    """Copy the weights of a thread's slots to shared memory, `weight_shared[vectors, 2, row_threads, HALF]`."""
    half_local = T.alloc_local((HALF,), T.float32)
    for j in T.unroll(weight_shared.shape[0]):
        for p in T.unroll(2):
            load_half_slot(weight, stream, j * row_threads + T.get_thread_binding(), p, piece, half_local)
            for e in T.vectorized(HALF):
                weight_shared[j, p, T.get_thread_binding(), e] = half_local[e]


@macro
def load_half_slot(weight, stream, slot, p, piece, half_local):
    """Load half p of a slot of float32 weights, with the bytes of `piece` channels per access; zeros beyond the end."""
    width = max(1, piece // 2)
    T.clear(half_local)
    if slot < weight.shape[1] // SLOT:
        for q in T.unroll(HALF // width):
            for e in T.vectorized(width):
                half_local[q * width + e] = weight[stream, slot * SLOT + p * HALF + q * width + e]


@macro
def load_token(
    dy,
    x,
    k,
    v,
    dot,
    gate_score,
    rstd_x,
    rstd_k,
    image_token_mask,
    token,
    stream,
    row_threads,
    piece,
    masked,
    rows,
    saved,
):
    """Load the data of a token: four rows, and `saved`: dot, rstd_x, rstd_k, own gate, all gates, image flag."""
    load_row(dy, token, stream, row_threads, piece, rows[0])
    load_row(v, token, 0, row_threads, piece, rows[3])
    load_row(x, token, stream, row_threads, piece, rows[1])
    load_row(k, token, stream, row_threads, piece, rows[2])
    saved[0] = dot[token, stream]
    saved[1] = rstd_x[token, stream]
    saved[2] = rstd_k[token, stream]
    saved[3] = gate_score[token, stream]
    for c in T.unroll(gate_score.shape[1]):
        saved[4 + c] = gate_score[token, c]
    if masked:
        saved[4 + gate_score.shape[1]] = T.cast(image_token_mask[token], T.float32)


@macro
def move_on(rows, saved, next_rows, next_saved):
    """Make the prefetched token the current one."""
    for r in (0, 1, 2, 3):
        for i in T.unroll(rows[r].shape[0]):
            for e in T.vectorized(SLOT):
                rows[r][i, e] = next_rows[r][i, e]
    for i in T.unroll(saved.shape[0]):
        saved[i] = next_saved[i]


@macro
def load_streams(dy, token, stream, share, row_threads, piece, streams_local):
    """Load a thread's slots of dy of all streams, within this stream's part of dv."""
    rounds, num_streams = streams_local.shape[0], streams_local.shape[1]
    T.clear(streams_local)
    for r in T.unroll(rounds):
        own = r * row_threads + T.get_thread_binding()
        if own < share and stream * share + own < dy.shape[2] // SLOT:
            for c in T.unroll(num_streams):
                for p in T.unroll(SLOT // piece):
                    for e in T.vectorized(piece):
                        streams_local[r, c, p * piece + e] = dy[token, c, (stream * share + own) * SLOT + p * piece + e]


@macro
def store_value_gradient(streams_local, saved, image, dv, token, stream, share, row_threads):
    """Sum the streams, each times its gate, and store this stream's part of dv."""
    rounds, num_streams = streams_local.shape[0], streams_local.shape[1]
    sum_local = T.alloc_local((SLOT,), T.float32)
    dv_local = T.alloc_local((SLOT,), T.bfloat16)
    for r in T.unroll(rounds):
        own = r * row_threads + T.get_thread_binding()
        T.clear(sum_local)
        for c in T.unroll(num_streams):
            for e in T.unroll(SLOT):
                sum_local[e] = sum_local[e] + saved[4 + c] * T.cast(streams_local[r, c, e], T.float32)
        for e in T.vectorized(SLOT):
            dv_local[e] = T.cast(T.if_then_else(image == 0, sum_local[e], T.float32(0.0)), T.bfloat16)
        if own < share:
            store_slot(dv_local, dv, token, 0, stream * share + own, SLOT)


@macro
def gradients_of_half(dy_local, x_local, k_local, j, p, weight_local, slope, x_scale, k_scale, residual, dweight_local):
    """Replace dy by dx and k by dk in half p of slot j of a thread, and accumulate the weight gradient."""
    dx_local = T.alloc_local((HALF,), T.float32)
    dk_local = T.alloc_local((HALF,), T.float32)
    for e in T.unroll(HALF):
        x = T.cast(x_local[j, p * HALF + e], T.float32)
        k = T.cast(k_local[j, p * HALF + e], T.float32)
        dx_local[e] = slope * (k * weight_local[e] - x * x_scale)
        dk_local[e] = slope * (x * weight_local[e] - k * k_scale)
        dweight_local[e] = dweight_local[e] + slope * (x * k)
        if residual:
            dx_local[e] = dx_local[e] + T.cast(dy_local[j, p * HALF + e], T.float32)
    for e in T.vectorized(HALF):
        dy_local[j, p * HALF + e] = T.cast(dx_local[e], T.bfloat16)
    for e in T.vectorized(HALF):
        k_local[j, p * HALF + e] = T.cast(dk_local[e], T.bfloat16)


@kernel(
    choose=choose,
    space=dict(vectors=(2, 3, 4), resident_threads=(384, 512, 576), ahead=(False, True)),
    pass_configs=ROW_PASS_CONFIGS,
    fixed='vectors',
)
def gate_bwd_kernel(
    hidden: int,
    num_streams: int,
    piece: int,
    masked: bool,
    residual: bool,
    *,
    vectors: int,
    resident_threads: int,
    ahead: bool,
):
    """Accesses have `piece` channels."""
    row_threads, vectors = row_layout(hidden, vectors)
    staged = hidden <= MAX_STAGED
    share = -(-hidden // (SLOT * num_streams))  # slots of dv per stream
    rounds = -(-share // row_threads)
    num_tokens, num_partials = T.dynamic('num_tokens'), T.dynamic('num_partials')
    k_pitch, k_stream_pitch, v_pitch = T.dynamic('k_pitch'), T.dynamic('k_stream_pitch'), T.dynamic('v_pitch')
    dk_pitch, dv_pitch = T.dynamic('dk_pitch'), T.dynamic('dv_pitch')
    rows = (num_tokens, num_streams, hidden)

    @T.prim_func
    def gate_bwd(
        dy: T.Tensor(rows, T.bfloat16),
        x: T.Tensor(rows, T.bfloat16),
        k: T.StridedTensor(rows, (k_pitch, k_stream_pitch, 1), T.bfloat16),
        v: T.StridedTensor((num_tokens, 1, hidden), (v_pitch, T.dynamic('v_stream_pitch'), 1), T.bfloat16),
        weight_fused: T.Tensor((num_streams, hidden), T.float32),
        dot: T.Tensor((num_tokens, num_streams), T.float32),
        gate_score: T.Tensor((num_tokens, num_streams), T.float32),
        rstd_x: T.Tensor((num_tokens, num_streams), T.float32),
        rstd_k: T.Tensor((num_tokens, num_streams), T.float32),
        image_token_mask: T.Tensor((num_tokens,), T.uint8),
        dx: T.Tensor(rows, T.bfloat16),
        dk: T.StridedTensor(rows, (dk_pitch, hidden, 1), T.bfloat16),
        dv: T.StridedTensor((num_tokens, 1, hidden), (dv_pitch, T.dynamic('dv_stream_pitch'), 1), T.bfloat16),
        dweight_partial: T.Tensor((num_partials, num_streams, hidden), T.float32),
        clamp_value: T.float32,
    ):
        with T.Kernel(num_partials * num_streams, threads=row_threads) as pid:
            T.assume(k_pitch % piece == 0)
            T.assume(k_stream_pitch % piece == 0)
            T.assume(v_pitch % piece == 0)
            T.assume(dk_pitch % SLOT == 0)
            T.assume(dv_pitch % SLOT == 0)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, row_threads))
            dy_local = T.alloc_local((vectors, SLOT), T.bfloat16)
            x_local = T.alloc_local((vectors, SLOT), T.bfloat16)
            k_local = T.alloc_local((vectors, SLOT), T.bfloat16)
            v_local = T.alloc_local((vectors, SLOT), T.bfloat16)
            saved = T.alloc_local((num_streams + 5,), T.float32)
            next_dy = T.alloc_local((vectors, SLOT), T.bfloat16)
            next_x = T.alloc_local((vectors, SLOT), T.bfloat16)
            next_k = T.alloc_local((vectors, SLOT), T.bfloat16)
            next_v = T.alloc_local((vectors, SLOT), T.bfloat16)
            next_saved = T.alloc_local((num_streams + 5,), T.float32)
            streams_local = T.alloc_local((rounds, num_streams, SLOT), T.bfloat16)
            weight_local = T.alloc_local((HALF,), T.float32)
            dweight_local = T.alloc_local((HALF,), T.float32)
            sums = T.alloc_local((1,), T.float32)
            parts_shared = T.alloc_shared((2, row_threads // WARP, 1), T.float32)
            weight_shared = T.alloc_shared((vectors if staged else 1, 2, row_threads, HALF), T.float32)
            dweight_shared = T.alloc_shared((vectors, 2, row_threads, HALF), T.float32)
            image = T.alloc_var(T.int32, init=0)
            slope = T.alloc_var(T.float32)
            x_scale = T.alloc_var(T.float32)
            k_scale = T.alloc_var(T.float32)
            thread = T.get_thread_binding()
            stream, part = pid % num_streams, pid // num_streams

            T.clear(next_saved)
            if ahead and part < num_tokens:
                load_token(
                    dy, x, k, v, dot, gate_score, rstd_x, rstd_k, image_token_mask, part, stream, row_threads, piece,
                    masked, (next_dy, next_x, next_k, next_v), next_saved,
                )  # fmt: skip
            T.clear(dweight_local)
            for j in T.unroll(vectors):
                for p in T.unroll(2):
                    for e in T.vectorized(HALF):
                        dweight_shared[j, p, thread, e] = dweight_local[e]
            if staged:
                stage_weights(weight_fused, stream, row_threads, piece, weight_shared)

            for i in T.serial(T.ceildiv(num_tokens - part, num_partials)):
                token = part + i * num_partials
                if not ahead:
                    load_token(
                        dy, x, k, v, dot, gate_score, rstd_x, rstd_k, image_token_mask, token, stream,
                        row_threads, piece, masked, (next_dy, next_x, next_k, next_v), next_saved,
                    )  # fmt: skip
                move_on((dy_local, x_local, k_local, v_local), saved, (next_dy, next_x, next_k, next_v), next_saved)
                if ahead and token + num_partials < num_tokens:
                    load_token(
                        dy, x, k, v, dot, gate_score, rstd_x, rstd_k, image_token_mask, token + num_partials, stream,
                        row_threads, piece, masked, (next_dy, next_x, next_k, next_v), next_saved,
                    )  # fmt: skip
                load_streams(dy, token, stream, share, row_threads, piece, streams_local)
                if masked:
                    image = T.cast(saved[4 + num_streams], T.int32)

                dot_rows(dy_local, v_local, sums)
                sum_over_row(sums, parts_shared, i % 2, row_threads)
                slope = gate_slope(sums[0], saved[3], saved[0], saved[1], saved[2], clamp_value, hidden)
                x_scale = saved[0] * saved[1] * saved[1] * (1.0 / hidden)
                k_scale = saved[0] * saved[2] * saved[2] * (1.0 / hidden)
                if image != 0:
                    T.clear(k_local)
                    if not residual:
                        T.clear(dy_local)
                else:
                    for j in T.unroll(vectors):
                        for p in T.unroll(2):
                            if staged:
                                for e in T.vectorized(HALF):
                                    weight_local[e] = weight_shared[j, p, thread, e]
                            else:
                                load_half_slot(weight_fused, stream, j * row_threads + thread, p, piece, weight_local)
                            for e in T.vectorized(HALF):
                                dweight_local[e] = dweight_shared[j, p, thread, e]
                            gradients_of_half(
                                dy_local, x_local, k_local, j, p, weight_local, slope, x_scale, k_scale, residual,
                                dweight_local,
                            )  # fmt: skip
                            for e in T.vectorized(HALF):
                                dweight_shared[j, p, thread, e] = dweight_local[e]
                store_row(dy_local, dx, token, stream, row_threads)
                store_row(k_local, dk, token, stream, row_threads)
                store_value_gradient(streams_local, saved, image, dv, token, stream, share, row_threads)

            for j in T.unroll(vectors):
                if j * row_threads + thread < hidden // SLOT:
                    for p in T.unroll(2):
                        for e in T.vectorized(HALF):
                            dweight_partial[part, stream, (j * row_threads + thread) * SLOT + p * HALF + e] = (
                                dweight_shared[j, p, thread, e]
                            )

    return gate_bwd
