"""Gradient of `engram_gate_fwd`, with the arguments of TileKernels."""

from typing import Any

from torch import Tensor

from tile_kernels.core.forms import shown_as
from tile_kernels.core.front import replayed
from tile_kernels.engram._checks import is_packed
from tile_kernels.engram.gate_bwd_partial import gate_bwd_partial
from tile_kernels.engram.packed_gate_bwd_partial import packed_gate_bwd_partial


@replayed
def _split_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
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
) -> tuple[Tensor, ...]:
    saved = (dot, gate_score, rstd_x, rstd_k)
    options = (clamp_value, image_token_mask, residual)
    return gate_bwd_partial(grad_out, hidden_states, k, v, weight_fused, *saved, *options)


@replayed
def _packed_gate_bwd(
    grad_out: Tensor,
    hidden_states: Tensor,
    kv: Tensor,
    weight_fused: Tensor,
    dot: Tensor,
    gate_score: Tensor,
    rstd_x: Tensor,
    rstd_k: Tensor,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> tuple[Tensor, ...]:
    saved = (dot, gate_score, rstd_x, rstd_k)
    options = (clamp_value, image_token_mask, residual)
    return packed_gate_bwd_partial(grad_out, hidden_states, kv, weight_fused, *saved, *options)


@shown_as(_split_gate_bwd, _packed_gate_bwd)
def engram_gate_bwd(grad_out: Tensor, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Gradients of `engram_gate_fwd`; that of the fused weights is returned as partial sums for `grad_w_reduce`.

    There are two forms, with keys and values separate or packed in one tensor:

        engram_gate_bwd(grad_out, hidden_states, k, v, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value,
                        image_token_mask=None, residual=True) -> (grad_x, grad_k, grad_v, grad_w_partial)
        engram_gate_bwd(grad_out, hidden_states, kv, weight_fused, dot, gate_score, rstd_x, rstd_k, clamp_value,
                        image_token_mask=None, residual=True) -> (grad_x, grad_kv, grad_w_partial)

    Args:
        grad_out: gradient of the result, (num_tokens, num_streams, hidden) bfloat16, contiguous.
        hidden_states: (num_tokens, num_streams, hidden) bfloat16, contiguous, as given to the forward function.
        args: the other arguments of either form, in order: inputs and results of the forward function.
        kwargs: the same arguments by name.

    Returns:
        Contiguous gradients, and (num_partials, num_streams, hidden) float32, which sum up to the gradient of
        weight_fused. Deterministic; num_partials depends on the shape alone, not on the GPU.
    """
    form = _packed_gate_bwd if is_packed(hidden_states, args, kwargs) else _split_gate_bwd
    return form(grad_out, hidden_states, *args, **kwargs)
