"""Gradient of the Engram gate; `gate.py` has the forward mathematics and names.

    grad[t, c]   = sum_h dy[t, c, h] * v[t, h]                               the gradient of the gate
    s            = rstd_x * rstd_k / sqrt(hidden),   g = gate_score[t, c]
    d[t, c]      = grad * g * (1 - g) * sqrt(s / |dot|) / 2                  0 where |dot| * s < clamp_value
    dx[t, c, h]  = dy[t, c, h] + d * (k[t, c, h] * w[c, h] - x[t, c, h] * dot * rstd_x^2 / hidden)
    dk[t, c, h]  = d * (x[t, c, h] * w[c, h] - k[t, c, h] * dot * rstd_k^2 / hidden)
    dv[t, h]     = sum_c g[t, c] * dy[t, c, h]
    dw[c, h]     = sum_t d[t, c] * x[t, c, h] * k[t, c, h]

A block owns one stream of every num_partials-th token. Its weights and its sum over tokens, dw, stay in shared memory,
where each thread meets its own channels only. The sum over streams, dv, is shared out: each stream's block adds up a
part of the channels, reading dy of the other streams while their blocks do, so that it leaves memory once. The number
of partial sums depends on the problem alone, so results are the same on every GPU. Memory bound.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.engram._gate import (
    as_bytes,
    check_gate,
    is_packed,
    num_partials_for,
    random_gate,
    split_packed,
)
from tile_kernels.engram._rows import (
    ROW_PASS_CONFIGS,
    SLOT,
    WARP,
    load_row,
    resident_blocks,
    row_layout,
    store_row,
    store_slot,
    sum_over_row,
)
from tile_kernels.engram.sum_partials import sum_of_partials

#: Longest row whose weights fit into shared memory beside the partial sum.
MAX_STAGED = 16384

#: Channels of 16 bytes of float32.
HALF = SLOT // 2

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, piece: int, masked: bool, residual: bool, size: int) -> dict:
    """As many threads as may hold four rows in registers."""
    return dict(vectors=2, resident_threads=512, ahead=True)


# Kernel -------------------------------------------------------------------------------------


@macro
def dot_rows(a_local, b_local, sums):
    """sums[0] = a . b over the channels of a thread."""
    T.clear(sums)
    for i in T.unroll(a_local.shape[0]):
        for e in T.unroll(SLOT):
            sums[0] = sums[0] + T.cast(a_local[i, e], T.float32) * T.cast(b_local[i, e], T.float32)


@macro
def gate_slope(grad, score, dot, inv_x, inv_k, clamp_value, hidden):
    """Gradient of dot: 0 where the clamp was in force."""
    s = inv_x * inv_k * (hidden**-0.5)
    slope = grad * score * (T.float32(1.0) - score) * T.float32(0.5) * T.sqrt(s / T.abs(dot))
    return T.if_then_else(T.abs(dot) * s < clamp_value, T.float32(0.0), slope)


@macro
def stage_weights(weight, stream, row_threads, piece, weight_shared):
    """Put the weights of a thread's slots where it finds them again: `weight_shared[vectors, 2, row_threads, HALF]`."""
    half_local = T.alloc_local((HALF,), T.float32)
    for j in T.unroll(weight_shared.shape[0]):
        for p in T.unroll(2):
            load_half_slot(weight, stream, j * row_threads + T.get_thread_binding(), p, piece, half_local)
            for e in T.vectorized(HALF):
                weight_shared[j, p, T.get_thread_binding(), e] = half_local[e]


@macro
def load_half_slot(weight, stream, slot, p, piece, half_local):
    """Half p of a slot of float32 weights, bytes of `piece` channels in an access; zeros beyond the end."""
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
    """Read what a block needs of a token: four rows, and `saved`: dot, rstd_x, rstd_k, own gate, all gates, image."""
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
    """What was read ahead becomes the token at hand."""
    for r in (0, 1, 2, 3):
        for i in T.unroll(rows[r].shape[0]):
            for e in T.vectorized(SLOT):
                rows[r][i, e] = next_rows[r][i, e]
    for i in T.unroll(saved.shape[0]):
        saved[i] = next_saved[i]


@macro
def load_streams(dy, token, stream, share, row_threads, piece, streams_local):
    """Read of dy of all streams of a token the slots of a thread in this stream's share of dv."""
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
    """Add up the streams, each times its gate, and write this stream's share of dv."""
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
    """Replace dy by dx and k by dk in half p of slot j of a thread, and add to the gradient of the weights."""
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
    space=dict(vectors=(2, 4), resident_threads=(384, 512, 640, 768), ahead=(False, True)),
    pass_configs=ROW_PASS_CONFIGS,
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
    """`piece` channels in an access."""
    row_threads, vectors = row_layout(hidden, vectors)
    staged = hidden <= MAX_STAGED
    share = -(-hidden // (SLOT * num_streams))  # slots of dv for each stream's block
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


# Ops ----------------------------------------------------------------------------------------


def _gate_bwd(
    dy: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None,
    residual: bool,
    dkv: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx, dk, dv and the partial sums of dweight_fused; dk and dv are views of `dkv` if it is given."""
    num_tokens, num_streams, hidden = check_gate(x, k, v, weight_fused, image_token_mask)
    known = {'num_tokens': num_tokens, 'num_streams': num_streams}
    check.shape(dy, 'grad_out', 'num_tokens num_streams hidden', dtype=x.dtype, hidden=hidden, **known)
    check.contiguous(dy, 'grad_out')
    saved = {'dot': dot, 'gate_score': gate_score, 'rstd_x': rstd_x, 'rstd_k': rstd_k}
    for name, tensor in saved.items():
        check.shape(tensor, name, 'num_tokens num_streams', dtype=torch.float32, **known)
        check.contiguous(tensor, name)
    check.same_device(hidden_states=x, grad_out=dy, **saved)
    dx = torch.empty_like(x)
    if dkv is None:
        dk, dv = torch.empty_like(x), x.new_empty(num_tokens, hidden)
    else:
        dk, dv = dkv[:, :num_streams], dkv[:, num_streams]
    num_partials = num_partials_for(num_tokens, num_streams, hidden)
    partial = weight_fused.new_empty(num_partials, num_streams, hidden)
    piece = check.vector_bytes(dy, x, k, v, weight_fused) // x.element_size()
    static = (hidden, num_streams, piece, image_token_mask is not None, residual)
    inputs = (dy, x, k, v.unsqueeze(1), weight_fused, *saved.values(), as_bytes(image_token_mask))
    launch(
        gate_bwd_kernel, static, *inputs, dx, dk, dv.unsqueeze(1), partial, clamp_value, size=num_partials
    )  # without tokens there are still zeros to write
    return dx, dk, dv, partial


@op(outputs='dx dk dv dweight_partial')
def gate_bwd_partial(
    dy: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `gate`, that of the weights as partial sums.

    Args:
        dy: gradient of y, (num_tokens, num_streams, hidden) bfloat16, contiguous.
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous.
        k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32.
        dot: as the forward op returned it, like the following three.
        gate_score: (num_tokens, num_streams) float32.
        rstd_x: (num_tokens, num_streams) float32.
        rstd_k: (num_tokens, num_streams) float32.
        clamp_value: that of the forward op.
        image_token_mask: that of the forward op.
        residual: that of the forward op.

    Returns:
        dx, dk and dv, contiguous, and (num_partials, num_streams, hidden) float32, whose sum over the first dimension
        is the gradient of weight_fused; num_partials depends on the shape alone.
    """
    saved = (dot, gate_score, rstd_x, rstd_k)
    return _gate_bwd(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)


@op(outputs='dx dkv dweight_partial')
def packed_gate_bwd_partial(
    dy: Tensor,
    x: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gate_bwd_partial` with keys and values, and their gradients, in one tensor.

    Args:
        dy: gradient of y, (num_tokens, num_streams, hidden) bfloat16, contiguous.
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous.
        kv: (num_tokens, num_streams + 1, hidden) bfloat16, the keys and then the value of each token.
        weight_fused: (num_streams, hidden) float32.
        dot: as the forward op returned it, like the following three.
        gate_score: (num_tokens, num_streams) float32.
        rstd_x: (num_tokens, num_streams) float32.
        rstd_k: (num_tokens, num_streams) float32.
        clamp_value: that of the forward op.
        image_token_mask: that of the forward op.
        residual: that of the forward op.

    Returns:
        dx, dkv (contiguous) and the partial sums of the gradient of weight_fused.
    """
    saved = (dot, gate_score, rstd_x, rstd_k)
    k, v = split_packed(kv, x)
    dkv = kv.new_empty(kv.shape)
    dx, _, _, partial = _gate_bwd(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual, dkv)
    return dx, dkv, partial


@op(outputs='dx dk dv dweight_fused')
def gate_bwd(
    dy: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `gate`.

    Args:
        dy: gradient of y, (num_tokens, num_streams, hidden) bfloat16, contiguous.
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous.
        k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32.
        dot: as the forward op returned it, like the following three.
        gate_score: (num_tokens, num_streams) float32.
        rstd_x: (num_tokens, num_streams) float32.
        rstd_k: (num_tokens, num_streams) float32.
        clamp_value: that of the forward op.
        image_token_mask: that of the forward op.
        residual: that of the forward op.

    Returns:
        dx, dk, dv and dweight_fused like x, k, v and weight_fused, all deterministic.
    """
    saved = (dot, gate_score, rstd_x, rstd_k)
    dx, dk, dv, partial = _gate_bwd(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)
    return dx, dk, dv, sum_of_partials(partial)


def _split_gate_bwd(
    grad_out: Tensor, hidden_states: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    return gate_bwd_partial(grad_out, hidden_states, k, v, *args, **kwargs)


def _packed_gate_bwd(
    grad_out: Tensor, hidden_states: Tensor, kv: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    return packed_gate_bwd_partial(grad_out, hidden_states, kv, *args, **kwargs)


def engram_gate_bwd(grad_out: Tensor, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Gradients of `engram_gate_fwd`, that of the fused weights as partial sums for `grad_w_reduce`.

    Two forms, with keys and values apart or packed in one tensor:

        engram_gate_bwd(grad_out, hidden_states, k, v, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value,
                        image_token_mask=None, residual=True) -> (grad_x, grad_k, grad_v, grad_w_partial)
        engram_gate_bwd(grad_out, hidden_states, kv, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value,
                        image_token_mask=None, residual=True) -> (grad_x, grad_kv, grad_w_partial)

    Args:
        grad_out: gradient of the result, (num_tokens, num_streams, hidden) bfloat16, contiguous.
        hidden_states: (num_tokens, num_streams, hidden) bfloat16, contiguous, as given to the forward function.
        args: the other arguments of either form, in order: what the forward function was given and what it returned.
        kwargs: or by name.

    Returns:
        Contiguous gradients, and (num_partials, num_streams, hidden) float32 that adds up to the gradient of
        weight_fused. Deterministic; num_partials depends on the shape alone, not on the GPU.
    """
    form = _packed_gate_bwd if is_packed(args, kwargs) else _split_gate_bwd
    return form(grad_out, hidden_states, *args, **kwargs)


# Cases --------------------------------------------------------------------------------------


def _make(clamp_value: float = 1e-6, residual: bool = True, **case) -> dict:
    made = random_gate(**case)
    x = made['x']
    return made | dict(
        dy=torch.randn_like(x),
        dot=torch.randn(x.shape[:2]) * 20,
        gate_score=torch.rand(x.shape[:2]),
        rstd_x=torch.rand(x.shape[:2]) + 0.5,
        rstd_k=torch.rand(x.shape[:2]) + 0.5,
        clamp_value=clamp_value,
        residual=residual,
    )


def _make_packed(**case) -> dict:
    made = _make(**case)
    k, v = made.pop('k'), made.pop('v')
    return made | dict(kv=torch.cat([k, v[:, None]], dim=1))


SMOKE = (
    grid(num_tokens=[0, 1], hidden=[256])
    + grid(num_tokens=[3], hidden=[64], num_streams=[1])
    + grid(num_tokens=[3], hidden=[576, 2560], num_streams=[3])  # idle threads, one warp and several
    + grid(num_tokens=[5], hidden=[512], num_streams=[8], layout=['packed', 'odd'], images=[0.4])
    + grid(num_tokens=[4], hidden=[128], clamp_value=[0.5], images=[0.5], residual=[False])
    + grid(num_tokens=[3], hidden=[18432], num_streams=[1])  # weights that shared memory does not hold
)
FULL = grid(num_tokens=[1, 777, 4001], hidden=[576, 2048, 2560, 4096, 7168, 8192], num_streams=[4]) + grid(
    num_tokens=[333], hidden=[64, 1280, 16384, 32768], num_streams=[1, 5, 8], layout=['packed', 'odd'], images=[0.1]
)
FAR = grid(num_tokens=[257], hidden=[512], num_streams=[3], layout=['far'])  # offsets beyond 2^31
BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[4096])
    + grid(num_tokens=[4001], hidden=[2048, 2560, 3072, 5120, 6144, 7168, 8192])
    + grid(num_tokens=[64], hidden=[7168])
)
BOUNDS = dict(rtol=1e-4, atol=1e-4)  # sums of thousands of float32 products, in another order

gate_bwd_partial.cases(make=_make, match=BOUNDS, smoke=SMOKE, full=FULL + FAR, bench=BENCH)
packed_gate_bwd_partial.cases(
    make=_make_packed, match=BOUNDS, smoke=SMOKE[:1] + SMOKE[2:3], full=FULL[:6], bench=BENCH[1:2]
)
gate_bwd.cases(make=_make, match=BOUNDS, smoke=SMOKE[:3], full=FULL[:6], bench=BENCH[:2])
