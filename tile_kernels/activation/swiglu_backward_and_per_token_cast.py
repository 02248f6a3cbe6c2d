"""Gradients of SwiGLU of a quantized x, returned in a model dtype and, from the same float32 numbers, quantized.

    x              = code * sf                              the quantized input, float32
    dx, dw, y      see `swiglu_backward`
    dx_q, dx_sf    = per_token_cast(dx, fmt)                see `per_token_cast`; padding rows and their factors are 0

One launch of `swiglu_backward_kernel`: x and dy are read once, every result is written once. Memory bound.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from tile_kernels.activation._checks import (
    quantized_rows,
    weight_scale_of,
)
from tile_kernels.activation._samples import random_halves, random_map, row_arguments
from tile_kernels.activation.swiglu_backward_kernels import MAX_ROW_THREADS, launch_backward
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.forms import shown_as
from tile_kernels.core.knobs import knobs
from tile_kernels.core.op import op
from tile_kernels.device.vectors import LANE
from tile_kernels.quant._checks import (
    FP8_NAMES,
    GROUPS,
    check_quantized,
    token_format,
)
from tile_kernels.quant.per_token_cast import per_token_cast

# Op -----------------------------------------------------------------------------------------


@functools.cache
def _check_format(fmt: QuantFormat, name: str) -> None:
    """`fmt` must hold fp8 codes with a scale factor for each row and 16 to 128 channels."""
    check.one_of(fmt.data.name, FP8_NAMES.values(), f'{name}.data')
    check.equal(fmt.sf_block[0], 1, f'{name}.sf_block[0]')
    check.one_of(fmt.sf_block[1], GROUPS, f'{name}.sf_block[1]')


def _check_input(x: QuantTensor, fmt: QuantFormat) -> tuple[int, int]:
    """Rows and columns of `x`; a lane must not hold channels of two groups, nor a group those of two turns."""
    _check_format(x.fmt, 'x.fmt')
    _check_format(fmt, 'fmt')
    num_tokens, width = check_quantized(x)
    check.multiple(width, 2 * LANE, 'columns of x')
    if width > 2 * LANE * MAX_ROW_THREADS:
        check.multiple(width, 2 * fmt.sf_block[1], 'columns of x')
    return num_tokens, width


@op(outputs='dx_q dx_sf dx dtopk_weights y')
def _swiglu_backward_and_per_token_cast(
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
    """Gradients of SwiGLU of a quantized `x`, in `dx_dtype` and quantized; arguments as of `swiglu_backward.call`.

    `x` is e4m3 or e5m2 with a scale factor for each row and 16, 32, 64 or 128 channels; hidden is a multiple of 8. Rows
    longer than 16384 need hidden to be a multiple of the group of `fmt`.

    Returns:
        Codes (num_rows, 2 * hidden) and scale factors of dx in the layout of `fmt`; dx, the gradient of the weights and
        y as of `swiglu_backward.call`. All is 0 in padding rows.
    """
    num_tokens, width = _check_input(x, fmt)
    dx_quant = fmt.empty(num_tokens, width, x.data.device)
    rows = (topk_weights, pos_to_token_topk, token_topk_to_pos, pos_to_expert, psum)
    options = (weight_scale, clamp_value, alignment, dx_dtype, recompute)
    results = launch_backward(dy, x.data, x.sf, x.fmt, *rows, *options, dx_quant, fmt.amax_floor)
    return *dx_quant, *results


# Public function ----------------------------------------------------------------------------


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
    x = quantized_rows(x, num_per_channels)
    check.one_of(num_per_channels, GROUPS, 'num_per_channels')
    codes, sf, dx, dtopk_weights, y = swiglu_backward_and_per_token_cast.call(
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
    x = quantized_rows(x, num_per_channels)
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    codes, sf, dx, dtopk_weights, y = swiglu_backward_and_per_token_cast.call(
        x,
        act_x_grad,
        token_format(fmt, num_per_channels, (), *flags, elements=('e4m3', 'e5m2', 'e2m1')),
        topk_weights,
        psum=psum_num_tokens_per_expert,
        weight_scale=weight_scale_of(routed_scaling_factor, topk_weights),
        clamp_value=clamp_value,
        alignment=knobs.token_alignment,
        recompute=do_recompute,
    )
    return (dx, (codes, sf)) + ((dtopk_weights,) if topk_weights is not None else ()) + ((y,) if do_recompute else ())


@shown_as(_gradients_by_maps)
@_swiglu_backward_and_per_token_cast.public
def swiglu_backward_and_per_token_cast(x: tuple[Tensor, Tensor], *args: Any, **kwargs: Any) -> tuple:
    """Gradients of SwiGLU of a quantized x, in bfloat16 and, from the same float32 numbers, quantized.

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


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int, hidden: int, x_fmt: str, fmt: str, rows: str = '', inverse: bool = False, **options: Any
) -> dict:
    x = per_token_cast.call(random_halves(num_tokens, 2 * hidden, torch.float32), QuantFormat.parse(x_fmt))
    arguments = row_arguments(num_tokens, rows)
    if inverse:
        _, arguments['pos_to_token_topk'], arguments['token_topk_to_pos'] = random_map(num_tokens)
    dy = torch.randn(num_tokens, hidden, dtype=torch.bfloat16)
    return dict(x=x, dy=dy, fmt=QuantFormat.parse(fmt), **arguments, **options)


V1 = ['e4m3_1x128_f32']
swiglu_backward_and_per_token_cast.cases(
    make=_make,
    match=dict(rtol=1.6e-2, atol=1e-3),  # the sums for the weights; all else is compared bit for bit in the tests
    smoke=grid(num_tokens=[0, 1, 5], hidden=[128], x_fmt=V1, fmt=V1)
    + grid(
        num_tokens=[0, 9],
        hidden=[256],
        x_fmt=V1,
        fmt=V1,
        rows=['map'],
        inverse=[True],
        recompute=[True],
        clamp_value=[1.0],
    )
    + grid(num_tokens=[9], hidden=[64], x_fmt=['e4m3_1x32_f32'], fmt=['e4m3_1x32_ue8m0x4_col'], rows=['psum'])
    + grid(
        num_tokens=[4],
        hidden=[200],
        x_fmt=['e5m2_1x16_f32p2_col'],
        fmt=['e4m3_1x128_f32', 'e4m3_1x32_ue8m0x4'],
        rows=['row'],
    ),
    full=grid(
        num_tokens=[1, 4001],
        hidden=[2048, 576, 1096],
        x_fmt=['e4m3_1x128_f32', 'e4m3_1x32_f32'],
        fmt=['e4m3_1x128_f32', 'e4m3_1x32_f32p2', 'e4m3_1x128_ue8m0x4_col', 'e5m2_1x64_f32_col'],
        rows=['map', 'psum'],
        clamp_value=[None, 0.5],
        recompute=[True],
    )
    + grid(num_tokens=[3], hidden=[16384], x_fmt=V1, fmt=V1, rows=['row']),  # several turns
    bench=grid(
        num_tokens=[64, 4096, 16384], hidden=[2048], x_fmt=V1, fmt=V1, rows=['map'], inverse=[True], recompute=[True]
    )
    + grid(
        num_tokens=[8001],
        hidden=[3584, 576],
        x_fmt=V1,
        fmt=['e4m3_1x128_ue8m0x4_col'],
        rows=['psum'],
        clamp_value=[10.0],
    ),
)
