"""Gradient of the Engram gate with partial sums for the weights; `gate_bwd.py` has the mathematics."""

from torch import Tensor

from tile_kernels.core.op import op
from tile_kernels.engram._samples import (
    GATE_BWD_BENCH,
    GATE_BWD_BOUNDS,
    GATE_BWD_FAR,
    GATE_BWD_FULL,
    GATE_BWD_SMOKE,
    gate_bwd_arguments,
)
from tile_kernels.engram.gate_bwd import run_gate_bwd


@op(outputs='dx dk dv dweight_partial')
def gate_bwd_partial(
    dy: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `gate`; that of the weights is returned as partial sums.

    Args:
        dy: gradient of y, (num_tokens, num_streams, hidden) bfloat16, contiguous.
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous.
        k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32.
        dot: as the forward op returned it, like the following three.
        gate_score: (num_tokens, num_streams) float32.
        rstd_x: (num_tokens, num_streams) float32.
        rstd_k: (num_tokens, num_streams) float32.
        clamp_value: that of the forward op.
        image_token_mask: that of the forward op.
        residual: that of the forward op.

    Returns:
        dx, dk and dv, contiguous, and (num_partials, num_streams, hidden) float32, whose sum over the first dimension
        is the gradient of weight_fused; num_partials depends on the shape alone.
    """
    saved = (dot, gate_score, rstd_x, rstd_k)
    return run_gate_bwd(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)


gate_bwd_partial.cases(
    make=gate_bwd_arguments,
    match=GATE_BWD_BOUNDS,
    smoke=GATE_BWD_SMOKE,
    full=GATE_BWD_FULL + GATE_BWD_FAR,
    bench=GATE_BWD_BENCH,
)
