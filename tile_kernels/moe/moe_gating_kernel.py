"""The router of a mixture of experts as a module: experts, their weights, and the map of the rows."""

from torch import Tensor, nn

from tile_kernels.moe.moe_topk_routing import moe_topk_routing
from tile_kernels.moe.token_to_expert_map import RoutingMap, token_to_expert_map


class MoEGatingKernel(nn.Module):
    """`moe_topk_routing` and `token_to_expert_map` in one call; the module has no parameters.

    >>> gating = MoEGatingKernel()
    >>> gate_weight, x = torch.randn(16, 64), torch.randn(5, 64)
    >>> topk_scores, topk_indices, expert_ids = gating(gate_weight, x, topk=4)
    >>> topk_scores.shape, topk_indices.shape, expert_ids.num_tokens_per_expert.shape
    (torch.Size([5, 4]), torch.Size([5, 4]), torch.Size([16]))
    """

    def forward(self, gate_weight: Tensor, x: Tensor, topk: int = 8) -> tuple[Tensor, Tensor, RoutingMap]:
        """Choose the experts of every token by `x @ gate_weight.T`, summed in float32; differentiable in both.

        Args:
            gate_weight: (num_experts, hidden) bfloat16, float16 or float32, contiguous; up to 4096 experts.
            x: (num_tokens, hidden) bfloat16, float16 or float32; rows may be strided.
            topk: experts per token, from 1 to min(num_experts, 64).

        Returns:
            topk_scores (num_tokens, topk) float32, the softmax over the chosen logits; topk_indices (num_tokens, topk)
            int64, best first, the smaller of equal ones first; expert_ids, the `RoutingMap` of the indices.
        """
        topk_scores, topk_indices = moe_topk_routing(x, gate_weight, topk)
        return topk_scores, topk_indices, token_to_expert_map(topk_indices, gate_weight.shape[0])
