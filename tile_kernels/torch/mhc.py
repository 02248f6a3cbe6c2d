"""What the ops of `tile_kernels.mhc` mean, in plain PyTorch."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# Streams ------------------------------------------------------------------------------------


def expand(x: Tensor, num_streams: int = 4) -> Tensor:
    """Copy the hidden states of every token into all of its residual streams."""
    return x.float().unsqueeze(-2).expand(*x.shape[:-1], num_streams, x.shape[-1]).to(x.dtype)


def expand_(x: Tensor, y: Tensor) -> None:
    """Expand into memory of the caller."""
    y.copy_(expand(x, y.shape[-2]))


def expand_bwd(dy: Tensor) -> Tensor:
    """The sum over streams."""
    return _sum_streams(dy.float().unbind(-2)).to(dy.dtype)


def expand_bwd_(dy: Tensor, dx: Tensor) -> None:
    """Gradient of `expand` into memory of the caller."""
    dx.copy_(expand_bwd(dy))


def _sum_streams(streams: tuple[Tensor, ...]) -> Tensor:
    """Sum in ascending order."""
    total = torch.zeros_like(streams[0])
    for stream in streams:
        total = total + stream
    return total


def post(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor) -> Tensor:
    """Mix the output of a layer and the residual streams into the next residual streams."""
    mixed = torch.einsum('...io,...ih->...oh', comb_mix, residual.float())
    return (post_mix * x.float().unsqueeze(-2) + mixed).to(residual.dtype)


def post_(x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor, y: Tensor) -> None:
    """Post into memory of the caller."""
    y.copy_(post(x, residual, post_mix, comb_mix))


def post_bwd(
    dy: Tensor, x: Tensor, residual: Tensor, post_mix: Tensor, comb_mix: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `post`."""
    dy = dy.float()
    dx = (post_mix * dy).sum(-2).to(x.dtype)
    dresidual = torch.einsum('...io,...oh->...ih', comb_mix, dy).to(residual.dtype)
    dpost_mix = (x.float().unsqueeze(-2) * dy).sum(-1, keepdim=True)
    dcomb_mix = torch.einsum('...ih,...oh->...io', residual.float(), dy)
    return dx, dresidual, dpost_mix, dcomb_mix


def apply_mix(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams."""
    return (mix * x.float()).sum(-2).to(x.dtype)


def apply_mix_(x: Tensor, mix: Tensor, y: Tensor) -> None:
    """Apply a mix into memory of the caller."""
    y.copy_(apply_mix(x, mix))


def apply_mix_bwd(dy: Tensor, x: Tensor, mix: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `apply_mix`."""
    dy = dy.float().unsqueeze(-2)
    return (mix * dy).to(x.dtype), (dy * x.float()).sum(-1, keepdim=True)


def apply_mix_bwd_(dy: Tensor, x: Tensor, mix: Tensor, dx: Tensor) -> Tensor:
    """Gradients of `apply_mix`, that of x added to what is there."""
    dy = dy.float().unsqueeze(-2)
    dx.copy_(dx.float() + mix * dy)
    return (dy * x.float()).sum(-1, keepdim=True)


# Mixes --------------------------------------------------------------------------------------


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


# Projection ---------------------------------------------------------------------------------


def round_to_tf32(x: Tensor) -> Tensor:
    """The nearest number of 11 significant bits, halves away from zero."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


class _Tf32Product(torch.autograd.Function):
    """`x @ fn.T` with fn, and backward the gradient, as TF32 takes them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Tensor) -> Tensor:
        ctx.save_for_backward(x, fn)
        return x @ round_to_tf32(fn).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, fn = ctx.saved_tensors
        dy = round_to_tf32(dy)
        return dy @ round_to_tf32(fn), dy.reshape(-1, fn.shape[0]).T @ x.reshape(-1, fn.shape[1])


def norm_fn(residual: Tensor, fn: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Project the normalised streams of every token; fn counts as TF32 takes it."""
    x = residual.flatten(-2).float()
    rstd = (x.square().mean(-1) + eps).rsqrt()
    return _Tf32Product.apply(x, fn) * rstd.unsqueeze(-1), rstd


def norm_fn_bwd(dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_fn`; the gradient of the product counts as TF32 takes it."""
    x = residual.flatten(-2).float()
    dmul = round_to_tf32(dmixes * rstd.unsqueeze(-1))
    pull = (dmixes * mixes).sum(-1) * rstd.square() / x.shape[-1]
    dx = dmul @ round_to_tf32(fn) - pull.unsqueeze(-1) * x
    dfn = dmul.reshape(-1, fn.shape[0]).T @ x.reshape(-1, fn.shape[1])
    return dx.view(residual.shape).to(residual.dtype), dfn


def norm_fn_bwd_(
    dmixes: Tensor, residual: Tensor, fn: Tensor, mixes: Tensor, rstd: Tensor, dresidual: Tensor
) -> Tensor:
    """Gradients of `norm_fn`, that of residual added to what is there."""
    x = residual.flatten(-2).float()
    dmul = round_to_tf32(dmixes * rstd.unsqueeze(-1))
    pull = (dmixes * mixes).sum(-1) * rstd.square() / x.shape[-1]
    dx = dmul @ round_to_tf32(fn) - pull.unsqueeze(-1) * x
    dresidual.copy_(dresidual.float() + dx.view(residual.shape))
    return dmul.reshape(-1, fn.shape[0]).T @ x.reshape(-1, fn.shape[1])


# Fused --------------------------------------------------------------------------------------


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


def merge_norm_weight(fn: Tensor, norm_weight: Tensor) -> Tensor:
    """The weight of a norm taken into the projection that follows it."""
    return fn * norm_weight


def merge_norm_weight_(fn: Tensor, norm_weight: Tensor, y: Tensor) -> None:
    """`merge_norm_weight` into memory of the caller."""
    y.copy_(fn * norm_weight)


def merge_norm_weight_bwd(dy: Tensor, fn: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `merge_norm_weight`."""
    return dy * norm_weight, (dy * fn).sum(0)


def merge_norm_weight_bwd_(dy: Tensor, fn: Tensor, norm_weight: Tensor, dfn: Tensor, dnorm_weight: Tensor) -> None:
    """Gradients of `merge_norm_weight`, added to what is there."""
    dfn.add_(dy * norm_weight)
    dnorm_weight.add_((dy * fn).sum(0))


def reduce_parts_(
    mul_parts: Tensor, square_parts: Tensor, mul: Tensor, square: Tensor, y: Tensor, group: int, eps: float = 1e-6
) -> None:
    """Sum the parts of a projection and normalise."""
    mul.copy_(mul_parts.sum(0))
    square.copy_(square_parts.sum(0))
    y.copy_((mul * (square / group + eps).rsqrt().unsqueeze(-1)).sum(1))


def reduce_parts_bwd_(
    dy: Tensor, mul: Tensor, square: Tensor, dmul: Tensor, dsquare: Tensor, group: int, eps: float = 1e-6
) -> None:
    """Gradients of the sums of `reduce_parts_`."""
    rstd = (square / group + eps).rsqrt()
    dmul.copy_(dy.unsqueeze(1) * rstd.unsqueeze(-1))
    dsquare.copy_((dy.unsqueeze(1) * mul).sum(-1) * rstd**3 / (-2 * group))


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
