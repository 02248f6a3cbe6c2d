"""Residual streams from hidden states."""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.mhc.expand import expand, expand_, expand_bwd
from tile_kernels.modeling.mhc.ops._write import written


def expand_to_mhc(hidden: Tensor, mhc_mult: int, out: Tensor | None = None) -> Tensor:
    """Copy the hidden states of every token into all of its streams; differentiable.

    Args:
        hidden: (..., hidden) bfloat16, contiguous.
        mhc_mult: number of streams: 2, 4 or 8.
        out: (..., mhc_mult, hidden) to write to, or None.

    Returns:
        (..., mhc_mult, hidden), `out` if given.
    """
    if out is None:
        return expand(hidden, mhc_mult)
    if check.tensor(out, 'out').shape[-2:-1] != (mhc_mult,):
        check.fail('out', f'must be (..., mhc_mult, hidden) with mhc_mult = {mhc_mult}', check.describe(out))
    return written(expand_, lambda dy, _: expand_bwd(dy), out, hidden)
