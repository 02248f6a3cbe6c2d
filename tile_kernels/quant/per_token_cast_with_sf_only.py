"""The scale factors of `per_token_cast` alone: half of its work, for factors that are shared or changed first.

The kernels are those of `per_token_cast`; nothing but scale factors is written.
"""

from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.op import op
from tile_kernels.quant._checks import (
    Block,
    Pair,
    check_floor,
    check_matrix,
    check_token_format,
    into,
    plain_or_quantized,
    token_format,
)
from tile_kernels.quant.per_token_cast import BENCH, FULL, SMOKE, make_case
from tile_kernels.quant.per_token_cast_kernels import launch_cast
from tile_kernels.quant.per_token_recast_with_sf_only import per_token_recast_with_sf_only

# Op -----------------------------------------------------------------------------------------


@op(outputs='y_sf')
def _per_token_cast_with_sf_only(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors that `per_token_cast.call` would return."""
    check_token_format(fmt)
    num_tokens, hidden = check_matrix(x, fmt.data.pack)
    floor = check_floor(amax_floor, fmt)
    y_sf = fmt.empty_sf(num_tokens, hidden, x.device)
    launch_cast(x, None, x.dtype, hidden, None, y_sf, fmt, floor, 'sf')
    return y_sf


@_per_token_cast_with_sf_only.public
def per_token_cast_with_sf_only(
    x: Tensor | Pair,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    x_block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    """The scale factors `per_token_cast` would return; arguments as there."""
    x = plain_or_quantized(x, x_block_size)
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    layout = token_format(fmt, num_per_channels, x.shape, *flags)
    find = per_token_cast_with_sf_only.call if isinstance(x, Tensor) else per_token_recast_with_sf_only
    y_sf = find(x, layout)
    return y_sf if out_sf is None else into(out_sf, y_sf, 'out_sf')


# Cases --------------------------------------------------------------------------------------


per_token_cast_with_sf_only.cases(make=make_case, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:4])
