"""What the ops of `tile_kernels.transpose` mean, in plain PyTorch."""

from tile_kernels.reference.transpose.batched_transpose import batched_transpose, batched_transpose_bwd
from tile_kernels.reference.transpose.transpose import transpose

__all__ = ['batched_transpose', 'batched_transpose_bwd', 'transpose']
