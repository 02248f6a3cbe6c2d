"""Per-token cast of what is quantised already: other codes, other groups, other scale factors, in one pass.

    amax[t, g] = max |code[t, h] * x_sf[t // M, h // N]|    h of group g; M, N = x.fmt.sf_block
    y[t, h]    = round(code[t, h] * (x_sf[t // M, h // N] * sf_inv[t, h // G]))

The kernels are those of `per_token_cast`: a lane reads 8 codes and the scale factor that they share, keeps the codes as
float16, which holds every fp8 and fp4 number, and multiplies the two factors before it multiplies a code. Their product
overflows only where all codes are zero; there it counts as the largest float, so that zeros stay zeros.
Memory bound: the floor is reading codes and scale factors and writing both again.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.op import op
from tile_kernels.quant._macros import LANE
from tile_kernels.quant.dequantise import random_quantised
from tile_kernels.quant.per_block_cast import check_sf
from tile_kernels.quant.per_token_cast import _cast_task, _check_floor, _check_format, run

SOURCES = ('e4m3', 'e5m2', 'e2m1')


# Ops ----------------------------------------------------------------------------------------


def _check_input(x: QuantTensor, fmt: QuantFormat) -> tuple[int, int]:
    """Shape of `x`, once it is something that the kernels can read and the format can hold."""
    num_tokens, _ = check.shape(x.data, 'x', 'num_tokens stored', dtype=x.fmt.data.torch)
    hidden = x.shape[1]
    check.unit_stride(x.data, 'x')
    check.one_of(x.fmt.data.name, SOURCES, 'x.fmt.data')
    check.multiple(x.fmt.sf_block[1], LANE, 'x.fmt.sf_block[1]')
    check.at_least(hidden, 1, 'hidden')
    check_sf(x.sf, 'x.sf', x.fmt, num_tokens, hidden)
    check.same_device(x=x.data, x_sf=x.sf)
    _check_format(fmt)
    check.multiple(hidden, fmt.data.pack, 'hidden')
    return num_tokens, hidden


@op(outputs='y y_sf')
def per_token_recast(
    x: QuantTensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """`per_token_cast` of a quantised `x`.

    Args:
        x: (num_tokens, hidden) e4m3, e5m2 or e2m1 with dense rows and any row stride; blocks of any number of rows and
            a multiple of 8 channels share a positive scale factor, in any layout.
        fmt: as for `per_token_cast`.
        amax_floor: as for `per_token_cast`.
        stochastic: as for `per_token_cast`.

    Returns:
        As `per_token_cast`: the amax is that of code * sf, and a code is multiplied by the product of its own scale
        factor and the new multiplier. With powers of two that is exactly the cast of the dequantised tensor.
    """
    num_tokens, hidden = _check_input(x, fmt)
    floor, task = _check_floor(amax_floor, fmt), _cast_task(fmt, stochastic)
    y = fmt.empty(num_tokens, hidden, x.device)
    run(x.data, x.sf, x.fmt, hidden, y.data, y.sf, fmt, floor, task)
    return y


@op(outputs='y_sf')
def per_token_recast_with_sf_only(x: QuantTensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors `per_token_recast` would return, without writing data; arguments as there."""
    num_tokens, hidden = _check_input(x, fmt)
    floor = _check_floor(amax_floor, fmt)
    y_sf = fmt.empty_sf(num_tokens, hidden, x.device)
    run(x.data, x.sf, x.fmt, hidden, None, y_sf, fmt, floor, 'sf')
    return y_sf


@op(outputs='y')
def per_token_recast_with_precomputed_sf(x: QuantTensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantise each row of a quantised `x` with given scale factors: round(code * (x_sf * (1 / sf))).

    Args:
        x: as for `per_token_recast`.
        sf: scale factors in the shape and layout of `fmt`.
        fmt: the format of the result and of `sf`.

    Returns:
        The data tensor of `fmt`.
    """
    num_tokens, hidden = _check_input(x, fmt)
    check_sf(sf, 'sf', fmt, num_tokens, hidden)
    check.same_device(x=x.data, sf=sf)
    y = fmt.empty_data(num_tokens, hidden, x.device)
    run(x.data, x.sf, x.fmt, hidden, y, sf, fmt, fmt.amax_floor, 'data')
    return y


# Cases --------------------------------------------------------------------------------------


def _quantised(num_tokens: int, hidden: int, source: str, pad: int) -> QuantTensor:
    """Random codes that begin with zeros."""
    x = random_quantised(num_tokens, hidden, source, pad)
    x.data[:, : min(40, x.data.shape[1] // 2)].view(torch.uint8).zero_()
    return x


def _make(num_tokens: int, hidden: int, source: str, fmt: str, pad: int = 0, **options) -> dict:
    return dict(x=_quantised(num_tokens, hidden, source, pad), fmt=QuantFormat.parse(fmt), **options)


def _make_with_sf(num_tokens: int, hidden: int, source: str, fmt: str, pad: int = 0) -> dict:
    x, layout = _quantised(num_tokens, hidden, source, pad), QuantFormat.parse(fmt)
    return dict(x=x, sf=per_token_recast_with_sf_only(x, layout), fmt=layout)


SMOKE = (
    grid(num_tokens=[0, 5], hidden=[128], source=['e4m3_1x128_f32'], fmt=['e4m3_1x32_f32p2'])
    + grid(num_tokens=[37], hidden=[200], source=['e4m3_32x32_ue8m0x4_col', 'e2m1_128x128_f32'], fmt=['e2m1_1x64_f32'])
    + grid(num_tokens=[3], hidden=[102], source=['e2m1_1x16_e4m3'], fmt=['e4m3_1x128_f32_col'], pad=[1])
    + grid(num_tokens=[3], hidden=[520], source=['e5m2_1xall_f32'], fmt=['e4m3_1xall_f32'])
)
BLOCKS = ('1x32', '1x128', '32x32', '128x128')
LAYOUTS = ('f32', 'f32_col', 'f32p2', 'ue8m0x4', 'ue8m0x4_col', 'e4m3')
TARGETS = ('e4m3_1x128_f32', 'e2m1_1x32_ue8m0x4_col', 'e5m2_1x64_f32p2', 'e4m3_1xall_f32')
FULL = [
    dict(num_tokens=4001, hidden=(7168, 1090)[index % 2], source=source, fmt=TARGETS[index % len(TARGETS)])
    for index, source in enumerate(f'{d}_{b}_{sf}' for d in SOURCES for b in BLOCKS for sf in LAYOUTS)
] + grid(num_tokens=[300001], hidden=[7168], source=['e4m3_128x128_f32'], fmt=['e2m1_1x32_f32'])  # past 2^31 elements
BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[7168], source=['e4m3_128x128_f32'], fmt=['e4m3_1x128_ue8m0x4_col'])
    + grid(num_tokens=[16384], hidden=[7168], source=['e4m3_1x128_f32'], fmt=['e2m1_1x32_f32p2'])
    + grid(num_tokens=[16384], hidden=[7168], source=['e2m1_1x32_f32p2'], fmt=['e4m3_1x128_f32', 'e4m3_1xall_f32'])
    + grid(num_tokens=[32001], hidden=[1344], source=['e4m3_1x128_f32'], fmt=['e4m3_1x32_f32p2'])
)
STOCHASTIC = dict(num_tokens=5, hidden=200, source='e4m3_1x128_f32', fmt='e2m1_1x32_f32', stochastic=True)
per_token_recast.cases(make=_make, match='bitwise', smoke=[*SMOKE, STOCHASTIC], full=FULL, bench=BENCH)
per_token_recast_with_sf_only.cases(make=_make, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:2])
per_token_recast_with_precomputed_sf.cases(
    make=_make_with_sf, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:2]
)
