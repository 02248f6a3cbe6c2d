"""What the sum of weight gradients means, in plain PyTorch."""

from torch import Tensor


def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Add the gradients of both norm weights to the given buffers."""
    total = grad_w_partial.sum(0)
    grad_weight_hidden.copy_(grad_weight_hidden + total * weight_embed.float())
    grad_weight_embed.copy_(grad_weight_embed + total * weight_hidden.float())
