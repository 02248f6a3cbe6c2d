"""Weights of the streams in the output of a model."""

from torch import Tensor

from tile_kernels.mhc.head_mix import head_mix


def mhc_head_compute_mix(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """`sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps`; differentiable in the first three.

    Args:
        input_mix: (..., n) float32, contiguous.
        mhc_scale: (1,) float32.
        mhc_base: (n,) float32.
        mhc_pre_eps: added to the result.

    Returns:
        (..., n) float32.
    """
    return head_mix(input_mix, mhc_scale, mhc_base, mhc_pre_eps)
