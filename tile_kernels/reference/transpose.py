"""What the ops of `tile_kernels.transpose` mean, in plain PyTorch."""

import torch
from torch import Tensor


def batched_transpose(x: Tensor) -> Tensor:
    """Transpose every matrix of a batch into fresh contiguous memory."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def batched_transpose_bwd(dy: Tensor) -> Tensor:
    """Gradient of `batched_transpose`."""
    return dy.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def transpose(x: Tensor) -> Tensor:
    """Transpose a matrix into fresh contiguous memory."""
    return x.t().clone(memory_format=torch.contiguous_format)
