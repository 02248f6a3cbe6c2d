"""What the twins of RMS norm share: float32, one rounding for each operation."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.quant._common import divide


def normalize(z: Tensor, weight: Tensor | None, eps: float, out_scale: float) -> tuple[Tensor, Tensor]:
    """The rows of z divided by the root of their mean square, times weight and scale, in float32; and that factor."""
    z = z.float()
    mean_square = divide(z.square().sum(dim=-1), float(max(z.shape[-1], 1)))
    rstd = (1 / (mean_square + eps).double().sqrt()).float()
    factor = out_scale if weight is None else weight.float() * out_scale
    return z * rstd.unsqueeze(-1) * factor, rstd


def summed(x: Tensor, residual: Tensor | None) -> Tensor:
    """What is normalized: x, or the sum with the residual, rounded to the dtype of x."""
    return x if residual is None else (x.float() + residual.float()).to(x.dtype)
