"""The Sinkhorn steps of the Engram optimiser."""

import torch
from torch import Tensor

from tile_kernels.engram._sinkhorn import sinkhorn_partials


def _fma(a: Tensor | float, b: Tensor | float, c: Tensor) -> Tensor:
    """Multiply and add, rounded once: float64 holds the product of two float32 numbers exactly."""
    return (torch.as_tensor(a, device=c.device).double() * torch.as_tensor(b, device=c.device).double() + c).float()


def engram_sinkhorn_momentum_update(
    grad: Tensor, momentum_buffer: Tensor, beta1: float, nesterov: bool = True
) -> Tensor:
    """Move the momentum towards the gradient, in place; the update in float32."""
    g, m = grad.float(), momentum_buffer.float()
    keep, take = torch.tensor(beta1, device=g.device), torch.tensor(1 - beta1, device=g.device)
    m = _fma(m, keep, take * g)
    momentum_buffer.copy_(m)
    return _fma(g, take, keep * m) if nesterov else m


def engram_sinkhorn_step(matrix: Tensor, row_scale: Tensor, col_scale: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalise the rows of the scaled matrix; sums over every num_partials-th row of the squares of what results."""
    num_rows, num_columns = matrix.shape
    x = row_scale.unsqueeze(1) * matrix.float() * col_scale
    norm = x.square().sum(1).sqrt()
    inverse = 1.0 / (norm + eps)
    num_partials = sinkhorn_partials(num_rows)
    partial = x.new_zeros(num_partials, num_columns)
    squares = (x * inverse.unsqueeze(1)).square()
    partial.index_add_(0, torch.arange(num_rows, device=x.device) % num_partials, squares)
    row_scale.copy_(row_scale * inverse)
    return norm, partial


def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """Add up the partial sums of a step."""
    col_sumsq.copy_(col_sumsq_partial.sum(0))


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


engram_sinkhorn_momentum_update_ref = engram_sinkhorn_momentum_update
engram_sinkhorn_step_ref = engram_sinkhorn_step
engram_sinkhorn_finalize_ref = engram_sinkhorn_finalize
