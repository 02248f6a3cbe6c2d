"""Mixture of experts: routing."""

from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.topk_gate import topk_gate
from tile_kernels.moe.topk_gating import topk_gating
from tile_kernels.moe.topk_gating_bwd import topk_gating_bwd

__all__ = ['ScoringFunc', 'topk_gate', 'topk_gating', 'topk_gating_bwd']
