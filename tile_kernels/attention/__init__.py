"""Attention: softmax(q k^T) v for training, prefill and decode, and the merge of parts.

Smoke cases agree on an H200; `docs/notes/first-gpu-run.md` has times and gaps.
"""

from tile_kernels.attention.append import append
from tile_kernels.attention.attend import attend, attend_bwd, flash_attn_func, flash_attn_varlen_func
from tile_kernels.attention.block_sparse import block_sparse, block_sparse_attn_func, block_sparse_bwd
from tile_kernels.attention.combine import combine, flash_attn_combine
from tile_kernels.attention.decode import decode, flash_attn_with_kvcache
from tile_kernels.attention.fp8_mqa_logits import fp8_mqa_logits
from tile_kernels.attention.fp8_paged_mqa_logits import fp8_paged_mqa_logits
from tile_kernels.attention.index_topk import index_topk
from tile_kernels.attention.kv_cache import KVCache
from tile_kernels.attention.latent_cache import LatentCache
from tile_kernels.attention.mla_decode import MLASchedule, flash_mla_with_kvcache, get_mla_metadata, mla_decode
from tile_kernels.attention.mqa_logits import mqa_logits, mqa_logits_bwd
from tile_kernels.attention.nsa_attend import nsa_attend, nsa_attend_bwd
from tile_kernels.attention.nsa_scores import nsa_scores
from tile_kernels.attention.pack_mla_cache import pack_mla_cache
from tile_kernels.attention.parallel_nsa import parallel_nsa
from tile_kernels.attention.scaled_dot_product_attention import scaled_dot_product_attention
from tile_kernels.attention.sparse_mla import flash_mla_sparse_fwd, sparse_mla, sparse_mla_bwd
from tile_kernels.attention.sparse_mla_weights import sparse_mla_weights
from tile_kernels.attention.topk_indices import topk_indices
from tile_kernels.attention.unpack_mla_cache import unpack_mla_cache

__all__ = [
    'KVCache',
    'LatentCache',
    'MLASchedule',
    'append',
    'attend',
    'attend_bwd',
    'block_sparse',
    'block_sparse_attn_func',
    'block_sparse_bwd',
    'combine',
    'decode',
    'flash_attn_combine',
    'flash_attn_func',
    'flash_attn_varlen_func',
    'flash_attn_with_kvcache',
    'flash_mla_sparse_fwd',
    'flash_mla_with_kvcache',
    'fp8_mqa_logits',
    'fp8_paged_mqa_logits',
    'get_mla_metadata',
    'index_topk',
    'mla_decode',
    'mqa_logits',
    'mqa_logits_bwd',
    'nsa_attend',
    'nsa_attend_bwd',
    'nsa_scores',
    'pack_mla_cache',
    'parallel_nsa',
    'scaled_dot_product_attention',
    'sparse_mla',
    'sparse_mla_bwd',
    'sparse_mla_weights',
    'topk_indices',
    'unpack_mla_cache',
]


def __dir__() -> list[str]:
    return __all__
