"""Public names over the ops: the friendly ones, and low-level forms that write into memory of the caller."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.mhc.apply_mix import apply_mix, apply_mix_, apply_mix_bwd_
from tile_kernels.mhc.big_fuse import mix_and_apply_
from tile_kernels.mhc.expand import expand_, expand_bwd_
from tile_kernels.mhc.head_mix import head_mix_, head_mix_bwd_parts_
from tile_kernels.mhc.norm_weight import merge_norm_weight_, merge_norm_weight_bwd_
from tile_kernels.mhc.post import post as post_op
from tile_kernels.mhc.post import post_, post_bwd
from tile_kernels.mhc.reduce_parts import reduce_parts_, reduce_parts_bwd_
from tile_kernels.mhc.sinkhorn import sinkhorn, sinkhorn_, sinkhorn_bwd_
from tile_kernels.mhc.split_mixes import split_mixes, split_mixes_, split_mixes_bwd_

# Friendly -----------------------------------------------------------------------------------


def sinkhorn_normalize(conn_weights: Tensor, num_iters: int = 20, eps: float = 1e-6) -> Tensor:
    """Scale the rows and columns of every matrix in turn: rows sum to 1, columns to rows / columns; differentiable.

    Args:
        conn_weights: (..., num_rows, num_columns) float32, contiguous; [8, 64] is one matrix, [..., n, n] a batch.
        num_iters: how often rows and columns are scaled.
        eps: added to every sum.

    Returns:
        Shape of conn_weights; square matrices become doubly stochastic.
    """
    check.at_least(num_iters, 1, 'num_iters')
    return sinkhorn(conn_weights, num_iters, eps)


def mhc_mix_split(
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    num_streams: int = 4,
    *,
    post_mult: float = 1.0,
    pre_eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients of every token from its projection; differentiable.

    Args:
        mixes: (..., n (2 + n)) float32 for n streams, contiguous.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        num_streams: n: 2, 4 or 8.
        post_mult: factor of post.
        pre_eps: added to pre.

    Returns:
        pre and post (..., n, 1), comb (..., n, n) before `sinkhorn_normalize`.
    """
    return split_mixes(mixes, scale, base, num_streams, post_mult, pre_eps)


def mhc_mix_apply(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams; differentiable.

    Args:
        x: (..., n, hidden) bfloat16, contiguous.
        mix: (..., n, 1) float32, contiguous.

    Returns:
        (..., hidden) bfloat16.
    """
    return apply_mix(x, mix)


# Low level ----------------------------------------------------------------------------------


def _view(x: Tensor, name: str, *shape: int) -> Tensor:
    """Coefficients with another shape of as many elements."""
    check.dtype(x, name, torch.float32)
    check.contiguous(x, name)
    extent = 1
    for n in shape:
        extent *= n
    if x.numel() != extent:
        check.fail(name, f'must have the elements of {tuple(shape)}', check.describe(x))
    return x.view(shape)


def _first_extent(x: Tensor, name: str, extent: int) -> None:
    """The first dimension of `x` must have this extent."""
    if check.tensor(x, name).shape[:1] != (extent,):
        check.fail(name, f'must have {extent} entries in its first dimension', check.describe(x))


def expand_to_mhc_fwd(x: Tensor, o: Tensor) -> None:
    """Copy x (..., hidden) into all streams of o (..., n, hidden)."""
    expand_(x, o)


def expand_to_mhc_bwd(o_grad: Tensor, x_grad: Tensor) -> None:
    """Write the sum over the streams of o_grad (..., n, hidden) into x_grad (..., hidden)."""
    expand_bwd_(o_grad, x_grad)


def mhc_head_compute_mix_fwd(
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    output_mix: Tensor,
    mhc_pre_eps: float,
    token_block_size: int = 0,
) -> None:
    """Write sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps into output_mix, all (..., n) float32.

    `token_block_size` has no effect: results do not depend on how tokens are shared out.
    """
    head_mix_(input_mix, mhc_scale, mhc_base, output_mix, mhc_pre_eps)


def mhc_head_compute_mix_bwd(
    output_mix_grad: Tensor,
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mix_grad: Tensor,
    scale_grad_partial: Tensor,
    base_grad_partial: Tensor,
    num_sms: int,
    token_block_size: int = 0,
) -> None:
    """Write the gradient of input_mix, and num_sms rows whose sums are the gradients of scale and base.

    `token_block_size` has no effect.
    """
    _first_extent(scale_grad_partial, 'scale_grad_partial', num_sms)
    head_mix_bwd_parts_(
        output_mix_grad, input_mix, mhc_scale, mhc_base, input_mix_grad, scale_grad_partial, base_grad_partial
    )


def mhc_fn_normw_merge_fwd(fn: Tensor, normw: Tensor, out_fn: Tensor) -> None:
    """Write fn (num_mixes, k) * normw (k,) into out_fn."""
    merge_norm_weight_(fn, normw, out_fn)


def mhc_fn_normw_merge_bwd(fn: Tensor, normw: Tensor, out_fn_grad: Tensor, fn_grad: Tensor, normw_grad: Tensor) -> None:
    """Add the gradients of fn and normw to fn_grad and normw_grad."""
    merge_norm_weight_bwd_(out_fn_grad, fn, normw, fn_grad, normw_grad)


def mhc_reduce_partials_and_rmsnorm_fwd(
    out_mul_splitted: Tensor,
    sqrsum_splitted: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out: Tensor,
    rms_group_size: int,
    rms_eps: float,
    n_splits: int,
) -> None:
    """Sum n_splits parts of a projection and its squares, and write the normalised projection into out."""
    _first_extent(out_mul_splitted, 'out_mul_splitted', n_splits)
    num_tokens, num_mixes = check.shape(out, 'out', 'num_tokens num_mixes')
    num_groups = sqrsum_splitted.shape[-1] if check.tensor(sqrsum_splitted, 'sqrsum_splitted').dim() == 3 else 1
    reduce_parts_(
        _view(out_mul_splitted, 'out_mul_splitted', n_splits, num_tokens, num_groups, num_mixes),
        _view(sqrsum_splitted, 'sqrsum_splitted', n_splits, num_tokens, num_groups),
        _view(out_mul, 'out_mul', num_tokens, num_groups, num_mixes),
        _view(sqrsum, 'sqrsum', num_tokens, num_groups),
        out,
        rms_group_size,
        rms_eps,
    )


def mhc_reduce_partials_and_rmsnorm_bwd(
    out_grad: Tensor,
    out_mul: Tensor,
    sqrsum: Tensor,
    out_mul_grad: Tensor,
    sqrsum_grad: Tensor,
    rms_group_size: int,
    rms_eps: float,
) -> None:
    """Write the gradients of out_mul and sqrsum."""
    num_tokens, num_mixes = check.shape(out_grad, 'out_grad', 'num_tokens num_mixes')
    num_groups = sqrsum.shape[-1] if check.tensor(sqrsum, 'sqrsum').dim() == 2 else 1
    reduce_parts_bwd_(
        out_grad,
        _view(out_mul, 'out_mul', num_tokens, num_groups, num_mixes),
        _view(sqrsum, 'sqrsum', num_tokens, num_groups),
        _view(out_mul_grad, 'out_mul_grad', num_tokens, num_groups, num_mixes),
        _view(sqrsum_grad, 'sqrsum_grad', num_tokens, num_groups),
        rms_group_size,
        rms_eps,
    )


def mhc_post_fwd(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, out: Tensor | None = None) -> Tensor:
    """`out[o] = post[o] x + sum_i comb[i, o] residual[i]`, shapes as the op `post` takes them."""
    if out is None:
        return post_op(x, residual, post, comb)
    post_(x, residual, post, comb, out)
    return out


def mhc_post_bwd(
    x: Tensor, residual: Tensor, post: Tensor, comb: Tensor, d_o: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, residual, post and comb of `mhc_post_fwd`."""
    return post_bwd(d_o, x, residual, post, comb)


def mhc_pre_apply_mix_fwd(x: Tensor, mix: Tensor, o: Tensor) -> None:
    """Write sum_c mix[c] x[c] of x (..., n, hidden) and mix (..., n) or (..., n, 1) into o (..., hidden)."""
    apply_mix_(x, _view(mix, 'mix', *check.tensor(x, 'x').shape[:-1], 1), o)


def mhc_pre_apply_mix_bwd(o_grad: Tensor, x: Tensor, mix: Tensor, x_grad: Tensor) -> Tensor:
    """Add the gradient of x to x_grad; returns that of mix."""
    shape = check.tensor(x, 'x').shape
    return apply_mix_bwd_(o_grad, x, _view(mix, 'mix', *shape[:-1], 1), x_grad).view(mix.shape)


def mhc_pre_big_fuse_fwd(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """What follows the projection of a pre, from its parts (n_splits, num_tokens, ...), into the last three tensors."""
    _first_extent(gemm_out_mul, 'gemm_out_mul', n_splits)
    num_tokens, num_streams, _ = check.shape(residual, 'residual', 'num_tokens num_streams hidden')
    mix_and_apply_(
        residual,
        gemm_out_mul,
        gemm_out_sqrsum,
        mhc_scale,
        mhc_base,
        _view(post_mix, 'post_mix', num_tokens, num_streams),
        _view(comb_mix, 'comb_mix', num_tokens, num_streams, num_streams),
        layer_input,
        sinkhorn_repeat,
        rms_eps,
        mhc_pre_eps,
        mhc_sinkhorn_eps,
        mhc_post_mult_value,
    )


def _coefficients(input_mixes: Tensor, mhc_base: Tensor, **mixes: Tensor) -> list[Tensor]:
    """Coefficients as the ops take them; the last are those of the combination."""
    lead = check.tensor(input_mixes, 'input_mixes').shape[:-1]
    num_streams = round((check.tensor(mhc_base, 'mhc_base').numel() + 1) ** 0.5) - 1
    lasts = [1] * (len(mixes) - 1) + [num_streams]
    return [_view(x, name, *lead, num_streams, last) for (name, x), last in zip(mixes.items(), lasts, strict=True)]


def mhc_pre_split_mixes_fwd(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    pre: Tensor,
    post: Tensor,
    comb: Tensor,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> None:
    """Split mixes (..., n (2 + n)) into pre and post of n and comb of n^2 coefficients."""
    outputs = _coefficients(input_mixes, mhc_base, pre=pre, post=post, comb=comb)
    split_mixes_(input_mixes, mhc_scale, mhc_base, *outputs, mhc_post_mult_value, mhc_pre_eps)


def mhc_pre_split_mixes_bwd(
    pre_grad: Tensor,
    post_grad: Tensor,
    comb_grad: Tensor,
    input_mixes: Tensor,
    post: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mixes_grad: Tensor,
    mhc_scale_grad: Tensor,
    mhc_base_grad: Tensor,
    mhc_post_mult_value: float,
) -> None:
    """Write the gradients of mixes, scale and base; `post` has no effect, it follows from the mixes."""
    gradients = dict(pre_grad=pre_grad, post_grad=post_grad, comb_grad=comb_grad)
    upstream = _coefficients(input_mixes, mhc_base, **gradients)
    outputs = (input_mixes_grad, mhc_scale_grad, mhc_base_grad)
    split_mixes_bwd_(*upstream, input_mixes, mhc_scale, mhc_base, *outputs, mhc_post_mult_value)


def mhc_sinkhorn_fwd(comb: Tensor, out: Tensor, repeat: int, eps: float) -> None:
    """Write the Sinkhorn scaling of comb (..., n, n) into out."""
    sinkhorn_(comb, out, repeat, eps)


def mhc_sinkhorn_bwd(grad_output: Tensor, x: Tensor, grad_input: Tensor, repeat: int, eps: float) -> None:
    """Write the gradient of `mhc_sinkhorn_fwd` with respect to comb = x into grad_input."""
    sinkhorn_bwd_(grad_output, x, grad_input, repeat, eps)
