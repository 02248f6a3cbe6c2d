"""`mhc_multilayer_recompute` under the module path of TileKernels."""

from tile_kernels.mhc.recompute import mhc_multilayer_recompute

__all__ = ['mhc_multilayer_recompute']
