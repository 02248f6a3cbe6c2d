"""What a Sinkhorn step means, in plain PyTorch."""

import torch
from torch import Tensor

from tile_kernels.engram._checks import sinkhorn_partials


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


engram_sinkhorn_step_ref = engram_sinkhorn_step
