"""Coefficients of a layer from the projection."""

from torch import Tensor

from tile_kernels.mhc.split_mixes import split_mixes


def mhc_pre_split_mixes(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split the projection of every token into its coefficients; differentiable in the first three.

    Args:
        input_mixes: (..., n (2 + n)) float32, contiguous.
        mhc_scale: (3,) float32.
        mhc_base: (n (2 + n),) float32.
        mhc_mult: n: 2, 4 or 8.
        mhc_post_mult_value: factor of post.
        mhc_pre_eps: added to pre.

    Returns:
        pre and post (..., n, 1), comb (..., n, n).
    """
    return split_mixes(input_mixes, mhc_scale, mhc_base, mhc_mult, mhc_post_mult_value, mhc_pre_eps)
