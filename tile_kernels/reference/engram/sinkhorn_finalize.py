"""What the end of the Sinkhorn steps means, in plain PyTorch."""

from torch import Tensor


def sinkhorn_finalize(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float) -> Tensor:
    """The scaled matrix, each row brought to length alpha."""
    x = row_scale.unsqueeze(1) * matrix.float() * col_scale
    return (x * (alpha / (x.square().sum(1, keepdim=True).sqrt() + eps))).to(matrix.dtype)


def sinkhorn_finalize_(
    out: Tensor, matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float
) -> None:
    """`sinkhorn_finalize` into memory of the caller."""
    x = row_scale.unsqueeze(1) * matrix.float() * col_scale
    out.copy_(x * (alpha / (x.square().sum(1, keepdim=True).sqrt() + eps)))


def engram_sinkhorn_finalize(
    matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float, alpha: float, out: Tensor | None = None
) -> Tensor:
    """The scaled matrix, each row brought to length alpha, in `out` if it is given."""
    if out is None:
        return sinkhorn_finalize(matrix, row_scale, col_scale, eps, alpha)
    sinkhorn_finalize_(out, matrix, row_scale, col_scale, eps, alpha)
    return out


engram_sinkhorn_finalize_ref = engram_sinkhorn_finalize
