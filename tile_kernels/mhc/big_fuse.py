"""Pre of a layer without gradients: the forward pass of `pre` without the outputs that only backward needs."""

from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.op import op
from tile_kernels.mhc._checks import STREAMS
from tile_kernels.mhc._samples import pre_inputs
from tile_kernels.mhc.pre import fused_pre


@op(outputs='post comb layer_input', instead='mhc.pre')
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
    """Coefficients and input of a layer from the residual streams, without gradients.

    Args:
        residual: (..., n, hidden) bfloat16, contiguous; n is 2, 4 or 8, hidden a multiple of 64.
        fn: (n (2 + n), n * hidden) float32, contiguous.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        repeat: as given to `sinkhorn`.
        eps: added to the mean square.
        pre_eps: added to pre.
        sinkhorn_eps: as given to `sinkhorn`.
        post_mult: factor of post.

    Returns:
        post (..., n, 1) and comb (..., n, n) float32, layer_input (..., hidden) bfloat16: the bits of `norm_fn`,
        `split_mixes`, `sinkhorn` and `apply_mix`.
    """
    options = (repeat, eps, pre_eps, sinkhorn_eps, post_mult)
    layer_input, post, comb, *_ = fused_pre(residual, fn, scale, base, False, options)
    return post, comb, layer_input


# Cases -------------------------------------------------------------------------------------


big_fuse.cases(
    make=pre_inputs,
    match=dict(rtol=1e-3, atol=1e-3),
    smoke=grid(lead=[(0,), (2, 3)], hidden=[128], num_streams=[4])
    + grid(lead=[(70,)], hidden=[64], num_streams=STREAMS)
    # ten multiplying warps, one of them idle, wide slices, and slices that do not fit
    + grid(lead=[(9,)], hidden=[320, 576, 704, 1088], num_streams=[4]),
    full=grid(lead=[(4001,), (512,)], hidden=[1280, 2560, 5120, 7168], num_streams=[4])
    + grid(lead=[(777,)], hidden=[2816, 8192], num_streams=[2, 4])
    + grid(lead=[(20001,)], hidden=[512], num_streams=[4]),  # more tokens for an owner than `KEPT`
    bench=grid(lead=[(64,), (4096,), (8192,)], hidden=[4096], num_streams=[4])
    + grid(lead=[(4096,)], hidden=[2048, 7168, 8192], num_streams=[4])
    + grid(lead=[(4001,)], hidden=[2560], num_streams=[4]),
)
