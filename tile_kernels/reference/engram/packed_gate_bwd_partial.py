"""What the gradient of the packed Engram gate means, in plain PyTorch."""

import torch
from torch import Tensor

from tile_kernels.reference.engram.gate_bwd_partial import gate_bwd_partial


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
    """`gate_bwd_partial` with keys and values in one tensor."""
    k, v = kv[:, :-1], kv[:, -1]
    saved = (dot, gate_score, rstd_x, rstd_k)
    dx, dk, dv, partial = gate_bwd_partial(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)
    return dx, torch.cat([dk, dv.unsqueeze(1)], dim=1), partial
