"""Twin of scores and selection in one."""

from torch import Tensor

from tile_kernels.reference.attention.fp8_mqa_logits import fp8_mqa_logits
from tile_kernels.reference.attention.topk_indices import topk_indices


def index_topk(q: Tensor, kv: Tensor, sf: Tensor, weights: Tensor, start: Tensor, end: Tensor, k: int) -> Tensor:
    """All scores, then the k largest."""
    return topk_indices(fp8_mqa_logits(q, kv, sf, weights, start, end), k, start, end)[0]
