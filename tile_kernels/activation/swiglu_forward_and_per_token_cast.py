"""SwiGLU and per-token cast in one pass: the float32 activation is quantized without ever being stored.

    act[n, h] = ((l / (1 + exp(-l))) * r) * w[n]            see `swiglu_forward`
    y, y_sf   = per_token_cast(act, fmt)                    see `per_token_cast`; padding rows and their factors are 0

One launch, one read of x. Memory bound: the floor is reading x and writing y and its scale factors.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.activation._checks import (
    check_halves,
    check_place,
    counted_clamp,
    weight_scale_of,
)
from tile_kernels.activation._samples import random_halves, random_rows, row_arguments
from tile_kernels.activation.swiglu_forward_kernels import launch_forward
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.front import replayed
from tile_kernels.core.knobs import knobs
from tile_kernels.core.op import Mut, op
from tile_kernels.quant._checks import (
    check_floor,
    check_token_format,
    token_format,
)

# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def _swiglu_forward_and_per_token_cast(
    x: Tensor,
    fmt: QuantFormat,
    up: Tensor | None = None,
    topk_weights: Tensor | None = None,
    pos_to_token_topk: Tensor | None = None,
    pos_to_expert: Tensor | None = None,
    psum: Tensor | None = None,
    weight_scale: float = 1.0,
    clamp_value: float | None = None,
    clamped_count: Mut | None = None,
    alignment: int = 128,
    amax_floor: float | None = None,
) -> QuantTensor:
    """SwiGLU, quantized in groups of channels from its float32 result; arguments as of `swiglu_forward.call`.

    `x` holds gate and up side by side, or is the gate of `up`. Data and scale factors of padding rows are 0.
    `clamped_count` is that of `swiglu_forward_and_count`, `amax_floor` the smallest amax a group is scaled by.
    """
    num_tokens, hidden = check_halves(x, up)
    check_token_format(fmt)
    check.multiple(hidden, fmt.data.pack, 'hidden')
    floor = check_floor(amax_floor, fmt)
    y = fmt.empty(num_tokens, hidden, x.device)
    rows = (topk_weights, pos_to_token_topk, pos_to_expert, psum)
    launch_forward(x, up, hidden, fmt, y.data, y.sf, *rows, weight_scale, clamp_value, clamped_count, alignment, floor)
    return y


@_swiglu_forward_and_per_token_cast.public
@replayed
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
    """SwiGLU, quantized in groups of channels from its float32 result.

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
    if swiglu_clamp_value is not None and clamp_value is not None:
        check.fail('swiglu_clamp_value and clamp_value', 'must not both be given', 'both')
    clamp = clamp_value if swiglu_clamp_value is None else swiglu_clamp_value
    return swiglu_forward_and_per_token_cast.call(
        x,
        token_format(fmt, num_per_channels, (num_rows, width // 2), *flags, elements=('e4m3', 'e5m2', 'e2m1')),
        None,
        topk_weights,
        check_place(pos_to_token_topk, topk_weights, num_rows),
        pos_to_expert,
        psum_num_tokens_per_expert,
        weight_scale_of(routed_scaling_factor, topk_weights),
        counted_clamp(clamp, clamped_count),
        clamped_count,
        knobs.token_alignment,
        sf_clamp_min,
    )


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    fmt: str,
    rows: str = '',
    num_counts: int = 0,
    clamp_value: float | None = None,
) -> dict:
    x = random_rows(num_tokens, hidden, dtype, rows)
    counts = torch.arange(num_counts) if num_counts else None
    return dict(**x, fmt=QuantFormat.parse(fmt), clamp_value=clamp_value, clamped_count=counts)


def _make_cases(split: bool = False, pitch: int | None = None, **case: Any) -> dict:
    """With `split`, gate and up are two tensors, strided if a pitch is given."""
    if not split:
        return _make(**case)
    num_tokens, hidden, dtype = case['num_tokens'], case['hidden'], case['dtype']
    x, up = (random_halves(num_tokens, hidden, dtype, pitch) for _ in range(2))
    return dict(x=x, up=up, fmt=QuantFormat.parse(case['fmt']), **row_arguments(num_tokens, case.get('rows', '')))


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SF_NAMES = ('f32', 'f32_col', 'f32p2', 'f32p2_col', 'ue8m0x4', 'ue8m0x4_col', 'e4m3', 'e4m3_col')
FULL_FORMATS = [f'{d}_1x{g}_{sf}' for d in ('e4m3', 'e2m1') for g in (16, 32, 128, 'all') for sf in SF_NAMES]
FULL_ROWS = (
    dict(num_tokens=4001, hidden=2048, dtype=torch.bfloat16, rows='map', num_counts=3, clamp_value=0.5),
    dict(num_tokens=2049, hidden=1090, dtype=torch.float32, rows='psum', num_counts=4, clamp_value=10.0),
    dict(num_tokens=257, hidden=3584, dtype=torch.float16, split=True, pitch=3600, rows='row'),
)
swiglu_forward_and_per_token_cast.cases(
    make=_make_cases,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 5], hidden=[128], dtype=BF16, fmt=['e4m3_1x128_f32'])
    + grid(num_tokens=[9], hidden=[272], dtype=BF16, fmt=['e4m3_1x128_ue8m0x4_col'], rows=['map', 'psum'])
    + grid(
        num_tokens=[9], hidden=[96], dtype=F32, fmt=['e2m1_1x32_f32'], rows=['psum'], num_counts=[4], clamp_value=[1.0]
    )
    + grid(num_tokens=[3], hidden=[99], dtype=F16, fmt=['e5m2_1x16_f32p2_col'], split=[True], pitch=[101])
    + grid(
        num_tokens=[6],
        hidden=[520],
        dtype=BF16,
        fmt=['e4m3_1xall_f32'],
        rows=['map', 'psum'],
        num_counts=[3],
        clamp_value=[1.0],
    )
    + grid(num_tokens=[3], hidden=[520], dtype=BF16, fmt=['e4m3_1xall_f32', 'e4m3_1x128_e4m3'], split=[True]),
    full=[dict(FULL_ROWS[index % len(FULL_ROWS)], fmt=fmt) for index, fmt in enumerate(FULL_FORMATS)]
    + grid(num_tokens=[3], hidden=[50000], dtype=BF16, fmt=['e4m3_1xall_f32'])  # several passes
    + grid(num_tokens=[600001], hidden=[2048], dtype=BF16, fmt=['e4m3_1x128_f32']),  # past 2^31 elements
    bench=grid(
        num_tokens=[64, 4096, 16384], hidden=[2048], dtype=BF16, fmt=['e4m3_1x128_f32', 'e4m3_1x128_ue8m0x4_col']
    )
    + grid(num_tokens=[64, 4096], hidden=[2048], dtype=BF16, fmt=['e4m3_1xall_f32'], split=[True])
    + grid(
        num_tokens=[8001],
        hidden=[3584],
        dtype=BF16,
        fmt=['e4m3_1x128_f32'],
        rows=['map', 'psum'],
        num_counts=[3],
        clamp_value=[10.0],
    )
    + grid(num_tokens=[32001], hidden=[576, 1344], dtype=BF16, fmt=['e4m3_1x128_f32']),
)
