"""`QuantTensor` where TileKernels has it."""

from tile_kernels.core.formats import QuantTensor

__all__ = ['QuantTensor']
