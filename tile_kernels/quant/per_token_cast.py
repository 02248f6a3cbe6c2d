"""Per-token cast: quantize every row of a matrix in groups of neighbouring channels.

    amax[t, g] = max |x[t, gG : (g+1)G]|                    G = fmt.sf_block[1], the last group may be shorter
    a[t, g]    = min(max(amax[t, g], amax_floor), FLT_MAX)
    sf[t, g]   = a / max(fmt)                               rounded as the format stores it
    y[t, h]    = round(x[t, h] * sf_inv[t, h // G])         to nearest even, saturating

Of a quantized x = code * x_sf the amax is that of the products, and y = round(code * (x_sf * sf_inv)).

A lane owns several vectors of 8 channels, and a group is G / 8 adjacent lanes. The amax is found by shuffles: nothing
is staged, and no thread waits for another warp. The lanes of a group also divide the rest of its work: each computes
some of the multipliers and passes them on. The vectors of a lane lie along its row, a warp apart, if the row length
allows it, and in adjacent rows. So a warp writes its scale factors as whole sectors. A whole-row group wider than a
warp is owned by a block, which keeps the row in registers. Rows too long for that are read twice, the second time from
L2. Memory bound: the floor is reading x and writing y and sf once.

Numbers that are not finite are defined. A NaN does not count in the amax and becomes the format's NaN, 0x7F. e2m1 has
no NaN and takes +-6 by the sign bit. An infinity counts as the largest finite float32 and saturates.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.front import replayed
from tile_kernels.core.op import op
from tile_kernels.quant._checks import (
    Block,
    Pair,
    check_floor,
    check_matrix,
    check_token_format,
    pair_into,
    plain_or_quantized,
    token_format,
)
from tile_kernels.quant._samples import random_rows
from tile_kernels.quant.per_token_cast_kernels import cast_task, launch_cast
from tile_kernels.quant.per_token_recast import per_token_recast

# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def _per_token_cast(
    x: Tensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """Quantize each row of `x` in groups of `fmt.sf_block[1]` channels; no scale uses an amax below `amax_floor`.

    A last group shorter than the others uses its own channels only. The random bits of a stochastic cast are a hash of
    four scaled numbers and their channel: equal rows round equally. No rows give empty results.
    """
    check_token_format(fmt)
    num_tokens, hidden = check_matrix(x, fmt.data.pack)
    floor, task = check_floor(amax_floor, fmt), cast_task(fmt, stochastic)
    y = fmt.empty(num_tokens, hidden, x.device)
    launch_cast(x, None, x.dtype, hidden, y.data, y.sf, fmt, floor, task)
    return y


@_per_token_cast.public
@replayed
def per_token_cast(
    x: Tensor | Pair,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    x_block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: Pair | None = None,
) -> QuantTensor:
    """Quantize each row of `x` in groups of channels.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride, any hidden (even for e2m1). Or
            e4m3, e5m2 or e2m1 data and their scale factors, which are quantized again. Without column-major factors and
            `out`, more leading dimensions are allowed; the results then have them too.
        fmt: 'e4m3', 'e5m2', 'e2m1' or 'e5m6' with the arguments below, or a whole format such as 'e4m3_1x128_f32'
            without them.
        num_per_channels: channels that share a scale factor: 16, 32, 64, 128 or hidden.
        x_block_size: rows and channels (a multiple of 8) that share a scale factor of a quantized `x`; may be left out
            if `x` is a `QuantTensor`.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: scale factors are rounded up to powers of two.
        use_packed_ue8m0: four exponent bytes in an int32; needs `round_sf`.
        use_e4m3_sf: e4m3 scale factors; excludes `round_sf`.
        stochastic_cast: round codes up or down at random, unbiased and reproducible, on every GPU (not e5m6).
        out: data and scale factors to write the result to.

    Returns:
        `QuantTensor`, which unpacks as (data, sf) with x ~= data * sf.
    """
    x = plain_or_quantized(x, x_block_size)
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    if isinstance(x, Tensor) and x.dim() > 2:
        layout = token_format(fmt, num_per_channels, x.flatten(0, -2).shape, *flags)
        if layout.col or out is not None:
            check.fail('x', 'must be (num_tokens, hidden) for column-major factors or out', check.describe(x))
        q = per_token_cast.call(x.flatten(0, -2), layout, None, stochastic_cast)
        return QuantTensor(q.data.unflatten(0, x.shape[:-1]), q.sf.unflatten(0, x.shape[:-1]), layout)
    layout = token_format(fmt, num_per_channels, x.shape, *flags)
    cast = per_token_cast.call if isinstance(x, Tensor) else per_token_recast
    return pair_into(out, cast(x, layout, None, stochastic_cast))


# Cases --------------------------------------------------------------------------------------


def make_case(
    num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, pitch: int | None = None, **options: Any
) -> dict:
    """Arguments of a case."""
    return dict(x=random_rows(num_tokens, hidden, dtype, pitch), fmt=QuantFormat.parse(fmt), **options)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 1, 5], hidden=[128], dtype=BF16, fmt=['e4m3_1x128_f32'])
    + grid(
        num_tokens=[5],
        hidden=[416],  # tail group
        dtype=BF16,
        fmt=['e4m3_1x128_f32_col', 'e5m2_1x64_f32p2', 'e4m3_1x128_ue8m0x4_col', 'e2m1_1x32_f32p2', 'e2m1_1x16_e4m3'],
    )
    + grid(num_tokens=[3], hidden=[102], dtype=F32, fmt=['e2m1_1x32_f32', 'e2m1_1x16_ue8m0x4', 'e4m3_1x16_e4m3_col'])
    + grid(num_tokens=[3], hidden=[99], dtype=F16, fmt=['e4m3_1x32_ue8m0x4'], pitch=[101])  # odd rows, odd stride
    + grid(num_tokens=[3], hidden=[100], dtype=F16, fmt=['e2m1_1xall_f32'])  # a row within a warp
    + grid(num_tokens=[3], hidden=[520], dtype=BF16, fmt=['e4m3_1xall_f32', 'e2m1_1xall_ue8m0x4_col'], pitch=[528])
    + grid(num_tokens=[3], hidden=[544], dtype=BF16, fmt=['e5m6_1xall_f32'])
    + grid(num_tokens=[3], hidden=[104], dtype=F32, fmt=['e5m6_1xall_ue8m0x4_col', 'e5m6_1x32_f32p2'])
)
FULL_FORMATS = [
    f'{data}_1x{group}_{sf}'
    for data in ('e4m3', 'e5m2', 'e2m1')
    for group in (16, 32, 64, 128, 'all')
    for sf in ('f32', 'f32_col', 'f32p2', 'f32p2_col', 'ue8m0x4', 'ue8m0x4_col', 'e4m3', 'e4m3_col')
]
FULL_ROWS = (
    dict(num_tokens=4001, hidden=7168, dtype=torch.bfloat16),
    dict(num_tokens=257, hidden=1344, dtype=torch.float32),
    dict(num_tokens=2049, hidden=1090, dtype=torch.float16, pitch=2180),
)
FULL = (
    [dict(FULL_ROWS[index % len(FULL_ROWS)], fmt=fmt) for index, fmt in enumerate(FULL_FORMATS)]
    + [dict(row, fmt=fmt) for row in FULL_ROWS[:2] for fmt in ('e5m6_1xall_f32', 'e5m6_1x128_ue8m0x4_col')]
    + grid(num_tokens=[3], hidden=[99999], dtype=BF16, fmt=['e4m3_1xall_f32', 'e4m3_1x128_ue8m0x4_col'])
    + grid(num_tokens=[300001], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32', 'e2m1_1x32_ue8m0x4_col'])  # > 2^31
)
BENCH = (
    grid(
        num_tokens=[64, 4096, 16384],
        hidden=[7168],
        dtype=BF16,
        fmt=['e4m3_1x128_f32', 'e4m3_1x128_ue8m0x4_col', 'e2m1_1x32_f32p2', 'e4m3_1xall_f32'],
    )
    + grid(num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32_col', 'e2m1_1x32_f32', 'e2m1_1x16_e4m3'])
    + grid(num_tokens=[4096, 16384], hidden=[7168], dtype=BF16, fmt=['e5m6_1xall_f32'])
    + grid(num_tokens=[32001], hidden=[1344, 576], dtype=BF16, fmt=['e4m3_1x128_f32', 'e2m1_1x32_f32p2'])
    + grid(num_tokens=[8001], hidden=[4096], dtype=F32, fmt=['e4m3_1x128_f32', 'e2m1_1x32_f32p2'])
)
STOCHASTIC_SMOKE = grid(
    num_tokens=[3],
    hidden=[198],
    dtype=BF16,
    fmt=['e4m3_1x64_f32', 'e5m2_1xall_f32p2', 'e2m1_1x32_f32'],
    stochastic=[True],
) + grid(num_tokens=[3], hidden=[520], dtype=F32, fmt=['e4m3_1xall_f32'], stochastic=[True])
STOCHASTIC_FULL = [
    dict(row, fmt=fmt, stochastic=True)
    for row in FULL_ROWS
    for fmt in ('e4m3_1x128_f32', 'e5m2_1x32_f32p2', 'e2m1_1x16_e4m3', 'e4m3_1xall_f32')
]
STOCHASTIC_BENCH = grid(
    num_tokens=[16384], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32', 'e2m1_1x32_f32p2'], stochastic=[True]
)
per_token_cast.cases(
    make=make_case,
    match='bitwise',
    smoke=SMOKE + STOCHASTIC_SMOKE,
    full=FULL + STOCHASTIC_FULL,
    bench=BENCH + STOCHASTIC_BENCH,
)
