"""Everything before a layer in one op, without gradients."""

from torch import Tensor

from tile_kernels.mhc.big_fuse import big_fuse


def mhc_pre_big_fuse(
    residual: Tensor,
    fn: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients and input of a layer, bit for bit those of the separate ops; not differentiable.

    Args:
        residual: (..., n, hidden) bfloat16, contiguous.
        fn: (n (2 + n), n * hidden) float32, contiguous.
        mhc_scale: (3,) float32.
        mhc_base: (n (2 + n),) float32.
        rms_eps: added to the mean square.
        mhc_pre_eps: added to pre.
        mhc_sinkhorn_eps: as given to `sinkhorn_normalize`.
        mhc_post_mult_value: factor of post.
        sinkhorn_repeat: as given to `sinkhorn_normalize`.
        n_splits: has no effect; the size of the projection determines the splits.

    Returns:
        post (..., n, 1), comb (..., n, n), layer_input (..., hidden).
    """
    return big_fuse(
        residual,
        fn,
        mhc_scale,
        mhc_base,
        sinkhorn_repeat,
        rms_eps,
        mhc_pre_eps,
        mhc_sinkhorn_eps,
        mhc_post_mult_value,
    )
