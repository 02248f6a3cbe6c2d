"""Twins of `mhc.pre`."""

import torch
from torch import Tensor

from tile_kernels.reference.mhc.apply_mix import apply_mix
from tile_kernels.reference.mhc.norm_fn import norm_fn, norm_fn_bwd_
from tile_kernels.reference.mhc.sinkhorn import sinkhorn, sinkhorn_bwd
from tile_kernels.reference.mhc.split_mixes import split_mixes, split_mixes_bwd


def pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Input and coefficients of a layer from the residual streams, and what backward needs."""
    streams = residual.float()  # once, so that autograd sums the gradients of both uses in float32
    mixes, rstd = norm_fn(streams, fn, eps)
    pre, post, z = split_mixes(mixes, scale, base, residual.shape[-2], post_mult, pre_eps)
    layer_input = apply_mix(streams, pre).to(torch.bfloat16)
    return layer_input, post, sinkhorn(z, repeat, sinkhorn_eps), pre, mixes, rstd


def pre_bwd(
    dlayer_input: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    pre: Tensor,
    mixes: Tensor,
    rstd: Tensor,
    repeat: int = 10,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `pre`."""
    return add_pre_bwd(
        None, dlayer_input, dpost, dcomb, residual, fn, scale, base, pre, mixes, rstd, repeat, sinkhorn_eps, post_mult
    )


def add_pre_bwd(
    dresidual: Tensor | None,
    dlayer_input: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    pre: Tensor,
    mixes: Tensor,
    rstd: Tensor,
    repeat: int,
    sinkhorn_eps: float,
    post_mult: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `pre`, that of residual added to `dresidual` and rounded once."""
    collected = torch.zeros_like(residual, dtype=torch.float32) if dresidual is None else dresidual.float()
    dpre = (dlayer_input.float().unsqueeze(-2) * residual.float()).sum(-1, keepdim=True)
    collected = collected + pre * dlayer_input.float().unsqueeze(-2)
    z = split_mixes(mixes, scale, base, residual.shape[-2])[2]
    dz = sinkhorn_bwd(dcomb, z, repeat, sinkhorn_eps)
    dmixes, dscale, dbase = split_mixes_bwd(dpre, dpost, dz, mixes, scale, base, post_mult)
    dfn = norm_fn_bwd_(dmixes, residual, fn, mixes, rstd, collected)
    return collected.to(residual.dtype), dfn, dscale, dbase
