"""What the gradients of RMS norm mean, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_forward`."""
    dx, dweight = _gradients(dy, x, weight, rstd, dz, out_scale)
    return dx, dweight.to(x.dtype if weight is None else weight.dtype)


def norm_backward_(
    weight_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    """Gradients of `norm_forward`, that of the weight added to what is there."""
    dx, dweight = _gradients(dy, x, weight, rstd, dz, out_scale)
    weight_grad.copy_(weight_grad.double() + dweight)
    return dx


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dz: Tensor | None, out_scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight, the latter in float64 and empty without one."""
    rstd = rstd.double().unsqueeze(1)
    normal, upstream = x.double() * rstd, dy.double() * out_scale
    weighted = upstream if weight is None else upstream * weight.double()
    dx = (weighted - normal * (normal * weighted).mean(dim=1, keepdim=True)) * rstd
    if dz is not None:
        dx = dx + dz.double()
    return dx.to(x.dtype), normal.new_empty(0) if weight is None else (normal * upstream).sum(dim=0)


# TileKernels' reference ---------------------------------------------------------------------


def norm_backward_ref(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight, the latter None without one."""
    dx, dweight = norm_backward(out_grad, x, rstd, weight, residual_out_grad, out_scale)
    return dx, None if weight is None else dweight
