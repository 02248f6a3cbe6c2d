"""What the gradient of the Engram gate with partial sums means, in plain PyTorch."""

import torch
from torch import Tensor

from tile_kernels.engram._checks import num_partials_for


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
    """Gradients of `gate` from what it saved, that of the weights as sums over every num_partials-th token."""
    num_tokens, num_streams, hidden = x.shape
    dyf, xf, kf, vf = dy.float(), x.float(), k.float(), v.float()
    s = rstd_x * rstd_k * hidden**-0.5
    dgate = (dyf * vf.unsqueeze(1)).sum(-1)
    slope = dgate * gate_score * (1 - gate_score) * 0.5 * (s / dot.abs()).sqrt()
    slope = slope.where(dot.abs() * s >= clamp_value, 0.0)
    dx = slope.unsqueeze(-1) * (kf * weight_fused - xf * (dot * rstd_x**2 / hidden).unsqueeze(-1))
    dk = slope.unsqueeze(-1) * (xf * weight_fused - kf * (dot * rstd_k**2 / hidden).unsqueeze(-1))
    dv = (gate_score.unsqueeze(-1) * dyf).sum(1)
    dweight = slope.unsqueeze(-1) * xf * kf
    if image_token_mask is not None:
        text = ~image_token_mask[:, None, None]
        dx, dk, dweight, dv = (
            dx.where(text, 0.0),
            dk.where(text, 0.0),
            dweight.where(text, 0.0),
            dv.where(text[:, 0], 0.0),
        )
    dx = dx + dyf if residual else dx
    num_partials = num_partials_for(num_tokens, num_streams, hidden)
    partial = dweight.new_zeros(num_partials, num_streams, hidden)
    partial.index_add_(0, torch.arange(num_tokens, device=x.device) % num_partials, dweight)
    return dx.to(x.dtype), dk.to(x.dtype), dv.to(x.dtype), partial
