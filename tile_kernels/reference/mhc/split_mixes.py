"""Twins of `mhc.split_mixes`."""

import torch
from torch import Tensor


def split_mixes(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int = 4,
    post_mult: float = 1.0,
    pre_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of every token from its projection."""
    parts = [num_streams, num_streams, num_streams * num_streams]
    pre, post, comb = ((m * s + b) for m, s, b in zip(mixes.split(parts, -1), scale, base.split(parts), strict=True))
    pre, post = pre.sigmoid() + pre_eps, post.sigmoid() * post_mult
    return pre.unsqueeze(-1), post.unsqueeze(-1), comb.unflatten(-1, (num_streams, num_streams))


def split_mixes_bwd(
    dpre: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `split_mixes`."""
    num_streams = dcomb.shape[-1]
    part = torch.tensor([0] * num_streams + [1] * num_streams + [2] * num_streams**2, device=mixes.device)
    s = (mixes * scale[part] + base).sigmoid()
    slope = s * (1 - s)
    upstream = torch.cat([dpre.squeeze(-1), dpost.squeeze(-1) * post_mult, dcomb.flatten(-2)], -1)
    dz = torch.where(part < 2, upstream * slope, upstream)
    dscale = torch.stack([(dz * mixes)[..., part == k].sum() for k in range(3)])
    return dz * scale[part], dscale, dz.flatten(0, -2).sum(0) if dz.dim() > 1 else dz.clone()


def mhc_mix_split(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int = 4,
    *,
    post_mult: float = 1.0,
    pre_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of every token from its projection."""
    return split_mixes(mixes, scale, base, num_streams, post_mult, pre_eps)


def mhc_pre_split_mixes_ref(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients from the projection, computed in float64."""
    exact = input_mixes.double(), mhc_scale.double(), mhc_base.double()
    pre, post, comb = split_mixes(*exact, mhc_mult, mhc_post_mult_value, mhc_pre_eps)
    return pre.to(input_mixes.dtype), post.to(input_mixes.dtype), comb.to(input_mixes.dtype)
