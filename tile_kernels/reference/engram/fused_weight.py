"""What the product of the norm weights means, in plain PyTorch."""

from torch import Tensor


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """The product of both norm weights in float32."""
    return weight_hidden.float() * weight_embed.float()
