"""What the gradient of the Engram gate means, in plain PyTorch."""

from torch import Tensor

from tile_kernels.reference.engram.gate_bwd_partial import gate_bwd_partial


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
    """Gradients of `gate`."""
    saved = (dot, gate_score, rstd_x, rstd_k)
    dx, dk, dv, partial = gate_bwd_partial(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)
    return dx, dk, dv, partial.sum(0)
