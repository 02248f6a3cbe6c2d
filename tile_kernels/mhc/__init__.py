"""Manifold hyper-connections: several residual streams, mixed before and after every layer."""

from tile_kernels.mhc import apply_mix as _apply_mix
from tile_kernels.mhc import big_fuse as _big_fuse
from tile_kernels.mhc import expand as _expand
from tile_kernels.mhc import norm_fn as _norm_fn
from tile_kernels.mhc import norm_weight as _norm_weight
from tile_kernels.mhc import post as _post
from tile_kernels.mhc import reduce_parts as _reduce_parts
from tile_kernels.mhc import sinkhorn as _sinkhorn
from tile_kernels.mhc import split_mixes as _split_mixes

__all__ = []
