"""What the Engram gate without saved values means, in plain PyTorch."""

from torch import Tensor

from tile_kernels.reference.engram.gate import gate


def gate_inference(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> Tensor:
    """The first result of `gate`."""
    return gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual)[0]
