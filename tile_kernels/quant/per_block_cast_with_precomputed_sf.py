"""The data of `per_block_cast` with given scale factors: round(x * (1 / sf))."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.op import op
from tile_kernels.quant._checks import Block, block_format, check_sf, dense_rows, into
from tile_kernels.quant.per_block_cast import BENCH, FULL, SMOKE, check_block_cast, launch_block_cast, make_case
from tile_kernels.quant.per_block_cast_with_sf_only import per_block_cast_with_sf_only

# Op -----------------------------------------------------------------------------------------


@op(outputs='y')
def _per_block_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantize `x` with given scale factors in the shape and layout of `fmt`."""
    num_tokens, hidden = check_block_cast(x, fmt)
    check_sf(sf, 'sf', fmt, num_tokens, hidden)
    check.same_device(x=x, sf=sf)
    y = fmt.empty_data(num_tokens, hidden, x.device)
    launch_block_cast(x, y, sf, fmt, fmt.amax_floor, 'data')
    return y


@_per_block_cast_with_precomputed_sf.public
def per_block_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str | QuantFormat,
    block_size: Block | None = None,
    sf: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_block_cast` with given scale factors; arguments as there.

    The flags describe `sf`, except that row-major float32 factors are accepted with any of them.
    """
    sf = dense_rows(check.tensor(sf, 'sf'))
    layout = block_format(fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if sf.dtype is torch.float32 and sf.is_contiguous():
        layout = QuantFormat.from_flags(layout.data.name, layout.sf_block)
    y = per_block_cast_with_precomputed_sf.call(x, sf, layout)
    return y if out is None else into(out, y, 'out')


# Cases --------------------------------------------------------------------------------------


def _make_with_sf(**case: Any) -> dict:
    made = make_case(**case)
    return dict(made, sf=per_block_cast_with_sf_only.call(made['x'], made['fmt']))


per_block_cast_with_precomputed_sf.cases(
    make=_make_with_sf, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:2]
)
