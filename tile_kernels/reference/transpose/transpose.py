"""What the transpose of a matrix means, in plain PyTorch."""

import torch
from torch import Tensor


def transpose(x: Tensor) -> Tensor:
    """Transpose a matrix into fresh contiguous memory."""
    return x.t().clone(memory_format=torch.contiguous_format)
