"""Coefficients of a token, and their Sinkhorn scaling."""

import torch
from torch import Tensor


def _scalings(x: Tensor, repeat: int, eps: float) -> list[tuple[int, Tensor, Tensor]]:
    """Every scaling: the dimension it sums over, its factors, and the matrices after it."""
    num_rows, num_columns = x.shape[-2:]
    y, done = x.softmax(-1) + eps, []
    for step in range(2 * repeat - 1):
        dim, target = (-2, num_rows / num_columns) if step % 2 == 0 else (-1, 1.0)
        factor = target / (y.sum(dim, keepdim=True) + eps)
        y = y * factor
        done.append((dim, factor, y))
    return done


def sinkhorn(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Rows that sum to 1 and columns that sum to rows / columns, nearly: alternate the two scalings."""
    return _scalings(x, repeat, eps)[-1][2]


def sinkhorn_(x: Tensor, y: Tensor, repeat: int = 10, eps: float = 1e-6) -> None:
    """Sinkhorn into memory of the caller."""
    y.copy_(sinkhorn(x, repeat, eps))


def sinkhorn_bwd(dy: Tensor, x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Gradient of `sinkhorn`: the rule of a quotient for every scaling, then that of the softmax."""
    num_rows, num_columns = x.shape[-2:]
    for dim, factor, y in reversed(_scalings(x, repeat, eps)):
        target = num_rows / num_columns if dim == -2 else 1.0
        dy = factor * (dy - (dy * y).sum(dim, keepdim=True) / target)
    p = x.softmax(-1)
    return p * (dy - (dy * p).sum(-1, keepdim=True))


def sinkhorn_bwd_(dy: Tensor, x: Tensor, dx: Tensor, repeat: int = 10, eps: float = 1e-6) -> None:
    """Gradient of `sinkhorn` into memory of the caller."""
    dx.copy_(sinkhorn_bwd(dy, x, repeat, eps))


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


def split_mixes_(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    pre: Tensor,
    post: Tensor,
    comb: Tensor,
    post_mult: float = 1.0,
    pre_eps: float = 1e-6,
) -> None:
    """Split mixes into memory of the caller."""
    for out, value in zip(
        (pre, post, comb), split_mixes(mixes, scale, base, comb.shape[-1], post_mult, pre_eps), strict=True
    ):
        out.copy_(value)


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


def split_mixes_bwd_(
    dpre: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    dmixes: Tensor,
    dscale: Tensor,
    dbase: Tensor,
    post_mult: float = 1.0,
) -> None:
    """Gradients of `split_mixes` into memory of the caller."""
    gradients = split_mixes_bwd(dpre, dpost, dcomb, mixes, scale, base, post_mult)
    for out, value in zip((dmixes, dscale, dbase), gradients, strict=True):
        out.copy_(value)


def head_mix(mixes: Tensor, scale: Tensor, base: Tensor, pre_eps: float = 1e-6) -> Tensor:
    """The shares of the streams in the output of a model."""
    return (mixes * scale + base).sigmoid() + pre_eps


def head_mix_(mixes: Tensor, scale: Tensor, base: Tensor, mix: Tensor, pre_eps: float = 1e-6) -> None:
    """`head_mix` into memory of the caller."""
    mix.copy_(head_mix(mixes, scale, base, pre_eps))


def head_mix_bwd(dmix: Tensor, mixes: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `head_mix`."""
    s = (mixes * scale + base).sigmoid()
    dz = dmix * s * (1 - s)
    return dz * scale, (dz * mixes).sum().reshape(1), dz.reshape(-1, base.shape[0]).sum(0)


def head_mix_bwd_parts_(
    dmix: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    dmixes: Tensor,
    scale_parts: Tensor,
    base_parts: Tensor,
) -> None:
    """Gradient of mixes of `head_mix`, and parts that sum to those of scale and base: all of it in the first."""
    dmixes_value, dscale, dbase = head_mix_bwd(dmix, mixes, scale, base)
    dmixes.copy_(dmixes_value)
    for parts, value in ((scale_parts, dscale), (base_parts, dbase)):
        parts.zero_()
        parts[0] = value
