"""`mhc_multilayer_recompute` where TileKernels has it."""

from tile_kernels.mhc.recompute import mhc_multilayer_recompute

__all__ = ['mhc_multilayer_recompute']
