"""What the lossless per-block cast means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.reference.quant._common import (
    block_amax,
    dense,
    power_of_two,
    round_to_fp8,
    spread,
    store_sf,
    values_of,
)


def _exponents(sf: Tensor, fmt: QuantFormat, rows: int, cols: int) -> Tensor:
    """Biased exponents of power-of-two scale factors, one for each block."""
    if fmt.sf == 'ue8m0x4':
        return dense(sf).view(torch.uint8)[:, : fmt.blocks(rows, cols)[1]].int()
    return (dense(sf).view(torch.int32) >> 23) & 0xFF


def per_block_cast_lossless(x: QuantTensor, fmt: QuantFormat) -> QuantTensor:
    """Turn fp4 into fp8 with larger scale blocks without changing a value."""
    values = values_of(x.data, x.fmt)
    rows, cols = values.shape
    exponent = spread(_exponents(x.sf, x.fmt, rows, cols), x.fmt, rows, cols)
    top = (block_amax(exponent.float(), fmt).int() - 6).clamp(min=1)
    shift = exponent - spread(top, fmt, rows, cols)
    codes = round_to_fp8(torch.ldexp(values.double(), shift).float(), fmt)
    sf = top.to(torch.uint8) if fmt.sf == 'ue8m0x4' else power_of_two(top)
    return QuantTensor(codes, store_sf(sf, fmt, rows, cols), fmt)
