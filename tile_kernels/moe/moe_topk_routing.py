"""The router of a mixture of experts in one call: from hidden states to experts and their weights."""

from torch import Tensor

from tile_kernels.moe.gate_logits import gate_logits
from tile_kernels.moe.topk_gating import topk_gating


def moe_topk_routing(hidden_states: Tensor, gate_weight: Tensor, topk: int = 8) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token by `hidden_states @ gate_weight.T`; differentiable in both.

    Experts come best first; equal logits take the smaller expert first and NaN ranks last.

    Args:
        hidden_states: (num_tokens, hidden) bfloat16; rows may be strided.
        gate_weight: (num_experts, hidden) bfloat16, contiguous; up to 4096 experts.
        topk: experts per token, from 1 to min(num_experts, 64).

    Returns:
        scores (num_tokens, topk) float32, the softmax over the chosen logits, and indices (num_tokens, topk) int64.
    """
    return topk_gating(gate_logits(hidden_states, gate_weight), topk)


class MoETopKRouting:
    """`moe_topk_routing` in the form of an autograd function; the call itself is differentiable."""

    apply = staticmethod(moe_topk_routing)
