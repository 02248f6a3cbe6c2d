"""Per-token cast of what is quantized already: other codes, other groups, other scale factors, in one pass.

    amax[t, g] = max |code[t, h] * x_sf[t // M, h // N]|    h of group g; M, N = x.fmt.sf_block
    y[t, h]    = round(code[t, h] * (x_sf[t // M, h // N] * sf_inv[t, h // G]))

The kernels are those of `per_token_cast`. A lane reads 8 codes and their scale factor and keeps the codes as float16,
which holds every fp8 and fp4 number. It multiplies the two factors before it multiplies a code. Their product overflows
only where all codes are zero; there it counts as the largest float, so that zeros stay zeros. Memory bound: the floor
is reading codes and scale factors and writing both again.
"""

from typing import Any

import torch

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.op import op
from tile_kernels.device.vectors import LANE
from tile_kernels.quant._checks import check_floor, check_quantized, check_token_format
from tile_kernels.quant._samples import random_quantized
from tile_kernels.quant.per_token_cast_kernels import cast_task, launch_cast

SOURCES = ('e4m3', 'e5m2', 'e2m1')


# Op -----------------------------------------------------------------------------------------


def check_recast(x: QuantTensor, fmt: QuantFormat) -> tuple[int, int]:
    """Shape of `x`, once it is something that the kernels can read and the format can hold."""
    check.one_of(x.fmt.data.name, SOURCES, 'x.fmt.data')
    check.multiple(x.fmt.sf_block[1], LANE, 'x.fmt.sf_block[1]')
    num_tokens, hidden = check_quantized(x)
    check_token_format(fmt)
    check.multiple(hidden, fmt.data.pack, 'hidden')
    return num_tokens, hidden


@op(outputs='y y_sf')
def per_token_recast(
    x: QuantTensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """`per_token_cast` of a quantized `x`.

    Args:
        x: (num_tokens, hidden) e4m3, e5m2 or e2m1 with dense rows and any row stride. Blocks of any number of rows and
            a multiple of 8 channels have one positive scale factor, in any layout.
        fmt: as for `per_token_cast`.
        amax_floor: as for `per_token_cast`.
        stochastic: as for `per_token_cast`.

    Returns:
        As `per_token_cast`: the amax is that of code * sf, and a code is multiplied by the product of its own scale
        factor and the new multiplier. With powers of two that is exactly the cast of the dequantized tensor.
    """
    num_tokens, hidden = check_recast(x, fmt)
    floor, task = check_floor(amax_floor, fmt), cast_task(fmt, stochastic)
    y = fmt.empty(num_tokens, hidden, x.device)
    launch_cast(x.data, x.sf, x.fmt, hidden, y.data, y.sf, fmt, floor, task)
    return y


# Cases --------------------------------------------------------------------------------------


def codes_after_zeros(num_tokens: int, hidden: int, source: str, pad: int) -> QuantTensor:
    """Random codes that begin with zeros."""
    x = random_quantized(num_tokens, hidden, source, pad)
    x.data[:, : min(40, x.data.shape[1] // 2)].view(torch.uint8).zero_()
    return x


def make_case(num_tokens: int, hidden: int, source: str, fmt: str, pad: int = 0, **options: Any) -> dict:
    """Arguments of a case."""
    return dict(x=codes_after_zeros(num_tokens, hidden, source, pad), fmt=QuantFormat.parse(fmt), **options)


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
per_token_recast.cases(make=make_case, match='bitwise', smoke=[*SMOKE, STOCHASTIC], full=FULL, bench=BENCH)
