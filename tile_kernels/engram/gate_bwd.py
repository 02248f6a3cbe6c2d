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
from tile_kernels.core.forms import shown_as
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
from tile_kernels.engram.gate_bwd_kernels import gate_bwd_kernel
from tile_kernels.engram.sum_partials import sum_of_partials

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
    launch(gate_bwd_kernel, static, *inputs, dx, dk, dv.unsqueeze(1), partial, clamp_value)
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
    grad_out: Tensor,
    hidden_states: Tensor,
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
) -> tuple[Tensor, ...]:
    saved = (dot, gate_score, rstd_x, rstd_k)
    options = (clamp_value, image_token_mask, residual)
    return gate_bwd_partial(grad_out, hidden_states, k, v, weight_fused, *saved, *options)


def _packed_gate_bwd(
    grad_out: Tensor, hidden_states: Tensor, kv: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    return packed_gate_bwd_partial(grad_out, hidden_states, kv, *args, **kwargs)


@shown_as(_split_gate_bwd, _packed_gate_bwd)
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
    form = _packed_gate_bwd if is_packed(hidden_states, args, kwargs) else _split_gate_bwd
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
