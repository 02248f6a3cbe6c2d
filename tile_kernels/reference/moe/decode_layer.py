"""Twin of `moe.decode_layer` in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tile_kernels.reference.moe.gate_logits import gate_logits
from tile_kernels.reference.moe.topk_gating import topk_gating

GROUP = 128


def decode_layer(
    hidden_states: Tensor,
    gate_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    top_k: int,
    gate_up_sf: Tensor | None = None,
    down_sf: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    residual: bool = False,
    scoring: str = 'softmax',
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """Norm, choice, experts and weighted sum, token by token."""
    z = hidden_states
    if norm_weight is not None:
        wide = z.float()
        z = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm_weight.float()).to(z.dtype)
    weights, indices = topk_gating(
        gate_logits(z, gate_weight),
        top_k,
        scoring=scoring,
        renormalize=renormalize,
        bias=bias,
        num_groups=num_groups,
        num_topk_groups=num_topk_groups,
        routed_scaling_factor=routed_scaling_factor,
    )
    y = hidden_states.float() if residual else torch.zeros_like(z, dtype=torch.float32)
    rows = z.float() if gate_up_sf is None else _rounded(z)
    for token, (chosen, factors) in enumerate(zip(indices.tolist(), weights, strict=True)):
        for expert, factor in zip(chosen, factors, strict=True):
            gate, up = (_matrix(gate_up, gate_up_sf, expert) @ rows[token]).chunk(2)
            act = (F.silu(gate) * up).to(z.dtype)
            act = act.float() if down_sf is None else _rounded(act)
            y[token] += factor * (_matrix(down, down_sf, expert) @ act)
    return y.to(z.dtype)


def _matrix(weight: Tensor, sf: Tensor | None, expert: int) -> Tensor:
    """The numbers of the weight of an expert."""
    if sf is None:
        return weight[expert].float()
    return weight[expert].float() * sf[expert].repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)


def _rounded(x: Tensor) -> Tensor:
    """The numbers that e4m3 codes of a tensor stand for, with a scale factor for 128 channels."""
    groups = x.float().unflatten(-1, (-1, GROUP))
    sf = groups.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448.0
    return ((groups / sf).to(torch.float8_e4m3fn).float() * sf).flatten(-2)
