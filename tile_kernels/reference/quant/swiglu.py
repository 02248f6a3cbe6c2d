"""What SwiGLU and its casts mean, in plain PyTorch: float32, left to right, one rounding for each operation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.forms import shown_as
from tile_kernels.core.knobs import knobs
from tile_kernels.reference.quant.blocks import dequantise, per_channel_cast, per_channel_cast_and_transpose
from tile_kernels.reference.quant.tokens import _divide, _quantise, _scale_factors, _store_sf, cast_back

# Rows ---------------------------------------------------------------------------------------


def get_mapping_from_psum(x: Tensor, psum: Tensor, alignment: int | None = None) -> Tensor:
    """Which rows of `x` belong to an expert: e owns [align(psum[e - 1], alignment), psum[e]).

    Without `alignment` it is that of `config.get_token_alignment()`.
    """
    alignment = knobs.token_alignment if alignment is None else alignment
    starts = torch.cat((psum.new_zeros(1), (psum[:-1] + alignment - 1) // alignment * alignment))
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return ((row >= starts) & (row < psum)).any(dim=1)


def _real_rows(x: Tensor, pos_to_expert: Tensor | None, psum: Tensor | None, alignment: int) -> Tensor | None:
    """(num_rows, 1) mask of the rows that are no padding; None if none is."""
    if pos_to_expert is not None:
        return (pos_to_expert >= 0)[:, None]
    return None if psum is None else get_mapping_from_psum(x, psum, alignment)[:, None]


def _row_weights(topk_weights: Tensor | None, pos_to_token_topk: Tensor | None, weight_scale: float) -> Tensor | None:
    """(num_rows, 1) weight of each row; 0 for a row without a slot."""
    if topk_weights is None:
        return None
    if pos_to_token_topk is not None:
        has_slot = (pos_to_token_topk >= 0) & (pos_to_token_topk < topk_weights.numel())
        slot = torch.where(has_slot, pos_to_token_topk, 0).long()
        padded = torch.nn.functional.pad(topk_weights.flatten(), (0, 1))  # there may be no weights at all
        topk_weights = torch.where(has_slot, padded[slot], 0.0)
    return (topk_weights * weight_scale)[:, None]


def _halves(x: Tensor, up: Tensor | None, clamp_value: float | None) -> tuple[Tensor, Tensor]:
    """Gate and up in float32, clamped."""
    gate, up = x.float().chunk(2, dim=1) if up is None else (x.float(), up.float())
    if clamp_value is None:
        return gate, up
    return gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)


def _count(x: Tensor, up: Tensor | None, clamp_value: float, real: Tensor | None, clamped_count: Tensor) -> None:
    """Add the numbers of clamped gates, of ups beyond either bound and, if there is room, of all elements."""
    gate, up = _halves(x, up, None)
    real = torch.ones_like(gate[:, :1], dtype=torch.bool) if real is None else real
    looked_at = (gate > clamp_value, up > clamp_value, up < -clamp_value, torch.ones_like(gate, dtype=torch.bool))
    for k in range(clamped_count.shape[0]):
        clamped_count[k] += (looked_at[k] & real).sum()


def _activate(
    x: Tensor, up: Tensor | None, weight: Tensor | None, clamp_value: float | None, real: Tensor | None
) -> Tensor:
    """((gate / (1 + exp(-gate))) * up) * weight in float32; padding rows are 0."""
    gate, up = _halves(x, up, clamp_value)
    act = gate / (1 + torch.exp(-gate)) * up
    if weight is not None:
        act = act * weight
    return act if real is None else torch.where(real, act, 0.0)


# Forward ------------------------------------------------------------------------------------


def swiglu_forward(
    x: Tensor,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """SwiGLU of rows that hold gate and up side by side."""
    weight = _row_weights(topk_weights, pos_to_token_topk, weight_scale)
    return _activate(x, None, weight, clamp_value, _real_rows(x, pos_to_expert, psum, alignment)).to(dtype)


def swiglu_forward_and_count(
    x: Tensor,
    clamped_count: Tensor,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """`swiglu_forward` that also counts what it clamps."""
    _count(x, None, clamp_value, _real_rows(x, pos_to_expert, psum, alignment), clamped_count)
    return swiglu_forward(
        x, topk_weights, pos_to_token_topk, pos_to_expert, psum, weight_scale, clamp_value, alignment, dtype
    )


def _cast_rows(act: Tensor, fmt: QuantFormat, amax_floor: float | None, real: Tensor | None) -> QuantTensor:
    """Quantise rows; the scale factors of padding rows are 0."""
    sf, sf_inv = _scale_factors(act, fmt, amax_floor)
    if real is not None:
        sf = torch.where(real, sf.float(), 0.0).to(sf.dtype)
    return QuantTensor(_quantise(act, sf_inv, fmt), _store_sf(sf, fmt, *act.shape), fmt)


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: QuantFormat,
    up: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    alignment: int = 128,
    amax_floor: float | None = None,
) -> QuantTensor:
    """SwiGLU, quantised in groups of channels from its float32 result."""
    real = _real_rows(x, pos_to_expert, psum, alignment)
    if clamped_count is not None:
        _count(x, up, clamp_value, real, clamped_count)
    weight = _row_weights(topk_weights, pos_to_token_topk, weight_scale)
    return _cast_rows(_activate(x, up, weight, clamp_value, real), fmt, amax_floor, real)


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor, fmt: QuantFormat, clamp_value: float | None = None, transpose: bool = True
) -> tuple[Tensor, Tensor]:
    """SwiGLU, rounded to bfloat16, quantised in groups of rows for each channel, and transposed."""
    act = _activate(x, None, None, clamp_value, None).bfloat16()
    return per_channel_cast_and_transpose(act, fmt) if transpose else tuple(per_channel_cast(act, fmt))


# Backward -----------------------------------------------------------------------------------


def _fused_multiply_add(a: Tensor, b: Tensor, c: float) -> Tensor:
    """The float32 numbers a * b + c, rounded once.

    The product is exact in float64. The sum is rounded to odd there: its last bit is set if it is inexact, so that
    rounding it once more to float32 is what a single rounding would have given.
    """
    product = a.double() * b.double()
    total = product + c
    back = total - c
    lost = (product - back) + (c - (total - back))
    bits = total.view(torch.int64)
    toward_zero = torch.where((lost != 0) & ((lost > 0) != (total > 0)), bits - 1, bits)
    return torch.where(lost != 0, toward_zero | 1, bits).view(torch.float64).float()


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, clamp_value: float | None, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dy * act, and the weighted activation, all float32; 0 in padding rows."""
    raw_gate, raw_up = _halves(x, None, None)
    gate, up = _halves(x, None, clamp_value)
    t = 1 + torch.exp(-gate)
    s = _divide(1.0, t)
    act = gate / t * up
    g = (dy.float() if weight is None else dy.float() * weight) * s
    dgate = g * up * _fused_multiply_add(gate, 1 - s, 1.0)
    dup = g * gate
    if clamp_value is not None:
        dgate = torch.where(raw_gate > clamp_value, 0.0, dgate)
        dup = torch.where(raw_up.abs() > clamp_value, 0.0, dup)
    results = torch.cat((dgate, dup), dim=1), dy.float() * act, act if weight is None else act * weight
    return results if real is None else tuple(torch.where(real, result, 0.0) for result in results)


def _weight_gradient(
    products: Tensor, topk_weights: Tensor | None, pos_to_token_topk: Tensor | None, weight_scale: float
) -> Tensor:
    """The sum of each row where its weight is; 0 for weights without a row."""
    if topk_weights is None:
        return products.new_empty(0)
    dtopk_weights = products.sum(dim=1) * weight_scale
    if pos_to_token_topk is None:
        return dtopk_weights
    has_slot = (pos_to_token_topk >= 0) & (pos_to_token_topk < topk_weights.numel())
    slots = pos_to_token_topk[has_slot].long()
    return torch.zeros_like(topk_weights).flatten().index_put((slots,), dtopk_weights[has_slot]).view_as(topk_weights)


def swiglu_backward(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dx_dtype: torch.dtype | None = None,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `swiglu_forward`, and its result again."""
    weight = _row_weights(topk_weights, pos_to_token_topk, weight_scale)
    dx, products, y = _gradients(dy, x, weight, clamp_value, _real_rows(x, pos_to_expert, psum, alignment))
    dtopk_weights = _weight_gradient(products, topk_weights, pos_to_token_topk, weight_scale)
    dtype = dx_dtype or x.dtype
    y = y.to(dtype) if recompute else y.new_empty((0, y.shape[1]), dtype=dtype)
    return dx.to(dtype), dtopk_weights, y


def swiglu_backward_and_per_token_cast(
    x: QuantTensor,
    dy: Tensor,
    fmt: QuantFormat,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    token_topk_to_pos: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    alignment: int = 128,
    dx_dtype: torch.dtype = torch.bfloat16,
    recompute: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of SwiGLU of a quantised x, also quantised from their float32 results."""
    real = _real_rows(x.data, pos_to_expert, psum, alignment)
    values = dequantise(x, torch.float32)
    weight = _row_weights(topk_weights, pos_to_token_topk, weight_scale)
    dx, products, y = _gradients(dy, values, weight, clamp_value, real)
    codes, sf = _cast_rows(dx, fmt, None, real)
    dtopk_weights = _weight_gradient(products, topk_weights, pos_to_token_topk, weight_scale)
    y = y.to(dx_dtype) if recompute else y.new_empty((0, y.shape[1]), dtype=dx_dtype)
    return codes, sf, dx.to(dx_dtype), dtopk_weights, y


def fused_swiglu_quant_fp8(
    gate: Tensor, up: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up as fp8 codes and float32 scale factors, one for each row or each `group_size` channels."""
    name = {torch.float8_e4m3fn: 'e4m3', torch.float8_e5m2: 'e5m2'}[dtype]
    return tuple(swiglu_forward_and_per_token_cast(gate, QuantFormat.from_flags(name, (1, group_size or 0)), up))


# TileKernels' references --------------------------------------------------------------------


def swiglu_forward_reference(
    x: Tensor,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    *,
    psum_num_tokens_per_expert: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
) -> Tensor:
    """SwiGLU in float32; `clamped_count` counts all rows that the prefix sums do not leave out."""
    clamp_value = swiglu_clamp_value if clamp_value is None else clamp_value
    if clamp_value is None and clamped_count is not None:
        clamp_value = math.inf  # nothing is clamped, elements are counted
    scale = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    layout = dict(psum=psum_num_tokens_per_expert, alignment=knobs.token_alignment)
    options = dict(weight_scale=scale, clamp_value=clamp_value, dtype=torch.float32, **layout)
    if clamped_count is None:
        return swiglu_forward(x, topk_weights, pos_to_token_topk, **options)
    return swiglu_forward_and_count(x, clamped_count, topk_weights, pos_to_token_topk, **options)


def _reference_by_maps(
    x: tuple[Tensor, Tensor],
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    swiglu_clamp_value: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    values = cast_back(x, 'fp32', (1, num_per_channels))
    dx, dtopk_weights, y = swiglu_backward(
        grad_out, values, weight, pos_to_token_topk, token_topk_to_pos, clamp_value=swiglu_clamp_value, recompute=True
    )
    return y, dx, dtopk_weights


def _reference_by_prefix_sums(
    x: Tensor,
    grad_out: Tensor,
    psum: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    alignment: int = 128,
) -> tuple[Tensor, ...]:
    dx, dtopk_weights, y = swiglu_backward(
        grad_out,
        x,
        topk_weights,
        psum=psum,
        weight_scale=1.0 if routed_scaling_factor is None else routed_scaling_factor,
        clamp_value=clamp_value,
        alignment=alignment,
        dx_dtype=torch.float32,
        recompute=True,
    )
    return (dx, y) if topk_weights is None else (dx, dtopk_weights, y)


@shown_as(_reference_by_maps)
def swiglu_backward_reference(
    x: Tensor | tuple[Tensor, Tensor], grad_out: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, ...]:
    """Gradients of SwiGLU in float32, in two forms that x tells apart.

    A quantised x comes with maps, a plain one with prefix sums (weight_grad only if there are weights):

        (x, grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels, swiglu_clamp_value=None)
            -> (out, x_grad, weight_grad)
        (x, grad_out, psum=None, topk_weights=None, routed_scaling_factor=None, clamp_value=None, alignment=128)
            -> (x_grad, [weight_grad], out)
    """
    form = _reference_by_maps if isinstance(x, tuple) else _reference_by_prefix_sums
    return form(x, grad_out, *args, **kwargs)
