"""Twin of `moe.moe_topk_routing` in plain PyTorch."""

from __future__ import annotations

from torch import Tensor

from tile_kernels.reference.moe.gate_logits import gate_logits
from tile_kernels.reference.moe.topk_gating import topk_gating


def moe_topk_routing(hidden_states: Tensor, gate_weight: Tensor, topk: int = 8) -> tuple[Tensor, Tensor]:
    """Scores of all experts, the best of them, and their softmax."""
    return topk_gating(gate_logits(hidden_states, gate_weight), topk)


class MoETopKRouting:
    """`moe_topk_routing` as an autograd function."""

    apply = staticmethod(moe_topk_routing)
