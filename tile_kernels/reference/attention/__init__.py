"""Twins of the attention ops."""

from tile_kernels.reference.attention.attend import attend, attend_bwd
from tile_kernels.reference.attention.combine import combine
from tile_kernels.reference.attention.decode import decode
from tile_kernels.reference.attention.mla_decode import mla_decode
from tile_kernels.reference.attention.pack_mla_cache import pack_mla_cache
from tile_kernels.reference.attention.sparse_mla import sparse_mla, sparse_mla_bwd
from tile_kernels.reference.attention.unpack_mla_cache import unpack_mla_cache

__all__ = [
    'attend',
    'attend_bwd',
    'combine',
    'decode',
    'mla_decode',
    'pack_mla_cache',
    'sparse_mla',
    'sparse_mla_bwd',
    'unpack_mla_cache',
]


def __dir__() -> list[str]:
    return __all__
