"""Twins of `mhc.sinkhorn`."""

from torch import Tensor


def _scalings(x: Tensor, repeat: int, eps: float) -> list[tuple[int, Tensor, Tensor]]:
    """Every scaling: the dimension it sums over, its factors, and the matrices after it."""
    num_rows, num_columns = x.shape[-2:]
    y, done = x.softmax(-1) + eps, []
    for step in range(2 * repeat - 1):
        dim, target = (-2, num_rows / num_columns) if step % 2 == 0 else (-1, 1.0)
        factor = target / (y.sum(dim, keepdim=True) + eps)
        y = y * factor
        done.append((dim, factor, y))
    return done


def sinkhorn(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Rows that sum to 1 and columns that sum to rows / columns, nearly: alternate the two scalings."""
    return _scalings(x, repeat, eps)[-1][2]


def sinkhorn_bwd(dy: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Gradient of `sinkhorn`: the rule of a quotient for every scaling, then that of the softmax."""
    num_rows, num_columns = x.shape[-2:]
    for dim, factor, y in reversed(_scalings(x, repeat, eps)):
        target = num_rows / num_columns if dim == -2 else 1.0
        dy = factor * (dy - (dy * y).sum(dim, keepdim=True) / target)
    p = x.softmax(-1)
    return p * (dy - (dy * p).sum(-1, keepdim=True))


def sinkhorn_normalize(conn_weights: Tensor, num_iters: int = 20, eps: float = 1e-6) -> Tensor:
    """Scale the rows and columns of every matrix in turn."""
    return sinkhorn(conn_weights, num_iters, eps)


def sinkhorn_normalize_ref(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Scale columns and rows in turn, in float64."""
    dtype, x = x.dtype, x.double().softmax(-1) + eps
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x.to(dtype)
