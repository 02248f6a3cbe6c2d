"""`post` without autograd, where TileKernels has it; see `tile_kernels.modeling.mhc.ops.post`."""

from torch import Tensor

from tile_kernels.mhc.front import mhc_post_fwd
from tile_kernels.mhc.post import post_bwd

__all__ = ['mhc_post_bwd', 'mhc_post_fwd']


def mhc_post_bwd(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, d_o: Tensor, fuse_grad_acc: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, post and comb.

    Args:
        x: (..., hidden) bfloat16.
        residual: (..., n, hidden) bfloat16.
        post: (..., n, 1) float32.
        comb: (..., n, n) float32.
        d_o: gradient of the result, (..., n, hidden) bfloat16.
        fuse_grad_acc: whether the gradient of residual is also left on its storage, as `grad_from_mhc_post`.

    Returns:
        The four gradients.
    """
    gradients = post_bwd(d_o, x, residual, post, comb)
    if fuse_grad_acc:
        residual.untyped_storage().grad_from_mhc_post = gradients[1]
    return gradients
