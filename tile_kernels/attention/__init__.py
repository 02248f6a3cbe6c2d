"""Attention: softmax(q k^T) v for training, prefill and decode, and the merge of parts.

Nothing of this family has run on a GPU yet: kernels are checked in the interpreter, lowered and compiled.
"""

from tile_kernels.attention.attend import attend, attend_bwd, flash_attn_func, flash_attn_varlen_func
from tile_kernels.attention.combine import combine, flash_attn_combine
from tile_kernels.attention.decode import decode, flash_attn_with_kvcache
from tile_kernels.attention.kv_cache import KVCache
from tile_kernels.attention.latent_cache import LatentCache
from tile_kernels.attention.mla_decode import MLASchedule, flash_mla_with_kvcache, get_mla_metadata, mla_decode
from tile_kernels.attention.pack_mla_cache import pack_mla_cache
from tile_kernels.attention.scaled_dot_product_attention import scaled_dot_product_attention
from tile_kernels.attention.sparse_mla import flash_mla_sparse_fwd, sparse_mla, sparse_mla_bwd
from tile_kernels.attention.unpack_mla_cache import unpack_mla_cache

__all__ = [
    'KVCache',
    'LatentCache',
    'MLASchedule',
    'attend',
    'attend_bwd',
    'combine',
    'decode',
    'flash_attn_combine',
    'flash_attn_func',
    'flash_attn_varlen_func',
    'flash_attn_with_kvcache',
    'flash_mla_sparse_fwd',
    'flash_mla_with_kvcache',
    'get_mla_metadata',
    'mla_decode',
    'pack_mla_cache',
    'scaled_dot_product_attention',
    'sparse_mla',
    'sparse_mla_bwd',
    'unpack_mla_cache',
]


def __dir__() -> list[str]:
    return __all__
