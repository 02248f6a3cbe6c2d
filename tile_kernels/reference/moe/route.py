"""Twin of `moe.route` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.moe.expand_and_per_token_cast import expand_and_per_token_cast
from tile_kernels.reference.moe.fused_mapping import fused_mapping
from tile_kernels.reference.moe.gate_logits import gate_logits
from tile_kernels.reference.moe.topk_gating import topk_gating


def route(
    hidden_states: Tensor,
    gate_weight: Tensor,
    top_k: int,
    num_expanded: int,
    alignment: int,
    fmt: QuantFormat,
    scoring: str = 'softmax',
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, ...]:
    """Logits, choice, maps and rows, one after another."""
    weights, indices = topk_gating(
        gate_logits(hidden_states, gate_weight),
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        bias=bias,
        num_groups=num_groups,
        num_topk_groups=num_topk_groups,
        routed_scaling_factor=routed_scaling_factor,
        index_dtype=index_dtype,
    )
    maps = fused_mapping(indices, gate_weight.shape[0], num_expanded, alignment)
    rows = expand_and_per_token_cast(hidden_states, maps[3], maps[0], fmt)
    return weights, indices, *maps, rows.data, rows.sf
