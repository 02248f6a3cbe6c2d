"""The data of `per_token_cast` with given scale factors.

    y[t, h] = round(x[t, h] * (1 / sf[t, h // G]))          one division for each group

The kernels are those of `per_token_cast`; no amax is looked for.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.op import op
from tile_kernels.quant._checks import (
    Block,
    Pair,
    check_matrix,
    check_sf,
    check_token_format,
    dense_rows,
    into,
    plain_or_quantized,
    token_format,
)
from tile_kernels.quant.per_token_cast import BENCH, FULL, SMOKE, make_case
from tile_kernels.quant.per_token_cast_kernels import launch_cast
from tile_kernels.quant.per_token_cast_with_sf_only import per_token_cast_with_sf_only
from tile_kernels.quant.per_token_recast_with_precomputed_sf import per_token_recast_with_precomputed_sf

# Op -----------------------------------------------------------------------------------------


@op(outputs='y')
def _per_token_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantize each row of `x` with given scale factors in the shape and layout of `fmt`."""
    check_token_format(fmt)
    num_tokens, hidden = check_matrix(x, fmt.data.pack)
    check_sf(sf, 'sf', fmt, num_tokens, hidden)
    check.same_device(x=x, sf=sf)
    y = fmt.empty_data(num_tokens, hidden, x.device)
    launch_cast(x, None, x.dtype, hidden, y, sf, fmt, fmt.amax_floor, 'data')
    return y


@_per_token_cast_with_precomputed_sf.public
def per_token_cast_with_precomputed_sf(
    x: Tensor | Pair,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    sf: Tensor | None = None,
    x_block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_token_cast` with given scale factors; arguments as there.

    The flags describe `sf`, except that row-major float32 and e4m3 factors are accepted with any of them.
    """
    x, sf = plain_or_quantized(x, x_block_size), dense_rows(check.tensor(sf, 'sf'))
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    layout = token_format(fmt, num_per_channels, x.shape, *flags)
    if sf.dtype in (torch.float32, torch.float8_e4m3fn) and sf.is_contiguous():
        e4m3_sf = sf.dtype is torch.float8_e4m3fn
        layout = QuantFormat.from_flags(layout.data.name, layout.sf_block, use_e4m3_sf=e4m3_sf)
    cast = per_token_cast_with_precomputed_sf.call if isinstance(x, Tensor) else per_token_recast_with_precomputed_sf
    y = cast(x, sf, layout)
    return y if out is None else into(out, y, 'out')


# Cases --------------------------------------------------------------------------------------


def _make_with_sf(**case: Any) -> dict:
    made = make_case(**case)
    return dict(made, sf=per_token_cast_with_sf_only.call(made['x'], made['fmt']))


per_token_cast_with_precomputed_sf.cases(
    make=_make_with_sf, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:4]
)
