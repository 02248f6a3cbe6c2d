"""The kernel of the Engram gate; `gate.py` has the mathematics.

A block owns one stream of one token. It issues the loads of all its rows before the first sum, and keeps x and v in
registers until the gate is known. The blocks of the streams of a token start together, so v is read from memory once.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.engram._checks import as_bytes, check_gate
from tile_kernels.engram._macros import (
    FAST_EXP2,
    ROW_PASS_CONFIGS,
    SLOT,
    load_row,
    row_layout,
    sigmoid_of,
    store_slot,
    sum_over_row,
    wait_for,
)

# Config --------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, piece: int, saving: bool, masked: bool, residual: bool, size: int) -> dict:
    """Each thread has twelve loads in flight; few short rows get more threads per row, which lowers the latency."""
    few = size * num_streams <= 512 and hidden <= 4096
    return dict(vectors=2 if few else 4, resident_threads=512)


# Kernel --------------------------------------------------------------------------------------


@macro
def add_products(x_local, k_local, weight_local, sums):
    """Sums of x * w * k, x^2 and k^2 over the channels of a thread."""
    T.clear(sums)
    for i in T.unroll(x_local.shape[0]):
        for e in T.unroll(SLOT):
            x = T.cast(x_local[i, e], T.float32)
            k = T.cast(k_local[i, e], T.float32)
            sums[0] = sums[0] + x * k * weight_local[i, e]
            sums[1] = sums[1] + x * x
            sums[2] = sums[2] + k * k


@macro
def score_of(z, clamp_value):
    """sigmoid(copysign(sqrt(max(|z|, clamp_value)), z)); NaN stays NaN."""
    root = T.sqrt(T.if_then_else(T.abs(z) < clamp_value, clamp_value, T.abs(z)))
    return sigmoid_of(T.if_then_else(z < T.float32(0.0), -root, root))


@kernel(
    choose=choose,
    space=dict(vectors=(2, 4), resident_threads=(512, 640, 768)),
    pass_configs=ROW_PASS_CONFIGS,
    fixed='vectors',
)
def gate_kernel(
    hidden: int,
    num_streams: int,
    piece: int,
    saving: bool,
    masked: bool,
    residual: bool,
    *,
    vectors: int,
    resident_threads: int,
):
    """Accesses have `piece` channels; x and y may be one tensor; `zero` is a 0 that the compiler must not know."""
    row_threads, vectors = row_layout(hidden, vectors)
    num_tokens, v_pitch = T.dynamic('num_tokens'), T.dynamic('v_pitch')
    k_pitch, k_stream_pitch = T.dynamic('k_pitch'), T.dynamic('k_stream_pitch')

    @T.prim_func
    def gate(
        x: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        k: T.StridedTensor((num_tokens, num_streams, hidden), (k_pitch, k_stream_pitch, 1), T.bfloat16),
        v: T.StridedTensor((num_tokens, 1, hidden), (v_pitch, T.dynamic('v_stream_pitch'), 1), T.bfloat16),
        weight_fused: T.Tensor((num_streams, hidden), T.float32),
        image_token_mask: T.Tensor((num_tokens,), T.uint8),
        y: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        dot: T.Tensor((num_tokens, num_streams), T.float32),
        gate_score: T.Tensor((num_tokens, num_streams), T.float32),
        rstd_x: T.Tensor((num_tokens, num_streams), T.float32),
        rstd_k: T.Tensor((num_tokens, num_streams), T.float32),
        eps: T.float32,
        clamp_value: T.float32,
        zero: T.uint32,
    ):
        with T.Kernel(num_tokens * num_streams, threads=row_threads) as pid:
            T.assume(k_pitch % piece == 0)
            T.assume(k_stream_pitch % piece == 0)
            T.assume(v_pitch % piece == 0)
            T.import_source(FAST_EXP2)
            T.annotate_min_blocks_per_sm(resident_blocks(resident_threads, row_threads))
            x_local = T.alloc_local((vectors, SLOT), T.bfloat16)
            k_local = T.alloc_local((vectors, SLOT), T.bfloat16)
            v_local = T.alloc_local((vectors, SLOT), T.bfloat16)
            y_local = T.alloc_local((SLOT,), T.bfloat16)
            weight_local = T.alloc_local((vectors, SLOT), T.float32)
            sums = T.alloc_local((3,), T.float32)
            parts_shared = T.alloc_shared((1, row_threads // WARP, 3), T.float32)
            score = T.alloc_var(T.float32)
            inv_x = T.alloc_var(T.float32)
            inv_k = T.alloc_var(T.float32)
            image = T.alloc_var(T.int32, init=0)
            thread = T.get_thread_binding()
            token, stream = pid // num_streams, pid % num_streams

            if masked:
                image = T.cast(image_token_mask[token], T.int32)
            load_row(x, token, stream, row_threads, piece, x_local)
            T.clear(sums)
            score, inv_x, inv_k = T.float32(0.0), T.float32(0.0), T.float32(0.0)
            if image == 0:
                load_row(k, token, stream, row_threads, piece, k_local)
                load_row(v, token, 0, row_threads, piece, v_local)
                load_row(weight_fused, token, stream, row_threads, max(1, piece // 2), weight_local)
                add_products(x_local, k_local, weight_local, sums)
                wait_for(v_local, zero, sums)
                sum_over_row(sums, parts_shared, 0, row_threads)
                inv_x = T.rsqrt(sums[1] * (1.0 / hidden) + eps)
                inv_k = T.rsqrt(sums[2] * (1.0 / hidden) + eps)
                score = score_of(sums[0] * inv_x * inv_k * (hidden**-0.5), clamp_value)
            for j in T.unroll(vectors):
                for e in T.vectorized(SLOT):
                    kept = T.cast(x_local[j, e], T.float32) if residual else T.float32(0.0)
                    y_local[e] = T.cast(
                        T.if_then_else(image == 0, kept + score * T.cast(v_local[j, e], T.float32), kept), T.bfloat16
                    )
                store_slot(y_local, y, token, stream, j * row_threads + thread, piece)
            if saving and thread == 0:
                dot[token, stream] = sums[0]
                gate_score[token, stream] = score
                rstd_x[token, stream] = inv_x
                rstd_k[token, stream] = inv_k

    return gate


def run_gate(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None,
    residual: bool,
    y: Tensor | None,
    saving: bool,
) -> Any:
    """Launch the gate; returns y (the given `y`, if any) and the four saved tensors, None unless `saving`."""
    num_tokens, num_streams, hidden = check_gate(x, k, v, weight_fused, image_token_mask)
    y = torch.empty_like(x) if y is None else y
    saved = [x.new_empty(num_tokens, num_streams, dtype=torch.float32) for _ in range(4)] if saving else [None] * 4
    piece = check.vector_bytes(x, k, v, weight_fused) // x.element_size()
    static = (hidden, num_streams, piece, saving, image_token_mask is not None, residual)
    tensors = (x, k, v.unsqueeze(1), weight_fused, as_bytes(image_token_mask), y)
    launch(gate_kernel, static, *tensors, *saved, eps, clamp_value, 0)
    return (y, *saved)
