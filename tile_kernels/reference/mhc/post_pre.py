"""Twins of `mhc.post_pre`."""

from torch import Tensor

from tile_kernels.reference.mhc.post import post, post_bwd
from tile_kernels.reference.mhc.pre import add_pre_bwd, pre


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
    collected, dfn, dscale, dbase = add_pre_bwd(
        dy, dlayer_input, dpost, dcomb, y, fn, scale, base, pre, mixes, rstd, repeat, sinkhorn_eps, post_mult
    )
    return *post_bwd(collected, x, residual, post_mix, comb_mix), dfn, dscale, dbase
