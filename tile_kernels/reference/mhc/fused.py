"""Several ops at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tile_kernels.reference.mhc.mixes import sinkhorn, sinkhorn_bwd, split_mixes, split_mixes_bwd
from tile_kernels.reference.mhc.projection import norm_fn, norm_fn_bwd_
from tile_kernels.reference.mhc.streams import apply_mix, post, post_bwd


def mix_and_apply_(
    residual: Tensor,
    mul_parts: Tensor,
    square_parts: Tensor,
    scale: Tensor,
    base: Tensor,
    post: Tensor,
    comb: Tensor,
    layer_input: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> None:
    """What follows the projection in `big_fuse`."""
    num_streams, hidden = residual.shape[-2:]
    rstd = (square_parts.sum(0) / (num_streams * hidden) + eps).rsqrt()
    mixes = mul_parts.sum(0) * rstd.unsqueeze(-1)
    pre, post_value, z = split_mixes(mixes, scale, base, num_streams, post_mult, pre_eps)
    post.copy_(post_value.squeeze(-1))
    comb.copy_(sinkhorn(z, repeat, sinkhorn_eps))
    layer_input.copy_(apply_mix(residual, pre))


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
    """Input and coefficients of a layer from the residual streams, and what they were made of."""
    streams = residual.float()  # once: autograd adds the gradients of both uses before it rounds them
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
    return _pre_bwd(
        None, dlayer_input, dpost, dcomb, residual, fn, scale, base, pre, mixes, rstd, repeat, sinkhorn_eps, post_mult
    )


def _pre_bwd(
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


def post_pre(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Post of one layer and pre of the next."""
    streams = post(x, residual, post_mix, comb_mix).float()
    results = pre(streams, fn, scale, base, repeat, eps, pre_eps, sinkhorn_eps, post_mult)
    return streams.to(residual.dtype), *results


def post_pre_bwd(
    dy: Tensor,
    dlayer_input: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    y: Tensor,
    pre: Tensor,
    mixes: Tensor,
    rstd: Tensor,
    repeat: int = 10,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `post_pre`."""
    collected, dfn, dscale, dbase = _pre_bwd(
        dy, dlayer_input, dpost, dcomb, y, fn, scale, base, pre, mixes, rstd, repeat, sinkhorn_eps, post_mult
    )
    return *post_bwd(collected, x, residual, post_mix, comb_mix), dfn, dscale, dbase


def mhc_multilayer_recompute(
    initial_residual: Tensor,
    pre_mix_list: Sequence[Tensor],
    layer_output_list: Sequence[Tensor],
    post_mix_list: Sequence[Tensor],
    comb_mix_list: Sequence[Tensor],
    layer_input_list: Sequence[Tensor],
    residual_list: Sequence[Tensor],
) -> None:
    """Recompute the inputs of many layers and the residual streams after them, in place."""
    residual = initial_residual
    for layer, pre_mix in enumerate(pre_mix_list):
        layer_input_list[layer].copy_(apply_mix(residual, pre_mix))
        if layer < len(layer_output_list):
            residual = post(layer_output_list[layer], residual, post_mix_list[layer], comb_mix_list[layer])
            residual_list[layer].copy_(residual)
