"""The input of a layer from the residual streams."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.mhc.apply_mix import apply_mix, apply_mix_bwd, apply_mix_bwd_
from tile_kernels.modeling.mhc.ops.post import handed_over


class _ApplyMix(torch.autograd.Function):
    """`apply_mix` that adds the gradient of x to a gradient that post has left."""

    @staticmethod
    def forward(ctx: Any, out: Tensor | None, x: Tensor, mix: Tensor) -> Tensor:
        ctx.save_for_backward(x, mix)
        if out is None:
            return apply_mix(x, mix)
        apply_mix.out(x, mix, y=out)
        ctx.mark_dirty(out)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        x, mix = ctx.saved_tensors
        dx = handed_over(x)
        if dx is None:
            return None, *apply_mix_bwd(dy.contiguous(), x, mix)
        return None, None, apply_mix_bwd_(dy.contiguous(), x, mix, dx.view(x.shape))


def mhc_pre_apply_mix(x: Tensor, mix: Tensor, out: Tensor | None = None) -> Tensor:
    """The weighted sum of the residual streams; differentiable.

    Backward adds to a gradient that `mhc_post` has left for x, if there is one.

    Args:
        x: (..., n, hidden) bfloat16, contiguous.
        mix: (..., n, 1) float32, contiguous.
        out: (..., hidden) to write to, or None.

    Returns:
        (..., hidden) bfloat16, `out` if given.
    """
    if torch.compiler.is_compiling() and out is None:
        return apply_mix(x, mix)
    return _ApplyMix.apply(out, x, mix)
