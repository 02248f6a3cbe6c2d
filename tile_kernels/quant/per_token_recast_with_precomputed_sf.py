"""The data of `per_token_recast` with given scale factors.

y[t, h] = round(code[t, h] * (x_sf[t // M, h // N] * (1 / sf[t, h // G])))
"""

from typing import Any

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.op import op
from tile_kernels.quant._checks import check_sf
from tile_kernels.quant.per_token_cast_kernels import launch_cast
from tile_kernels.quant.per_token_recast import BENCH, FULL, SMOKE, check_recast, make_case
from tile_kernels.quant.per_token_recast_with_sf_only import per_token_recast_with_sf_only

# Op -----------------------------------------------------------------------------------------


@op(outputs='y')
def per_token_recast_with_precomputed_sf(x: QuantTensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantize each row of a quantized `x` with given scale factors: round(code * (x_sf * (1 / sf))).

    Args:
        x: as for `per_token_recast`.
        sf: scale factors in the shape and layout of `fmt`.
        fmt: the format of the result and of `sf`.

    Returns:
        The data tensor of `fmt`.
    """
    num_tokens, hidden = check_recast(x, fmt)
    check_sf(sf, 'sf', fmt, num_tokens, hidden)
    check.same_device(x=x.data, sf=sf)
    y = fmt.empty_data(num_tokens, hidden, x.device)
    launch_cast(x.data, x.sf, x.fmt, hidden, y, sf, fmt, fmt.amax_floor, 'data')
    return y


# Cases --------------------------------------------------------------------------------------


def _make_with_sf(**case: Any) -> dict:
    made = make_case(**case)
    return dict(made, sf=per_token_recast_with_sf_only(made['x'], made['fmt']))


per_token_recast_with_precomputed_sf.cases(
    make=_make_with_sf, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:2]
)
