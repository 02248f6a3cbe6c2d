"""Residual streams from hidden states."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.mhc.expand import expand, expand_bwd


class _ExpandInto(torch.autograd.Function):
    """`expand` that writes into memory of the caller."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, out: Tensor) -> Tensor:
        expand.out(hidden, out.shape[-2], y=out)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        return expand_bwd(dy.contiguous()), None


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
    return _ExpandInto.apply(hidden, out)
