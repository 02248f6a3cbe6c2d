"""Twins of the attention ops."""

from tile_kernels.reference.attention.append import append
from tile_kernels.reference.attention.attend import attend, attend_bwd
from tile_kernels.reference.attention.block_sparse import block_sparse, block_sparse_bwd
from tile_kernels.reference.attention.combine import combine
from tile_kernels.reference.attention.decode import decode
from tile_kernels.reference.attention.fp8_mqa_logits import fp8_mqa_logits
from tile_kernels.reference.attention.fp8_paged_mqa_logits import fp8_paged_mqa_logits
from tile_kernels.reference.attention.index_topk import index_topk
from tile_kernels.reference.attention.mla_decode import mla_decode
from tile_kernels.reference.attention.mqa_logits import mqa_logits, mqa_logits_bwd
from tile_kernels.reference.attention.nsa_attend import nsa_attend, nsa_attend_bwd
from tile_kernels.reference.attention.nsa_scores import nsa_scores
from tile_kernels.reference.attention.pack_mla_cache import pack_mla_cache
from tile_kernels.reference.attention.sparse_mla import sparse_mla, sparse_mla_bwd
from tile_kernels.reference.attention.sparse_mla_weights import sparse_mla_weights
from tile_kernels.reference.attention.topk_indices import topk_indices
from tile_kernels.reference.attention.unpack_mla_cache import unpack_mla_cache

__all__ = [
    'append',
    'attend',
    'attend_bwd',
    'block_sparse',
    'block_sparse_bwd',
    'combine',
    'decode',
    'fp8_mqa_logits',
    'fp8_paged_mqa_logits',
    'index_topk',
    'mla_decode',
    'mqa_logits',
    'mqa_logits_bwd',
    'nsa_attend',
    'nsa_attend_bwd',
    'nsa_scores',
    'pack_mla_cache',
    'sparse_mla',
    'sparse_mla_bwd',
    'sparse_mla_weights',
    'topk_indices',
    'unpack_mla_cache',
]


def __dir__() -> list[str]:
    return __all__
