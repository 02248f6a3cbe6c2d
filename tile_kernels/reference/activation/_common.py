"""What the twins of SwiGLU share: float32, left to right, one rounding for each operation."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.knobs import knobs
from tile_kernels.reference.quant._common import divide, quantize, scale_factors, store_sf

# Rows ---------------------------------------------------------------------------------------


def get_mapping_from_psum(x: Tensor, psum: Tensor, alignment: int | None = None) -> Tensor:
    """Which rows of `x` belong to an expert: e owns [align(psum[e - 1], alignment), psum[e]).

    Without `alignment` it is that of `config.get_token_alignment()`.
    """
    alignment = knobs.token_alignment if alignment is None else alignment
    starts = torch.cat((psum.new_zeros(1), (psum[:-1] + alignment - 1) // alignment * alignment))
    row = torch.arange(x.shape[0], device=x.device)[:, None]
    return ((row >= starts) & (row < psum)).any(dim=1)


def real_rows(x: Tensor, pos_to_expert: Tensor | None, psum: Tensor | None, alignment: int) -> Tensor | None:
    """(num_rows, 1) mask of the rows that are no padding; None if none is."""
    if pos_to_expert is not None:
        return (pos_to_expert >= 0)[:, None]
    return None if psum is None else get_mapping_from_psum(x, psum, alignment)[:, None]


def row_weights(topk_weights: Tensor | None, pos_to_token_topk: Tensor | None, weight_scale: float) -> Tensor | None:
    """(num_rows, 1) weight of each row; 0 for a row without a slot."""
    if topk_weights is None:
        return None
    if pos_to_token_topk is not None:
        has_slot = (pos_to_token_topk >= 0) & (pos_to_token_topk < topk_weights.numel())
        slot = torch.where(has_slot, pos_to_token_topk, 0).long()
        padded = torch.nn.functional.pad(topk_weights.flatten(), (0, 1))  # there may be no weights at all
        topk_weights = torch.where(has_slot, padded[slot], 0.0)
    return (topk_weights * weight_scale)[:, None]


def halves(x: Tensor, up: Tensor | None, clamp_value: float | None) -> tuple[Tensor, Tensor]:
    """Gate and up in float32, clamped."""
    gate, up = x.float().chunk(2, dim=1) if up is None else (x.float(), up.float())
    if clamp_value is None:
        return gate, up
    return gate.clamp(max=clamp_value), up.clamp(-clamp_value, clamp_value)


# Forward ------------------------------------------------------------------------------------


def count_clamped(
    x: Tensor, up: Tensor | None, clamp_value: float | None, real: Tensor | None, clamped_count: Tensor
) -> None:
    """Add the numbers of clamped gates, of ups beyond either bound and, if there is room, of all elements."""
    gate, up = halves(x, up, None)
    real = torch.ones_like(gate[:, :1], dtype=torch.bool) if real is None else real
    bound = math.inf if clamp_value is None else clamp_value
    looked_at = (gate > bound, up > bound, up < -bound, torch.ones_like(gate, dtype=torch.bool))
    for k in range(clamped_count.shape[0]):
        clamped_count[k] += (looked_at[k] & real).sum()


def activate(
    x: Tensor, up: Tensor | None, weight: Tensor | None, clamp_value: float | None, real: Tensor | None
) -> Tensor:
    """((gate / (1 + exp(-gate))) * up) * weight in float32; padding rows are 0."""
    gate, up = halves(x, up, clamp_value)
    act = gate / (1 + torch.exp(-gate)) * up
    if weight is not None:
        act = act * weight
    return act if real is None else torch.where(real, act, 0.0)


def cast_rows(act: Tensor, fmt: QuantFormat, amax_floor: float | None, real: Tensor | None) -> QuantTensor:
    """Quantize rows or blocks of rows; the scale factors of blocks without a real row are 0."""
    sf, sf_inv = scale_factors(act, fmt, amax_floor)
    if real is not None:
        height = fmt.sf_block[0]
        whole_blocks = torch.nn.functional.pad(real, (0, 0, 0, -real.shape[0] % height))
        sf = torch.where(whole_blocks.view(-1, height, 1).any(1), sf.float(), 0.0).to(sf.dtype)
    return QuantTensor(quantize(act, sf_inv, fmt), store_sf(sf, fmt, *act.shape), fmt)


# Backward -----------------------------------------------------------------------------------


def fused_multiply_add(a: Tensor, b: Tensor, c: float) -> Tensor:
    """The float32 numbers a * b + c, rounded once.

    The product is exact in float64. The sum is rounded to odd there: its last bit is set if it is inexact. So rounding
    it again to float32 gives what a single rounding would have given.
    """
    product = a.double() * b.double()
    total = product + c
    back = total - c
    lost = (product - back) + (c - (total - back))
    bits = total.view(torch.int64)
    toward_zero = torch.where((lost != 0) & ((lost > 0) != (total > 0)), bits - 1, bits)
    return torch.where(lost != 0, toward_zero | 1, bits).view(torch.float64).float()


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, clamp_value: float | None, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dy * act, and the weighted activation, all float32; 0 in padding rows."""
    raw_gate, raw_up = halves(x, None, None)
    gate, up = halves(x, None, clamp_value)
    t = 1 + torch.exp(-gate)
    s = divide(1.0, t)
    act = gate / t * up
    g = (dy.float() if weight is None else dy.float() * weight) * s
    dgate = g * up * fused_multiply_add(gate, 1 - s, 1.0)
    dup = g * gate
    if clamp_value is not None:
        dgate = torch.where(raw_gate > clamp_value, 0.0, dgate)
        dup = torch.where(raw_up.abs() > clamp_value, 0.0, dup)
    dx, products, y = torch.cat((dgate, dup), dim=1), dy.float() * act, act if weight is None else act * weight
    if real is None:
        return dx, products, y
    return torch.where(real, dx, 0.0), torch.where(real, products, 0.0), torch.where(real, y, 0.0)


def weight_gradient(
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
