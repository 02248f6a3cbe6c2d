"""The Engram gate without the saved tensors of its gradient; `gate.py` has the mathematics."""

from torch import Tensor

from tile_kernels.core.op import op
from tile_kernels.engram._samples import GATE_BENCH, GATE_BOUNDS, GATE_FULL, GATE_SMOKE, gate_arguments
from tile_kernels.engram.gate_kernels import run_gate


@op(outputs='y', instead='engram.gate')
def gate_inference(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> Tensor:
    """`gate` without the tensors that the gradient needs.

    Args:
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous.
        k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32.
        eps: added to the mean squares.
        clamp_value: lower bound of |z| under the root.
        image_token_mask: (num_tokens,) bool, tokens that get no value.
        residual: add x to the result.

    Returns:
        y like x.
    """
    return run_gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual, None, False)[0]


# Cases ---------------------------------------------------------------------------------------


gate_inference.cases(
    make=gate_arguments,
    match=GATE_BOUNDS,
    smoke=GATE_SMOKE[:1] + GATE_SMOKE[-3:],
    full=GATE_FULL[:6],
    bench=GATE_BENCH[:2],
)
