"""Twin of `moe.expand_and_per_token_cast` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.moe.expand_to_fused_with_sf import expand_with_sf
from tile_kernels.reference.quant import per_token_cast


def expand_and_per_token_cast(
    x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, fmt: QuantFormat
) -> QuantTensor:
    """Quantize every token, then copy its codes and scale factors to each of its positions."""
    q = per_token_cast(x, QuantFormat.parse(fmt.name.removesuffix('_col')))
    data, sf = expand_with_sf(q.data, q.sf, token_topk_to_pos, pos_to_expert, fmt.col)
    return QuantTensor(data, sf, fmt)
