"""SwiGLU and per-token cast in one pass: the float32 activation is quantised without ever being stored.

    act[n, h] = ((l / (1 + exp(-l))) * r) * w[n]            see `swiglu_forward`
    y, y_sf   = per_token_cast(act, fmt)                    see `per_token_cast`; padding rows and their factors are 0

One launch, one read of x. Memory bound: the floor is reading x and writing y and its scale factors.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.quant._swiglu_rows import check_clamp, check_counts, check_halves, check_layout, check_weights
from tile_kernels.quant._swiglu_samples import random_halves, random_rows, row_arguments
from tile_kernels.quant.per_token_cast import _check_floor, _check_format
from tile_kernels.quant.swiglu_forward_kernels import swiglu_forward_kernel

# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
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
    clamped_count: Mut | None = None,
    alignment: int = 128,
    amax_floor: float | None = None,
) -> QuantTensor:
    """SwiGLU, quantised in groups of channels from its float32 result.

    Args:
        x: (num_rows, 2 * hidden) gate and up side by side, or (num_rows, hidden) the gate of `up`; bfloat16, float16 or
            float32, rows dense, any row stride, any hidden (even for e2m1).
        fmt: what to store, e.g. ``QuantFormat.parse('e4m3_1x128_f32')``, as for `per_token_cast`.
        up: (num_rows, hidden), if it is a tensor of its own.
        topk_weights: routing weights, float32: (num_rows,), or (num_tokens, num_topk) with `pos_to_token_topk`.
        pos_to_token_topk: (num_rows,) int32, place of each row's weight in the flat weights; -1 stands for weight 0.
        pos_to_expert: (num_rows,) int32, negative for padding rows.
        psum: (num_experts,) int32, expert e owns rows [align(psum[e - 1], alignment), psum[e]); others are padding.
        weight_scale: factor of the weights.
        clamp_value: gate at most this, up within plus and minus this.
        clamped_count: (3,) or (4,) int64, added to: the numbers of gate > clamp_value, up > clamp_value,
            up < -clamp_value and, in the fourth, elements of the result outside padding rows.
        alignment: multiple at which the rows of an expert start, with `psum`.
        amax_floor: smallest amax a group is scaled by; the format's own if None.

    Returns:
        ``QuantTensor`` of (num_rows, hidden); data and scale factors of padding rows are 0.
    """
    num_tokens, hidden = check_halves(x, up)
    _check_format(fmt)
    check.multiple(hidden, fmt.data.pack, 'hidden')
    static = (hidden, fmt, x.dtype, check.vector_bytes(x, up), up is not None)
    static += (
        check_weights(x, num_tokens, topk_weights, pos_to_token_topk),
        check_layout(x, num_tokens, pos_to_expert, psum, alignment),
        clamp_value is not None,
        check_counts(x, clamp_value, clamped_count),
    )
    clamp, floor = check_clamp(clamp_value), _check_floor(amax_floor, fmt)
    y = fmt.empty(num_tokens, hidden, x.device)
    rows = (topk_weights, pos_to_token_topk, pos_to_expert, psum, clamped_count)
    launch(swiglu_forward_kernel, static, x, up, *y, *rows, weight_scale, clamp, alignment, floor)
    return y


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


def _make_cases(split: bool = False, pitch: int | None = None, **case) -> dict:
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
