"""The scale factors of `per_token_recast` alone: those of `per_token_cast_with_sf_only` of a quantized x."""

from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.op import op
from tile_kernels.quant._checks import check_floor
from tile_kernels.quant.per_token_cast_kernels import launch_cast
from tile_kernels.quant.per_token_recast import BENCH, FULL, SMOKE, check_recast, make_case

# Op -----------------------------------------------------------------------------------------


@op(outputs='y_sf')
def per_token_recast_with_sf_only(x: QuantTensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors `per_token_recast` would return, without writing data; arguments as there."""
    num_tokens, hidden = check_recast(x, fmt)
    floor = check_floor(amax_floor, fmt)
    y_sf = fmt.empty_sf(num_tokens, hidden, x.device)
    launch_cast(x.data, x.sf, x.fmt, hidden, None, y_sf, fmt, floor, 'sf')
    return y_sf


# Cases --------------------------------------------------------------------------------------


per_token_recast_with_sf_only.cases(make=make_case, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:2])
