"""What the ops of `tile_kernels.rand` mean, in plain PyTorch."""

from tile_kernels.reference.rand.normal import normal_

__all__ = ['normal_']
