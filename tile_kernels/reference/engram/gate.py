"""What the Engram gate means, in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.forms import shown_as
from tile_kernels.reference.engram.fused_weight import fused_weight


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
    x.copy_(gate(x, k, v, weight_fused, eps, clamp_value, image_token_mask, residual)[0])


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
