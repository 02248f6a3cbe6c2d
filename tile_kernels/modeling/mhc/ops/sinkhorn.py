"""Doubly stochastic combinations."""

from torch import Tensor

from tile_kernels.mhc.sinkhorn import sinkhorn


def sinkhorn_normalize(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Scale columns and rows of softmax(x) + eps in turn, columns `repeat` times; differentiable.

    Args:
        x: (..., n, n) float32, contiguous.
        repeat: number of scalings of columns; rows are scaled once less.
        eps: added to the softmax and to every sum.

    Returns:
        Shape of x; columns sum to 1, rows nearly.
    """
    return sinkhorn(x, repeat, eps)
