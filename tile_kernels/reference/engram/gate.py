"""The Engram gate, its gradient and its weights."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.forms import shown_as
from tile_kernels.engram._gate import num_partials_for


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
    """Gate the value of each token into its residual streams; see `tile_kernels.engram.engram_gate_fwd`."""
    xf, kf, vf = x.float(), k.float(), v.float()
    dot = (xf.double() * weight_fused * kf).sum(-1).float()  # near 0 the gate follows its root, and so do all errors
    rstd_x = torch.rsqrt(xf.square().mean(-1) + eps)
    rstd_k = torch.rsqrt(kf.square().mean(-1) + eps)
    z = dot * rstd_x * rstd_k * x.shape[-1] ** -0.5
    root = z.abs().clamp_min(clamp_value).sqrt()
    score = torch.sigmoid(torch.where(z < 0, -root, root))
    taken = score.unsqueeze(-1) * vf.unsqueeze(1)
    if image_token_mask is not None:
        text = ~image_token_mask.unsqueeze(1)
        dot, score, rstd_x, rstd_k = (t.where(text, 0.0) for t in (dot, score, rstd_x, rstd_k))
        taken = taken.where(text.unsqueeze(-1), -0.0)  # adding -0 changes nothing
    y = xf + taken if residual else taken + 0.0
    return y.to(x.dtype), dot, score, rstd_x, rstd_k


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
    """The first result of `gate`."""
    return gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual)[0]


def gate_(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    weight_fused: Tensor,
    eps: float,
    clamp_value: float,
    image_token_mask: Tensor | None = None,
    residual: bool = True,
) -> None:
    """`gate_inference` in place."""
    x.copy_(gate_inference(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual))


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
    """Gradients of `gate` from what it saved, that of the weights as sums over every num_partials-th token."""
    num_tokens, num_streams, hidden = x.shape
    dyf, xf, kf, vf = dy.float(), x.float(), k.float(), v.float()
    s = rstd_x * rstd_k * hidden**-0.5
    dgate = (dyf * vf.unsqueeze(1)).sum(-1)
    slope = dgate * gate_score * (1 - gate_score) * 0.5 * (s / dot.abs()).sqrt()
    slope = slope.where(dot.abs() * s >= clamp_value, 0.0)
    dx = slope.unsqueeze(-1) * (kf * weight_fused - xf * (dot * rstd_x**2 / hidden).unsqueeze(-1))
    dk = slope.unsqueeze(-1) * (xf * weight_fused - kf * (dot * rstd_k**2 / hidden).unsqueeze(-1))
    dv = (gate_score.unsqueeze(-1) * dyf).sum(1)
    dweight = slope.unsqueeze(-1) * xf * kf
    if image_token_mask is not None:
        text = ~image_token_mask[:, None, None]
        dx, dk, dweight, dv = (
            dx.where(text, 0.0),
            dk.where(text, 0.0),
            dweight.where(text, 0.0),
            dv.where(text[:, 0], 0.0),
        )
    dx = dx + dyf if residual else dx
    num_partials = num_partials_for(num_tokens, num_streams, hidden)
    partial = dweight.new_zeros(num_partials, num_streams, hidden)
    partial.index_add_(0, torch.arange(num_tokens, device=x.device) % num_partials, dweight)
    return dx.to(x.dtype), dk.to(x.dtype), dv.to(x.dtype), partial


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
    """`gate_bwd_partial` with keys and values in one tensor."""
    k, v = kv[:, :-1], kv[:, -1]
    saved = (dot, gate_score, rstd_x, rstd_k)
    dx, dk, dv, partial = gate_bwd_partial(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)
    return dx, torch.cat([dk, dv.unsqueeze(1)], dim=1), partial


def gate_bwd(
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
    """Gradients of `gate`."""
    saved = (dot, gate_score, rstd_x, rstd_k)
    dx, dk, dv, partial = gate_bwd_partial(dy, x, k, v, weight_fused, *saved, clamp_value, image_token_mask, residual)
    return dx, dk, dv, partial.sum(0)


def grad_w_reduce(
    grad_w_partial: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    grad_weight_hidden: Tensor,
    grad_weight_embed: Tensor,
) -> None:
    """Add the gradients of both norm weights to the given buffers."""
    total = grad_w_partial.sum(0)
    grad_weight_hidden.copy_(grad_weight_hidden + total * weight_embed.float())
    grad_weight_embed.copy_(grad_weight_embed + total * weight_hidden.float())


def fused_weight(weight_hidden: Tensor, weight_embed: Tensor) -> Tensor:
    """The product of both norm weights in float32."""
    return weight_hidden.float() * weight_embed.float()


def _gate_ref(
    hidden_states: Tensor,
    k: Tensor,
    v: Tensor,
    weight_hidden: Tensor,
    weight_embed: Tensor,
    clamp_value: float,
    eps: float,
    save_for_backward: bool = False,
    image_token_mask: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    weight = fused_weight(weight_hidden, weight_embed)
    results = gate(hidden_states, k, v, weight, eps, clamp_value, image_token_mask)
    return results if save_for_backward else results[0]


def _packed_gate_ref(hidden_states: Tensor, kv: Tensor, *args: Any, **kwargs: Any) -> Any:
    return _gate_ref(hidden_states, kv[:, :-1], kv[:, -1], *args, **kwargs)


@shown_as(_gate_ref)
def engram_gate_ref(
    hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Tensor | tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gate from both norm weights, differentiable by autograd.

        engram_gate_ref(hidden_states, k, v, weight_hidden, weight_embed, clamp_value, eps, save_for_backward=False)
        engram_gate_ref(hidden_states, kv, weight_hidden, weight_embed, clamp_value, eps, save_for_backward=False,
                        image_token_mask=None)

    Returns the new hidden states, with `save_for_backward` also dot, gate, rstd_x and rstd_k.
    """
    packed = 'kv' in kwargs or (len(args) > 0 and args[0].shape[1] == hidden_states.shape[1] + 1)
    form = _packed_gate_ref if packed else _gate_ref
    return form(hidden_states, *args, **kwargs)
