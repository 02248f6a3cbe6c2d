"""The public SwiGLU functions: TileKernels' arguments and the friendly name, handed to the ops.

Rows are described in one of two ways. Maps: `pos_to_token_topk` says where the weight of a row is, `pos_to_expert`
which rows are padding. Prefix sums: `psum_num_tokens_per_expert` says where the rows of an expert end, they start at
multiples of `config.get_token_alignment()`, and weights are given by row. Padding rows come out as 0.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.forms import shown_as
from tile_kernels.core.knobs import knobs
from tile_kernels.quant.front import dense_rows
from tile_kernels.quant.swiglu_backward import swiglu_backward as backward_op
from tile_kernels.quant.swiglu_backward_and_per_token_cast import swiglu_backward_and_per_token_cast as backward_cast_op
from tile_kernels.quant.swiglu_forward import swiglu_forward as forward_op
from tile_kernels.quant.swiglu_forward import swiglu_forward_and_count as count_op
from tile_kernels.quant.swiglu_forward_and_per_channel_cast_and_transpose import (
    swiglu_forward_and_per_channel_cast_and_transpose as channel_cast_op,
)
from tile_kernels.quant.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast as cast_op

GROUPS = (16, 32, 64, 128)
DTYPE_NAMES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}
FP8_NAMES = {torch.float8_e4m3fn: 'e4m3', torch.float8_e5m2: 'e5m2'}


def _dtype(fmt: str) -> torch.dtype:
    check.one_of(fmt, DTYPE_NAMES, 'fmt')
    return DTYPE_NAMES[fmt]


def _weight_scale(routed_scaling_factor: float | None, topk_weights: Tensor | None) -> float:
    if routed_scaling_factor is None:
        return 1.0
    if topk_weights is None:
        check.fail('routed_scaling_factor', 'must come with topk_weights', 'no topk_weights')
    return routed_scaling_factor


def _counted_clamp(clamp_value: float | None, clamped_count: Tensor | None) -> float | None:
    """The clamp: infinity if there is none but clamped elements are to be counted."""
    return math.inf if clamp_value is None and clamped_count is not None else clamp_value


def _format(fmt: str | QuantFormat, num_per_channels: int | None, width: int, *flags: bool) -> QuantFormat:
    """The per-token format that the flags describe; a whole format (object or name) is taken as it is."""
    if isinstance(fmt, QuantFormat) or (isinstance(fmt, str) and '_' in fmt):
        if num_per_channels is not None or any(flags):
            check.fail('num_per_channels and the sf flags', 'must be left out when fmt is a whole format', str(fmt))
        return QuantFormat.parse(fmt)
    check.one_of(fmt, ('e4m3', 'e5m2', 'e2m1'), 'fmt')
    group = num_per_channels
    if group is not None:
        check.integer(group, 'num_per_channels')
    if group not in GROUPS:
        if group != width:
            check.one_of(group, (*GROUPS, 'hidden'), 'num_per_channels')
        group = 0
    return QuantFormat.from_flags(fmt, (1, group), *flags)


def _quantised(x: tuple[Tensor, Tensor], num_per_channels: int | None) -> QuantTensor:
    """A plain pair is fp8 codes with row-major float32 factors for `num_per_channels` channels each."""
    if isinstance(x, QuantTensor):
        return x
    data, sf = check.pair(x, 'x')
    check.dtype(data, 'x', tuple(FP8_NAMES))
    check.dtype(sf, 'x.sf', torch.float32)
    if num_per_channels is None:
        check.fail('num_per_channels', 'must be given with a pair that is no QuantTensor', 'None')
    check.one_of(num_per_channels, GROUPS, 'num_per_channels')
    if data.dim() > 2:
        data, sf = data.flatten(0, -2), sf.flatten(0, -2)
    return QuantTensor(data, dense_rows(sf), QuantFormat.from_flags(FP8_NAMES[data.dtype], (1, num_per_channels)))


# Forward ------------------------------------------------------------------------------------


def swiglu_forward(
    x: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
) -> Tensor:
    """SwiGLU of rows that hold gate and up side by side: (silu(gate) * up) * weight.

    Args:
        x: (num_rows, 2 * hidden) bfloat16, float16 or float32, any row stride, any hidden.
        fmt: dtype of the result: 'bf16', 'fp16' or 'fp32'.
        psum_num_tokens_per_expert: (num_experts,) int32, where the rows of each expert end; other rows are padding.
        topk_weights: (num_rows,) float32.
        routed_scaling_factor: factor of the weights.
        clamp_value: gate at most this, up within plus and minus this.
        clamped_count: (3,) or (4,) int64, added to: gate > c, up > c, up < -c (nothing without a clamp) and elements
            outside padding rows.

    Returns:
        (num_rows, hidden), differentiable in `x` and `topk_weights` unless `clamped_count` is given.
    """
    options: dict[str, Any] = dict(
        topk_weights=topk_weights,
        psum=psum_num_tokens_per_expert,
        weight_scale=_weight_scale(routed_scaling_factor, topk_weights),
        clamp_value=_counted_clamp(clamp_value, clamped_count),
        alignment=knobs.token_alignment,
        dtype=_dtype(fmt),
    )
    return forward_op(x, **options) if clamped_count is None else count_op(x, clamped_count, **options)


def swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    pos_to_token_topk: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    swiglu_clamp_value: float | None = None,
    clamped_count: Tensor | None = None,
    sf_clamp_min: float | None = None,
    *,
    psum_num_tokens_per_expert: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
) -> QuantTensor:
    """SwiGLU, quantised in groups of channels from its float32 result.

    Args:
        x: (num_rows, 2 * hidden) gate and up side by side, bfloat16, float16 or float32, any row stride, any hidden.
        fmt: 'e4m3', 'e5m2' or 'e2m1' with the arguments below, or a whole format such as 'e4m3_1x128_f32' without them.
        num_per_channels: channels that share a scale factor: 16, 32, 64, 128 or hidden.
        pos_to_token_topk: (num_rows,) int32, place of each row's weight in the flat `topk_weights`; -1: weight 0. Says
            nothing without weights.
        topk_weights: float32, (num_tokens, num_topk) with a map, else (num_rows,).
        pos_to_expert: (num_rows,) int32, negative for padding rows.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: scale factors are rounded up to powers of two.
        use_packed_ue8m0: four exponent bytes in an int32; needs `round_sf`.
        swiglu_clamp_value: gate at most this, up within plus and minus this.
        clamped_count: (3,) or (4,) int64, added to: gate > c, up > c, up < -c (nothing without a clamp) and elements
            outside padding rows.
        sf_clamp_min: smallest amax a group is scaled by.
        psum_num_tokens_per_expert: (num_experts,) int32, where the rows of each expert end; other rows are padding.
        routed_scaling_factor: factor of the weights.
        clamp_value: another name of `swiglu_clamp_value`.

    Returns:
        `QuantTensor`, which unpacks as (data, sf); both are 0 in padding rows.
    """
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    num_rows, width = check.shape(x, 'x', 'num_rows 2*hidden')
    if topk_weights is None and pos_to_token_topk is not None:  # a map to no weights says nothing
        check.shape(pos_to_token_topk, 'pos_to_token_topk', 'num_rows', dtype=torch.int32, num_rows=num_rows)
        pos_to_token_topk = None
    if swiglu_clamp_value is not None and clamp_value is not None:
        check.fail('swiglu_clamp_value and clamp_value', 'must not both be given', 'both')
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    return cast_op(
        x,
        _format(fmt, num_per_channels, width // 2, *flags),
        None,
        topk_weights,
        pos_to_token_topk,
        pos_to_expert,
        psum_num_tokens_per_expert,
        _weight_scale(routed_scaling_factor, topk_weights),
        _counted_clamp(clamp, clamped_count),
        clamped_count,
        knobs.token_alignment,
        sf_clamp_min,
    )


def swiglu_forward_and_per_channel_cast_and_transpose(
    x: Tensor,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    without_transpose: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[Tensor, Tensor]:
    """SwiGLU, rounded to bfloat16, then quantised for each channel in groups of rows and stored transposed.

    Args:
        x: (num_tokens, 2 * hidden) gate and up side by side, bfloat16, float16 or float32, any row stride.
        fmt: 'e4m3' or 'e5m2'.
        num_per_tokens: rows that share a scale factor: 32 or 128.
        round_sf: scale factors are rounded up to powers of two.
        without_transpose: codes are (num_tokens, hidden).
        swiglu_clamp_value: gate at most this, up within plus and minus this.

    Returns:
        Codes (hidden, num_tokens) and float32 scale factors (ceil(num_tokens / num_per_tokens), hidden).
    """
    check.one_of(fmt, FP8_NAMES.values(), 'fmt')
    check.one_of(num_per_tokens, (32, 128), 'num_per_tokens')
    layout = QuantFormat.from_flags(fmt, (num_per_tokens, 1), round_sf=round_sf)
    return channel_cast_op(x, layout, swiglu_clamp_value, not without_transpose)


def fused_swiglu_quant_fp8(
    gate: Tensor, up: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """`silu(gate) * up`, quantised to fp8; gate and up are read once.

    Args:
        gate: (num_tokens, intermediate) bfloat16, float16 or float32, any row stride, any width.
        up: shape and dtype of `gate`.
        group_size: channels that share a scale: 16, 32, 64 or 128; None for one scale per row.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        `(out_fp8, scale)`: codes (num_tokens, intermediate) and float32 scales (num_tokens, 1) or
        (num_tokens, ceil(intermediate / group_size)), with silu(gate) * up ~= out_fp8.float() * scale.
    """
    check.one_of(dtype, FP8_NAMES, 'dtype')
    check.one_of(group_size, (None, *GROUPS), 'group_size')
    return cast_op(gate, QuantFormat.from_flags(FP8_NAMES[dtype], (1, group_size or 0)), up)


# Backward -----------------------------------------------------------------------------------


def swiglu_backward(
    x: Tensor,
    act_x_grad: Tensor,
    fmt: str,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple[Tensor, ...]:
    """Gradients of `swiglu_forward`.

    Args:
        x: (num_rows, 2 * hidden), what the forward pass was given.
        act_x_grad: (num_rows, hidden), gradient of its result.
        fmt: dtype of the gradient of x, and of the result again: 'bf16', 'fp16' or 'fp32'.
        psum_num_tokens_per_expert: see `swiglu_forward`.
        topk_weights: see `swiglu_forward`.
        routed_scaling_factor: see `swiglu_forward`.
        clamp_value: see `swiglu_forward`.
        do_recompute: whether to return the result of the forward pass again.

    Returns:
        A tuple: the gradient of x; with weights their gradient (num_rows,); with `do_recompute` the forward result.
    """
    dx, dtopk_weights, y = backward_op(
        act_x_grad,
        x,
        topk_weights=topk_weights,
        psum=psum_num_tokens_per_expert,
        weight_scale=_weight_scale(routed_scaling_factor, topk_weights),
        clamp_value=clamp_value,
        alignment=knobs.token_alignment,
        dx_dtype=_dtype(fmt),
        recompute=do_recompute,
    )
    return (dx,) + ((dtopk_weights,) if topk_weights is not None else ()) + ((y,) if do_recompute else ())


def _gradients_by_maps(
    x: tuple[Tensor, Tensor],
    grad_out: Tensor,
    weight: Tensor,
    pos_to_token_topk: Tensor,
    token_topk_to_pos: Tensor,
    num_per_channels: int,
    round_sf: bool = False,
    swiglu_clamp_value: float | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor, Tensor]:
    x = _quantised(x, num_per_channels)
    check.one_of(num_per_channels, GROUPS, 'num_per_channels')
    codes, sf, dx, dtopk_weights, y = backward_cast_op(
        x,
        grad_out,
        QuantFormat.from_flags('e4m3', (1, num_per_channels), round_sf=round_sf),
        weight,
        pos_to_token_topk,
        token_topk_to_pos,
        clamp_value=swiglu_clamp_value,
        recompute=True,
    )
    return y, (codes, sf), dx, dtopk_weights


def _gradients_by_prefix_sums(
    x: tuple[Tensor, Tensor],
    act_x_grad: Tensor,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    psum_num_tokens_per_expert: Tensor | None = None,
    topk_weights: Tensor | None = None,
    routed_scaling_factor: float | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    clamp_value: float | None = None,
    do_recompute: bool = False,
) -> tuple:
    x = _quantised(x, num_per_channels)
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    codes, sf, dx, dtopk_weights, y = backward_cast_op(
        x,
        act_x_grad,
        _format(fmt, num_per_channels, 0, *flags),
        topk_weights,
        psum=psum_num_tokens_per_expert,
        weight_scale=_weight_scale(routed_scaling_factor, topk_weights),
        clamp_value=clamp_value,
        alignment=knobs.token_alignment,
        recompute=do_recompute,
    )
    return (dx, (codes, sf)) + ((dtopk_weights,) if topk_weights is not None else ()) + ((y,) if do_recompute else ())


@shown_as(_gradients_by_maps)
def swiglu_backward_and_per_token_cast(x: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> tuple:
    """Gradients of SwiGLU of a quantised x, in bfloat16 and, from the same float32 numbers, quantised.

    The third argument tells the two forms apart. With maps:

        swiglu_backward_and_per_token_cast(
            x, grad_out, weight, pos_to_token_topk, token_topk_to_pos, num_per_channels,
            round_sf=False, swiglu_clamp_value=None,
        ) -> (out, (x_grad_fp8, x_grad_sf), x_grad, weight_grad)

    With prefix sums, where the gradient of the weights and the forward result come last and only if there are weights
    and with `do_recompute`:

        swiglu_backward_and_per_token_cast(
            x, act_x_grad, fmt, num_per_channels, psum_num_tokens_per_expert=None, topk_weights=None,
            routed_scaling_factor=None, use_tma_aligned_col_major_sf=False, round_sf=False, use_packed_ue8m0=False,
            clamp_value=None, do_recompute=False,
        ) -> (x_grad, (x_grad_fp8, x_grad_sf), [weight_grad], [out])

    Args:
        x: codes (num_rows, 2 * hidden) and row-major float32 scale factors, one for each `num_per_channels` channels,
            or a `QuantTensor` of any per-token fp8 format.
        args: the arguments above.
        kwargs: the arguments above, by name.

    Returns:
        The tuple above; everything is 0 in padding rows.
    """
    by_maps = isinstance(args[1], Tensor) if len(args) > 1 else 'fmt' not in kwargs
    return (_gradients_by_maps if by_maps else _gradients_by_prefix_sums)(x, *args, **kwargs)
