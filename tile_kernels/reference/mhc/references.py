"""The public functions under their names, and the references that test-suites compare with.

Float32 references compute in float64, so that gradients summed over all tokens leave their bounds to what is tested.
"""

import torch
from torch import Tensor

from tile_kernels.reference.mhc.mixes import head_mix, sinkhorn, split_mixes
from tile_kernels.reference.mhc.projection import norm_fn
from tile_kernels.reference.mhc.streams import apply_mix, expand, post


def sinkhorn_normalize(conn_weights: Tensor, num_iters: int = 20, eps: float = 1e-6) -> Tensor:
    """Scale the rows and columns of every matrix in turn."""
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
    """Coefficients of every token from its projection."""
    return split_mixes(mixes, scale, base, num_streams, post_mult, pre_eps)


def mhc_mix_apply(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the residual streams."""
    return apply_mix(x, mix)


def expand_to_mhc_ref(hidden: Tensor, mhc_mult: int) -> Tensor:
    """Copy hidden states into all streams."""
    return expand(hidden, mhc_mult)


def sinkhorn_normalize_ref(x: Tensor, repeat: int = 10, eps: float = 1e-6) -> Tensor:
    """Scale columns and rows in turn."""
    dtype, x = x.dtype, x.double().softmax(-1) + eps
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(repeat - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x.to(dtype)


def mhc_head_compute_mix_ref(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """Shares of the streams in the output of a model."""
    mix = head_mix(input_mix.double(), mhc_scale.double(), mhc_base.double(), mhc_pre_eps)
    return mix.to(input_mix.dtype)


def mhc_pre_split_mixes_ref(
    input_mixes: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    mhc_mult: int,
    mhc_post_mult_value: float,
    mhc_pre_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients from the projection."""
    exact = input_mixes.double(), mhc_scale.double(), mhc_base.double()
    pre, post, comb = split_mixes(*exact, mhc_mult, mhc_post_mult_value, mhc_pre_eps)
    return pre.to(input_mixes.dtype), post.to(input_mixes.dtype), comb.to(input_mixes.dtype)


def mhc_pre_apply_mix_ref(x: Tensor, mix: Tensor) -> Tensor:
    """The weighted sum of the streams."""
    return apply_mix(x, mix)


def mhc_post_ref(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """The streams after a layer."""
    return post(x, residual, post_layer_mix, comb_res_mix)


def mhc_pre_norm_fn_ref(
    residual: Tensor, mhc_fn: Tensor, mhc_norm_weight: Tensor | None, mhc_norm_eps: float
) -> Tensor:
    """The normalised projection with products as TF32 takes them, whatever precision PyTorch is set to."""
    return norm_fn(residual, mhc_fn if mhc_norm_weight is None else mhc_fn * mhc_norm_weight, mhc_norm_eps)[0]


def mhc_pre_norm_fn_partials_ref(residual: Tensor, fn: Tensor, n_splits: int) -> tuple[Tensor, Tensor]:
    """Products and sums of squares of every of n_splits equal shares of the channels, shares first."""
    shares = residual.flatten(-2).float().chunk(n_splits, -1)
    products = [x @ part.T for x, part in zip(shares, fn.chunk(n_splits, -1), strict=True)]
    return torch.stack(products), torch.stack([x.square().sum(-1) for x in shares])
