"""The scale factors of `per_block_cast` alone."""

from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.op import op
from tile_kernels.quant._checks import Block, block_format, check_floor, into
from tile_kernels.quant.per_block_cast import BENCH, FULL, SMOKE, check_block_cast, launch_block_cast, make_case

# Op -----------------------------------------------------------------------------------------


@op(outputs='y_sf')
def _per_block_cast_with_sf_only(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors that `per_block_cast.call` would return."""
    num_tokens, hidden = check_block_cast(x, fmt)
    floor = check_floor(amax_floor, fmt)
    y_sf = fmt.empty_sf(num_tokens, hidden, x.device)
    launch_block_cast(x, None, y_sf, fmt, floor, 'sf')
    return y_sf


@_per_block_cast_with_sf_only.public
def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str | QuantFormat,
    block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    """The scale factors `per_block_cast` would return; arguments as there."""
    layout = block_format(fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    y_sf = per_block_cast_with_sf_only.call(x, layout)
    return y_sf if out_sf is None else into(out_sf, y_sf, 'out_sf')


# Cases --------------------------------------------------------------------------------------


per_block_cast_with_sf_only.cases(make=make_case, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:2])
