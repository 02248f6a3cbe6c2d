"""The router of a mixture of experts in one call: from hidden states to experts and weights."""

import torch
from torch import Tensor
from torch.nn import functional

from tile_kernels.core import check
from tile_kernels.moe._checks import DTYPES
from tile_kernels.moe.gate_logits import gate_logits
from tile_kernels.moe.topk_gating import topk_gating


@check.names(top_k='topk')
def moe_topk_routing(hidden_states: Tensor, gate_weight: Tensor, topk: int = 8) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token by `hidden_states @ gate_weight.T`; differentiable in both.

    Experts are in descending order of logit; of equal ones the smaller expert comes first, and NaN ranks last.

    Args:
        hidden_states: (num_tokens, hidden) bfloat16, float16 or float32; rows may be strided.
        gate_weight: (num_experts, hidden) bfloat16, float16 or float32, contiguous; up to 4096 experts. If one is
            not bfloat16, PyTorch multiplies them in float32.
        topk: experts per token, from 1 to min(num_experts, 64).

    Returns:
        scores (num_tokens, topk) float32, the softmax over the chosen logits, and indices (num_tokens, topk) int64.
    """
    return topk_gating(_logits(hidden_states, gate_weight), topk)


def _logits(hidden_states: Tensor, gate_weight: Tensor) -> Tensor:
    _, hidden = check.shape(hidden_states, 'hidden_states', 'num_tokens hidden', dtype=DTYPES)
    check.shape(gate_weight, 'gate_weight', 'num_experts hidden', dtype=DTYPES, hidden=hidden)
    if hidden_states.dtype is gate_weight.dtype is torch.bfloat16:
        return gate_logits(hidden_states, gate_weight)
    check.same_device(hidden_states=hidden_states, gate_weight=gate_weight)
    # users choose a float32 router for its precision, so autocast is off
    with torch.autocast(hidden_states.device.type, enabled=False):
        return functional.linear(hidden_states.float(), gate_weight.float())


class MoETopKRouting:
    """`moe_topk_routing` as an autograd function; `moe_topk_routing` itself is differentiable, too."""

    apply = staticmethod(moe_topk_routing)
