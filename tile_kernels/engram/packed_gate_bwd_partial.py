"""`gate_bwd_partial` with keys and values in one tensor."""

import torch
from torch import Tensor

from tile_kernels.core.op import op
from tile_kernels.engram._checks import split_packed
from tile_kernels.engram._samples import (
    GATE_BWD_BENCH,
    GATE_BWD_BOUNDS,
    GATE_BWD_FULL,
    GATE_BWD_SMOKE,
    gate_bwd_arguments,
)
from tile_kernels.engram.gate_bwd import run_gate_bwd


@op(outputs='dx dkv dweight_partial')
def packed_gate_bwd_partial(
    dy: Tensor,
    x: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """`gate_bwd_partial` with keys and values, and their gradients, in one tensor.

    Args:
        dy: gradient of y, (num_tokens, num_streams, hidden) bfloat16, contiguous.
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous.
        kv: (num_tokens, num_streams + 1, hidden) bfloat16, the keys and then the value of each token.
        weight_fused: (num_streams, hidden) float32.
        dot: as the forward op returned it, like the following three.
        gate_score: (num_tokens, num_streams) float32.
        rstd_x: (num_tokens, num_streams) float32.
        rstd_k: (num_tokens, num_streams) float32.
        clamp_value: that of the forward op.
        image_token_mask: that of the forward op.
        residual: that of the forward op.

    Returns:
        dx, dkv (contiguous) and the partial sums of the gradient of weight_fused.
    """
    saved = (dot, gate_score, rstd_x, rstd_k)
    k, v = split_packed(kv, x)
    dkv = kv.new_empty(kv.shape)
    dx, _, _, partial = run_gate_bwd(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual, dkv)
    return dx, dkv, partial


# Cases ---------------------------------------------------------------------------------------


def _make_packed(**case) -> dict:
    made = gate_bwd_arguments(**case)
    k, v = made.pop('k'), made.pop('v')
    return made | dict(kv=torch.cat([k, v[:, None]], dim=1))


packed_gate_bwd_partial.cases(
    make=_make_packed,
    match=GATE_BWD_BOUNDS,
    smoke=GATE_BWD_SMOKE[:1] + GATE_BWD_SMOKE[2:3],
    full=GATE_BWD_FULL[:6],
    bench=GATE_BWD_BENCH[1:2],
)
