"""Twin of `mhc.mix_and_apply`."""

from torch import Tensor

from tile_kernels.reference.mhc.apply_mix import apply_mix
from tile_kernels.reference.mhc.sinkhorn import sinkhorn
from tile_kernels.reference.mhc.split_mixes import split_mixes


def mix_and_apply(
    residual: Tensor,
    mul_parts: Tensor,
    square_parts: Tensor,
    scale: Tensor,
    base: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients and input of a layer from the parts of a projection."""
    num_streams, hidden = residual.shape[-2:]
    rstd = (square_parts.sum(0) / (num_streams * hidden) + eps).rsqrt()
    mixes = mul_parts.sum(0) * rstd.unsqueeze(-1)
    pre, post, z = split_mixes(mixes, scale, base, num_streams, post_mult, pre_eps)
    return post.squeeze(-1), sinkhorn(z, repeat, sinkhorn_eps), apply_mix(residual, pre)
