"""Twin of `mhc.recompute_`."""

from collections.abc import Sequence

from torch import Tensor

from tile_kernels.reference.mhc.apply_mix import apply_mix
from tile_kernels.reference.mhc.post import post


def recompute_(
    initial_residual: Tensor,
    pre_mix_list: Sequence[Tensor],
    layer_output_list: Sequence[Tensor],
    post_mix_list: Sequence[Tensor],
    comb_mix_list: Sequence[Tensor],
    layer_input_list: Sequence[Tensor],
    residual_list: Sequence[Tensor],
) -> None:
    """Recompute the inputs of many layers and the residual streams after them, into the last two lists."""
    residual = initial_residual
    for layer, pre_mix in enumerate(pre_mix_list):
        layer_input_list[layer].copy_(apply_mix(residual, pre_mix))
        if layer < len(layer_output_list):
            residual = post(layer_output_list[layer], residual, post_mix_list[layer], comb_mix_list[layer])
            residual_list[layer].copy_(residual)


#: The public name.
mhc_multilayer_recompute = recompute_
