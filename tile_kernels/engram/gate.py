"""Engram gate: how much of an embedding's value each residual stream of a token takes in.

    dot[t, c]    = sum_h x[t, c, h] * weight_fused[c, h] * k[t, c, h]
    rstd_x[t, c] = rsqrt(sum_h x[t, c, h]^2 / hidden + eps)                 rstd_k likewise from k
    z            = dot * rstd_x * rstd_k / sqrt(hidden)
    gate[t, c]   = sigmoid(copysign(sqrt(max(|z|, clamp_value)), z))
    y[t, c, h]   = x[t, c, h] + gate[t, c] * v[t, h]                        all in float32, rounded once

A block owns one stream of one token: all its rows are on their way before the first sum, and x and v stay in registers
until the gate is known. Blocks of the streams of a token start together, so v leaves memory once; the weights stay in
the caches. Image tokens (a mask) take in nothing. Memory bound: the floor is reading x, k and v and writing y.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.forms import shown_as
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro, resident_blocks
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.engram._gate import as_bytes, check_gate, is_packed, random_gate, split_packed
from tile_kernels.engram._rows import (
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
from tile_kernels.engram.gate_bwd import gate_bwd

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, piece: int, saving: bool, masked: bool, residual: bool, size: int) -> dict:
    """Twelve loads in flight for each thread; few short rows are shared by more threads, which shortens the wait."""
    few = size * num_streams <= 512 and hidden <= 4096
    return dict(vectors=2 if few else 4, resident_threads=512)


# Kernel -------------------------------------------------------------------------------------


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
    """`piece` channels in an access; x and y may be one tensor; `zero` is 0, which the compiler must not know."""
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


# Ops ----------------------------------------------------------------------------------------


def _gate(
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
) -> tuple[Tensor, ...]:
    num_tokens, num_streams, hidden = check_gate(x, k, v, weight_fused, image_token_mask)
    y = torch.empty_like(x) if y is None else y
    saved = [x.new_empty(num_tokens, num_streams, dtype=torch.float32) for _ in range(4)] if saving else [None] * 4
    piece = check.vector_bytes(x, k, v, weight_fused) // x.element_size()
    static = (hidden, num_streams, piece, saving, image_token_mask is not None, residual)
    tensors = (x, k, v.unsqueeze(1), weight_fused, as_bytes(image_token_mask), y)
    launch(gate_kernel, static, *tensors, *saved, eps, clamp_value, 0)
    return (y, *saved)


@op(outputs='y dot gate_score rstd_x rstd_k', backward=gate_bwd)
def gate(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gate the value of each token into its residual streams, and keep what the gradient needs.

    Args:
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous; 1 to 8 streams, hidden a multiple of 64.
        k: (num_tokens, num_streams, hidden) bfloat16, any strides but a dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32, the product of both norm weights.
        eps: added to the mean squares.
        clamp_value: lower bound of |z| under the root.
        image_token_mask: (num_tokens,) bool, tokens that take in nothing; their gate, dot and rstd are 0.
        residual: add x to the result.

    Returns:
        y like x, and dot, gate, rstd_x and rstd_k, each (num_tokens, num_streams) float32.
    """
    return _gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual, None, True)


@op(outputs='y')
def gate_inference(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> Tensor:
    """`gate` without what the gradient needs.

    Args:
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous.
        k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32.
        eps: added to the mean squares.
        clamp_value: lower bound of |z| under the root.
        image_token_mask: (num_tokens,) bool, tokens that take in nothing.
        residual: add x to the result.

    Returns:
        y like x.
    """
    return _gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual, None, False)[0]


@op()
def gate_(
    x: Mut,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> None:
    """`gate_inference` in place.

    Args:
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous; replaced by the result.
        k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32.
        eps: added to the mean squares.
        clamp_value: lower bound of |z| under the root.
        image_token_mask: (num_tokens,) bool, tokens that take in nothing.
        residual: add x to the result.
    """
    _gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual, x, False)


def _gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
    residual: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    given = (hidden_states, k, v, weight_fused, eps, clamp_value, image_token_mask, residual)
    if inplace and save_for_backward:
        check.fail('inplace', 'must come with save_for_backward=False', 'save_for_backward=True')
    if inplace:
        gate_(*given)
        return hidden_states, None, None, None, None
    if save_for_backward:
        return gate(*given)
    return gate_inference(*given), None, None, None, None


def _packed_gate_fwd(
    hidden_states: Tensor, kv: Tensor, weight_fused: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    return _gate_fwd(hidden_states, *split_packed(kv, hidden_states), weight_fused, *args, **kwargs)


@shown_as(_gate_fwd, _packed_gate_fwd)
def engram_gate_fwd(
    hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gate the value of each token into its residual streams.

    Two forms, with keys and values apart or packed in one tensor:

        engram_gate_fwd(hidden_states, k, v, weight_fused, eps, clamp_value, save_for_backward=True,
                        image_token_mask=None, inplace=False, residual=True)
        engram_gate_fwd(hidden_states, kv, weight_fused, eps, clamp_value, save_for_backward=True,
                        image_token_mask=None, inplace=False, residual=True)

    Differentiable in hidden_states, k, v (or kv) and weight_fused if `save_for_backward`.

    Args:
        hidden_states: (num_tokens, num_streams, hidden) bfloat16, contiguous; 1 to 8 streams, hidden a multiple of 64.
        args: the other arguments of either form, in order.
        kwargs: or by name.
            k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
            v: (num_tokens, hidden) bfloat16, dense last dimension.
            kv: (num_tokens, num_streams + 1, hidden) bfloat16, the keys and then the value of each token.
            weight_fused: (num_streams, hidden) float32; see `fused_weight`.
            eps: added to the mean squares.
            clamp_value: lower bound of |z| under the root.
            save_for_backward: return what `engram_gate_bwd` needs.
            image_token_mask: (num_tokens,) bool, tokens that take in nothing; what is saved of them is 0.
            inplace: write to hidden_states; not with save_for_backward.
            residual: add hidden_states to the result.

    Returns:
        The new hidden states, then dot, gate, rstd_x and rstd_k, each (num_tokens, num_streams) float32 or None.
    """
    form = _packed_gate_fwd if is_packed(hidden_states, args, kwargs) else _gate_fwd
    return form(hidden_states, *args, **kwargs)


# Cases --------------------------------------------------------------------------------------


def _make(eps: float = 1e-20, clamp_value: float = 1e-6, residual: bool = True, **case) -> dict:
    return random_gate(**case) | dict(eps=eps, clamp_value=clamp_value, residual=residual)


SMOKE = (
    grid(num_tokens=[0, 1], hidden=[256])
    + grid(num_tokens=[3], hidden=[64], num_streams=[1])
    + grid(num_tokens=[3], hidden=[576, 2560], num_streams=[3])  # idle threads, one warp and several
    + grid(num_tokens=[5], hidden=[512], num_streams=[8], layout=['packed', 'odd'], images=[0.4])
    + grid(num_tokens=[300], hidden=[64], clamp_value=[0.01])  # many rows; no steep roots
    + grid(num_tokens=[4], hidden=[128], eps=[1e-6], clamp_value=[0.5], images=[0.5], residual=[False])
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
BOUNDS = dict(rtol=2e-5, atol=1e-4)  # float32 sums of up to 8192 products of size 1, in another order

gate.cases(make=_make, match=BOUNDS, smoke=SMOKE, full=FULL + FAR, bench=BENCH)
gate_inference.cases(make=_make, match=BOUNDS, smoke=SMOKE[:1] + SMOKE[-3:], full=FULL[:6], bench=BENCH[:2])
gate_.cases(make=_make, match=BOUNDS, smoke=SMOKE[:1] + SMOKE[-3:], full=FULL[:6], bench=BENCH[1:2])
