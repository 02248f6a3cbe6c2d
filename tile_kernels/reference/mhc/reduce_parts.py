"""Twins of `mhc.reduce_parts`."""

from torch import Tensor


def reduce_parts(
    mul_parts: Tensor, square_parts: Tensor, group: int, eps: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum the parts of a projection and normalize it."""
    mul, square = mul_parts.sum(0), square_parts.sum(0)
    return mul, square, (mul * (square / group + eps).rsqrt().unsqueeze(-1)).sum(1)


def reduce_parts_bwd(dy: Tensor, mul: Tensor, square: Tensor, group: int, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Gradients of the sums of `reduce_parts`."""
    rstd = (square / group + eps).rsqrt()
    return dy.unsqueeze(1) * rstd.unsqueeze(-1), (dy.unsqueeze(1) * mul).sum(-1) * rstd**3 / (-2 * group)
