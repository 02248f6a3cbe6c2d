"""Engram gate: computes how much of an embedding's value is added to each residual stream of a token.

    dot[t, c]    = sum_h x[t, c, h] * weight_fused[c, h] * k[t, c, h]
    rstd_x[t, c] = rsqrt(sum_h x[t, c, h]^2 / hidden + eps)                 rstd_k likewise from k
    z            = dot * rstd_x * rstd_k / sqrt(hidden)
    gate[t, c]   = sigmoid(copysign(sqrt(max(|z|, clamp_value)), z))
    y[t, c, h]   = x[t, c, h] + gate[t, c] * v[t, h]                        all in float32, rounded once

Image tokens, given by a mask, get nothing added. Memory bound: the floor is reading x, k and v and writing y.
"""

from typing import Any

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.forms import shown_as
from tile_kernels.core.front import replayed
from tile_kernels.core.op import Mut, op
from tile_kernels.engram._checks import is_packed, split_packed
from tile_kernels.engram._samples import GATE_BENCH, GATE_BOUNDS, GATE_FAR, GATE_FULL, GATE_SMOKE, gate_arguments
from tile_kernels.engram.gate_bwd import gate_bwd
from tile_kernels.engram.gate_inference import gate_inference
from tile_kernels.engram.gate_kernels import run_gate


@op(outputs='y dot gate_score rstd_x rstd_k', backward=gate_bwd)
def gate(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gate the value of each token into its residual streams, and save the tensors that the gradient needs.

    Args:
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous; 1 to 8 streams, hidden a multiple of 64.
        k: (num_tokens, num_streams, hidden) bfloat16, any strides but a dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32, the product of both norm weights.
        eps: added to the mean squares.
        clamp_value: lower bound of |z| under the root.
        image_token_mask: (num_tokens,) bool, tokens that get no value; their gate, dot and rstd are 0.
        residual: add x to the result.

    Returns:
        y like x, and dot, gate, rstd_x and rstd_k, each (num_tokens, num_streams) float32.
    """
    return run_gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual, None, True)


@op()
def gate_(
    x: Mut,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> None:
    """`gate_inference` in place.

    Args:
        x: (num_tokens, num_streams, hidden) bfloat16, contiguous; replaced by the result.
        k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
        v: (num_tokens, hidden) bfloat16, dense last dimension.
        weight_fused: (num_streams, hidden) float32.
        eps: added to the mean squares.
        clamp_value: lower bound of |z| under the root.
        image_token_mask: (num_tokens,) bool, tokens that get no value.
        residual: add x to the result.
    """
    run_gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual, x, False)


@replayed
def _gate_fwd(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
    residual: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    given = (hidden_states, k, v, weight_fused, eps, clamp_value, image_token_mask, residual)
    if inplace and save_for_backward:
        check.fail('inplace', 'must come with save_for_backward=False', 'save_for_backward=True')
    if inplace:
        gate_(*given)
        return hidden_states, None, None, None, None
    if save_for_backward:
        return gate(*given)
    return gate_inference(*given), None, None, None, None


@replayed
def _packed_gate_fwd(
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    save_for_backward: bool = True,
    image_token_mask: Tensor | None = None,
    inplace: bool = False,
    residual: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    k, v = split_packed(kv, hidden_states)
    options = (save_for_backward, image_token_mask, inplace, residual)
    return _gate_fwd(hidden_states, k, v, weight_fused, eps, clamp_value, *options)


@shown_as(_gate_fwd, _packed_gate_fwd)
def engram_gate_fwd(
    hidden_states: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Gate the value of each token into its residual streams.

    There are two forms, with keys and values separate or packed in one tensor:

        engram_gate_fwd(hidden_states, k, v, weight_fused, eps, clamp_value, save_for_backward=True,
                        image_token_mask=None, inplace=False, residual=True)
        engram_gate_fwd(hidden_states, kv, weight_fused, eps, clamp_value, save_for_backward=True,
                        image_token_mask=None, inplace=False, residual=True)

    Differentiable in hidden_states, k, v (or kv) and weight_fused if `save_for_backward`.

    Args:
        hidden_states: (num_tokens, num_streams, hidden) bfloat16, contiguous; 1 to 8 streams, hidden a multiple of 64.
        args: the other arguments of either form, in order.
        kwargs: the same arguments by name:
            - k: (num_tokens, num_streams, hidden) bfloat16, dense last dimension.
            - v: (num_tokens, hidden) bfloat16, dense last dimension.
            - kv: (num_tokens, num_streams + 1, hidden) bfloat16, the keys and then the value of each token.
            - weight_fused: (num_streams, hidden) float32; see `fused_weight`.
            - eps: added to the mean squares.
            - clamp_value: lower bound of |z| under the root.
            - save_for_backward: return the tensors that `engram_gate_bwd` needs.
            - image_token_mask: (num_tokens,) bool, tokens that get no value; their saved values are 0.
            - inplace: write to hidden_states; not with save_for_backward.
            - residual: add hidden_states to the result.

    Returns:
        The new hidden states, then dot, gate, rstd_x and rstd_k, each (num_tokens, num_streams) float32 or None.
    """
    form = _packed_gate_fwd if is_packed(hidden_states, args, kwargs) else _gate_fwd
    return form(hidden_states, *args, **kwargs)


# Cases ---------------------------------------------------------------------------------------


gate.cases(make=gate_arguments, match=GATE_BOUNDS, smoke=GATE_SMOKE, full=GATE_FULL + GATE_FAR, bench=GATE_BENCH)


gate_.cases(
    make=gate_arguments,
    match=GATE_BOUNDS,
    smoke=GATE_SMOKE[:1] + GATE_SMOKE[-3:],
    full=GATE_FULL[:6],
    bench=GATE_BENCH[1:2],
)
