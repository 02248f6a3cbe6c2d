"""Twins of the attention ops."""

from tile_kernels.reference.attention.attend import attend, attend_bwd
from tile_kernels.reference.attention.combine import combine
from tile_kernels.reference.attention.decode import decode
from tile_kernels.reference.attention.fp8_mqa_logits import fp8_mqa_logits
from tile_kernels.reference.attention.fp8_paged_mqa_logits import fp8_paged_mqa_logits
from tile_kernels.reference.attention.mqa_logits import mqa_logits, mqa_logits_bwd
from tile_kernels.reference.attention.nsa_attend import nsa_attend, nsa_attend_bwd
from tile_kernels.reference.attention.nsa_scores import nsa_scores
from tile_kernels.reference.attention.topk_indices import topk_indices

__all__ = [
    'attend',
    'attend_bwd',
    'combine',
    'decode',
    'fp8_mqa_logits',
    'fp8_paged_mqa_logits',
    'mqa_logits',
    'mqa_logits_bwd',
    'nsa_attend',
    'nsa_attend_bwd',
    'nsa_scores',
    'topk_indices',
]


def __dir__() -> list[str]:
    return __all__
