"""Rows divided by their Euclidean norm, in float32."""

from torch import Tensor


def l2norm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows, and the factors."""
    rstd = (x.float().square().sum(-1) + 1e-6).rsqrt()
    return (x.float() * rstd[..., None]).to(x.dtype).contiguous(), rstd


def l2norm_bwd(dy: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    """The gradient, from the results."""
    along = (y.float() * dy.float()).sum(-1, keepdim=True)
    return (rstd[..., None] * (dy.float() - y.float() * along)).to(y.dtype)
