"""Twin of `mhc.big_fuse`."""

from torch import Tensor

from tile_kernels.reference.mhc.apply_mix import apply_mix
from tile_kernels.reference.mhc.norm_fn import norm_fn
from tile_kernels.reference.mhc.sinkhorn import sinkhorn
from tile_kernels.reference.mhc.split_mixes import split_mixes


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
