"""Recompute the inputs and residuals of many layers."""

from tile_kernels.mhc.recompute import mhc_multilayer_recompute

__all__ = ['mhc_multilayer_recompute']
