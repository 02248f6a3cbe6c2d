"""Gradient of the Engram gate; `gate.py` has the forward mathematics and names.

    grad[t, c]   = sum_h dy[t, c, h] * v[t, h]                               the gradient of the gate
    s            = rstd_x * rstd_k / sqrt(hidden),   g = gate_score[t, c]
    d[t, c]      = grad * g * (1 - g) * sqrt(s / |dot|) / 2                  0 where |dot| * s < clamp_value
    dx[t, c, h]  = dy[t, c, h] + d * (k[t, c, h] * w[c, h] - x[t, c, h] * dot * rstd_x^2 / hidden)
    dk[t, c, h]  = d * (x[t, c, h] * w[c, h] - k[t, c, h] * dot * rstd_k^2 / hidden)
    dv[t, h]     = sum_c g[t, c] * dy[t, c, h]
    dw[c, h]     = sum_t d[t, c] * x[t, c, h] * k[t, c, h]

A block owns one stream of every num_partials-th token. It keeps its weights and its sum over tokens, dw, in shared
memory, where each thread accesses only its own channels. The blocks of a token divide the channels of dv among them.
Each block reads dy of the other streams at about the same time as their blocks, so memory is read once. The number of
partial sums depends on the shape alone, so results are the same on every GPU. Memory bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.engram._checks import as_bytes, check_gate, num_partials_for
from tile_kernels.engram._samples import (
    GATE_BWD_BENCH,
    GATE_BWD_BOUNDS,
    GATE_BWD_FULL,
    GATE_BWD_SMOKE,
    gate_bwd_arguments,
)
from tile_kernels.engram.gate_bwd_kernels import gate_bwd_kernel
from tile_kernels.engram.grad_w_reduce import sum_of_partials


def run_gate_bwd(
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
    """Compute dx, dk, dv and the partial sums of dweight_fused; dk and dv are views of `dkv` if given."""
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
    inputs = (x, k, v.unsqueeze(1), weight_fused, *saved.values(), as_bytes(image_token_mask))
    launch(gate_bwd_kernel, static, dy, *inputs, dx, dk, dv.unsqueeze(1), partial, clamp_value)
    return dx, dk, dv, partial


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
    dx, dk, dv, partial = run_gate_bwd(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)
    return dx, dk, dv, sum_of_partials(partial)


# Cases ---------------------------------------------------------------------------------------


gate_bwd.cases(
    make=gate_bwd_arguments,
    match=GATE_BWD_BOUNDS,
    smoke=GATE_BWD_SMOKE[:3],
    full=GATE_BWD_FULL[:6],
    bench=GATE_BWD_BENCH[:2],
)
