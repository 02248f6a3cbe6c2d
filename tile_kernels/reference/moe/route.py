"""Twin of `moe.route` in plain PyTorch."""

from __future__ import annotations

from typing import Any

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
    **choice: Any,
) -> tuple[Tensor, ...]:
    """Logits, choice, maps and rows, one after another."""
    weights, indices = topk_gating(gate_logits(hidden_states, gate_weight), top_k, **choice)
    maps = fused_mapping(indices, gate_weight.shape[0], num_expanded, alignment)
    rows = expand_and_per_token_cast(hidden_states, maps[3], maps[0], fmt)
    return weights, indices, *maps, rows.data, rows.sf
