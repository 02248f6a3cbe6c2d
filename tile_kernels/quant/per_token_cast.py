"""Per-token cast: quantise every row of a matrix in groups of neighbouring channels.

    amax[t, g] = max |x[t, gG : (g+1)G]|                    G = fmt.sf_block[1], the last group may be shorter
    a[t, g]    = min(max(amax[t, g], amax_floor), FLT_MAX)
    sf[t, g]   = a / max(fmt)                               rounded as the format stores it
    y[t, h]    = round(x[t, h] * sf_inv[t, h // G])         to nearest even, saturating

Of a quantised x = code * x_sf the amax is that of the products, and y = round(code * (x_sf * sf_inv)).

A lane owns several vectors of 8 channels, a group is G / 8 neighbouring lanes: the amax is found by shuffles, nothing
is staged and no thread waits for another warp. The lanes of a group share the rest of its work as well: each divides
for some of the vectors only and passes the multipliers on. The vectors of a lane lie along its row, a warp apart, as
far as rows divide so, and in neighbouring rows: a warp writes its scale factors as whole sectors. A whole-row group
wider than a warp is owned by a block, which keeps the row in registers (rows too long for that are read twice, the
second time from L2).
Memory bound: the floor is reading x and writing y and sf once.

Numbers that are not finite are defined: a NaN does not count in the amax and becomes the format's NaN (0x7F; e2m1 has
none and takes +-6 by the sign bit), an infinity counts as the largest finite float32 and saturates.
"""

import functools

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.lang import WARP
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant._stochastic import MANTISSA
from tile_kernels.quant.per_token_cast_kernels import num_lanes, per_token_cast_kernel, per_token_cast_row_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (16, 32, 64, 128, 0)


# Ops ----------------------------------------------------------------------------------------


def run(
    x: Tensor,
    x_sf: Tensor | None,
    source: torch.dtype | QuantFormat,
    hidden: int,
    y: Tensor | None,
    y_sf: Tensor,
    fmt: QuantFormat,
    amax_floor: float,
    task: str,
) -> None:
    """Launch the kernel that owns groups of this width."""
    wide = fmt.sf_block[1] == 0 and num_lanes(hidden) > WARP
    static = (hidden, fmt, source, check.vector_bytes(x), task)
    launch(per_token_cast_row_kernel if wide else per_token_cast_kernel, static, x, x_sf, y, y_sf, amax_floor)


@functools.cache
def _check_format(fmt: QuantFormat) -> None:
    """`fmt` must be a per-token format; asked once for each."""
    check.one_of(fmt.data.name, ('e4m3', 'e5m2', 'e2m1', 'e5m6'), 'fmt.data')
    check.equal(fmt.sf_block[0], 1, 'fmt.sf_block[0]')
    check.one_of(fmt.sf_block[1], GROUPS, 'fmt.sf_block[1]')


def _check_input(x: Tensor, fmt: QuantFormat) -> tuple[int, int]:
    """Shape of `x`, once it is something the format can hold."""
    _check_format(fmt)
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden', dtype=DTYPES)
    check.unit_stride(x, 'x')
    check.at_least(hidden, 1, 'hidden')
    check.multiple(hidden, fmt.data.pack, 'hidden')
    return num_tokens, hidden


def _check_floor(amax_floor: float | None, fmt: QuantFormat) -> float:
    """The floor in force: the format's own unless given; no scale factor may become zero."""
    if amax_floor is None:
        return fmt.amax_floor
    check.at_least(amax_floor, fmt.data.max * (2.0**-9 if fmt.sf == 'e4m3' else 2.0**-126), 'amax_floor')
    return amax_floor


def _cast_task(fmt: QuantFormat, stochastic: bool) -> str:
    """The task of a cast that rounds this way."""
    if stochastic and fmt.data.name not in MANTISSA:
        check.fail('stochastic', f'must be False for {fmt.data.name}', 'True')
    return 'stochastic' if stochastic else 'cast'


@op(outputs='y y_sf')
def per_token_cast(
    x: Tensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """Quantise each row of `x` in groups of `fmt.sf_block[1]` channels (`all`: the row is one group).

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride; hidden even for e2m1,
            a multiple of 8 for e5m6.
        fmt: what to store, e.g. ``QuantFormat.parse('e4m3_1x128_f32')``: data e4m3, e5m2, e2m1 or e5m6, groups of 16,
            32, 64, 128 or ``all`` channels.
        amax_floor: smallest amax a group is scaled by; the format's own if None. Not a compile-time constant.
        stochastic: round codes up or down at random, so that nothing is lost on average; e4m3, e5m2 and e2m1. The
            random bits are a hash of four scaled numbers and their channel: equal rows round equally.

    Returns:
        ``QuantTensor``: data (num_tokens, hidden), e2m1 two to a byte with the even channel in the lower nibble, and
        sf (num_tokens, ceil(hidden / group)) in the layout of `fmt`; packed bytes without a group are 0.

    A last group shorter than the others uses its own channels only. Scale factors: `f32` and its inverse are two IEEE
    divisions, powers of two are rounded up, `e4m3` to nearest. Codes round to nearest even and saturate. A NaN does
    not count in the amax and becomes the format's NaN 0x7F (e2m1: the largest magnitude, with its sign); an infinity
    counts as the largest finite float32 and saturates. No rows give empty results.
    """
    num_tokens, hidden = _check_input(x, fmt)
    floor, task = _check_floor(amax_floor, fmt), _cast_task(fmt, stochastic)
    y = fmt.empty(num_tokens, hidden, x.device)
    run(x, None, x.dtype, hidden, y.data, y.sf, fmt, floor, task)
    return y


@op(outputs='y_sf')
def per_token_cast_with_sf_only(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors `per_token_cast` would return, without writing data; arguments as there."""
    num_tokens, hidden = _check_input(x, fmt)
    floor = _check_floor(amax_floor, fmt)
    y_sf = fmt.empty_sf(num_tokens, hidden, x.device)
    run(x, None, x.dtype, hidden, None, y_sf, fmt, floor, 'sf')
    return y_sf


@op(outputs='y')
def per_token_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantise each row of `x` with given scale factors: round(x * (1 / sf)), one division for each group.

    Args:
        x: (num_tokens, hidden) as for `per_token_cast`.
        sf: scale factors in the shape and layout of `fmt`, e.g. from `per_token_cast_with_sf_only`.
        fmt: the format of the result and of `sf`.

    Returns:
        The data tensor of `fmt`.
    """
    num_tokens, hidden = _check_input(x, fmt)
    height, width = fmt.sf_shape(num_tokens, hidden)
    check.shape(sf, 'sf', 'num_tokens num_groups', dtype=fmt.sf_dtype, num_tokens=height, num_groups=width)
    check.same_device(x=x, sf=sf)
    if not fmt.col:
        check.contiguous(sf, 'sf')
    elif height > 1 and sf.stride(0) != 1:
        check.fail('sf', 'must be column-major (stride 1 between rows)', check.describe(sf))
    y = fmt.empty_data(num_tokens, hidden, x.device)
    run(x, None, x.dtype, hidden, y, sf, fmt, fmt.amax_floor, 'data')
    return y


# Cases --------------------------------------------------------------------------------------


def _rows(num_tokens: int, hidden: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random rows of many magnitudes that start with zeros; `pitch` makes them strided."""
    magnitude = torch.exp2(torch.randint(-12, 12, (num_tokens, 1))).to(dtype)
    filled = (torch.arange(pitch or hidden) >= min(128, hidden // 2)).to(dtype)
    x = torch.randn(num_tokens, pitch or hidden, dtype=dtype) * magnitude * filled
    return x.narrow(1, 0, hidden)


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, pitch: int | None = None, **options) -> dict:
    return dict(x=_rows(num_tokens, hidden, dtype, pitch), fmt=QuantFormat.parse(fmt), **options)


def _make_with_sf(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, pitch: int | None = None) -> dict:
    x, layout = _rows(num_tokens, hidden, dtype, pitch), QuantFormat.parse(fmt)
    return dict(x=x, sf=per_token_cast_with_sf_only(x, layout), fmt=layout)


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
    make=_make,
    match='bitwise',
    smoke=SMOKE + STOCHASTIC_SMOKE,
    full=FULL + STOCHASTIC_FULL,
    bench=BENCH + STOCHASTIC_BENCH,
)
per_token_cast_with_sf_only.cases(make=_make, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:4])
per_token_cast_with_precomputed_sf.cases(
    make=_make_with_sf, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:4]
)
