"""What the transpose of a batch means, in plain PyTorch."""

import torch
from torch import Tensor


def batched_transpose(x: Tensor) -> Tensor:
    """Transpose every matrix of a batch into fresh contiguous memory."""
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def batched_transpose_bwd(dy: Tensor) -> Tensor:
    """Gradient of `batched_transpose`."""
    return dy.transpose(1, 2).clone(memory_format=torch.contiguous_format)
