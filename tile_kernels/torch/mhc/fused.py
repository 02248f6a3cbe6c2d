"""Several ops at once."""

from collections.abc import Sequence

from torch import Tensor

from tile_kernels.torch.mhc.mixes import sinkhorn, split_mixes
from tile_kernels.torch.mhc.projection import norm_fn
from tile_kernels.torch.mhc.streams import apply_mix, post


def mix_and_apply_(
    residual: Tensor,
    mul_parts: Tensor,
    square_parts: Tensor,
    scale: Tensor,
    base: Tensor,
    post: Tensor,
    comb: Tensor,
    layer_input: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> None:
    """What follows the projection in `big_fuse`."""
    num_streams, hidden = residual.shape[-2:]
    rstd = (square_parts.sum(0) / (num_streams * hidden) + eps).rsqrt()
    mixes = mul_parts.sum(0) * rstd.unsqueeze(-1)
    pre, post_value, z = split_mixes(mixes, scale, base, num_streams, post_mult, pre_eps)
    post.copy_(post_value.squeeze(-1))
    comb.copy_(sinkhorn(z, repeat, sinkhorn_eps))
    layer_input.copy_(apply_mix(residual, pre))


def big_fuse(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients and input of a layer from the residual streams."""
    mixes, _ = norm_fn(residual, fn, eps)
    pre, post, z = split_mixes(mixes, scale, base, residual.shape[-2], post_mult, pre_eps)
    return post, sinkhorn(z, repeat, sinkhorn_eps), apply_mix(residual, pre)


def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: Sequence[Tensor],
    layer_output_list: Sequence[Tensor],
    post_mix_list: Sequence[Tensor],
    comb_mix_list: Sequence[Tensor],
    layer_input_list: Sequence[Tensor],
    residual_list: Sequence[Tensor],
) -> None:
    """Recompute the inputs of many layers and the residual streams after them, in place."""
    residual = initial_residual
    for layer, pre_mix in enumerate(pre_mix_list):
        layer_input_list[layer].copy_(apply_mix(residual, pre_mix))
        if layer < len(layer_output_list):
            residual = post(layer_output_list[layer], residual, post_mix_list[layer], comb_mix_list[layer])
            residual_list[layer].copy_(residual)
