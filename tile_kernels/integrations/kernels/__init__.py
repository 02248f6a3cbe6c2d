"""Layers for the `kernels` mapping of `transformers`, by local path: this folder is a local kernel repository.

    from transformers import AutoModelForCausalLM, KernelConfig
    from tile_kernels.integrations.transformers import KERNELS

    config = KernelConfig({'RMSNorm': f'{KERNELS}:RMSNorm'}, use_local_kernel=True)
    model = AutoModelForCausalLM.from_pretrained(..., use_kernels=True, kernel_config=config)

A layer has a `forward` and no state; `kernels` puts the `forward` on the modules of a model. It does not look at what a
module computes: use the mapping for models whose norm is `x * weight` (`RMSNorm`) or `x * (1 + weight)`
(`RMSNormZeroCentered`). `patch` tries every module first, and replaces more.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from tile_kernels.integrations.transformers import eps_of, rms_norm, rotate


class RMSNorm(nn.Module):
    """`x * rsqrt(mean(x^2) + eps) * weight`."""

    has_backward = True
    can_torch_compile = True

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        """Rows in, rows out."""
        return rms_norm(hidden_states, self.weight, eps_of(self))


class RMSNormZeroCentered(nn.Module):
    """`x * rsqrt(mean(x^2) + eps) * (1 + weight)`."""

    has_backward = True
    can_torch_compile = True

    def forward(self: Any, x: Tensor) -> Tensor:
        """Rows in, rows out."""
        return rms_norm(x, self.weight.float() + 1.0, eps_of(self))


class rotary_pos_emb(nn.Module):
    """Rotary embedding of queries and keys, in halves."""

    has_backward = True
    can_torch_compile = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        """The dimension of heads is `unsqueeze_dim`."""
        return rotate(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


layers = SimpleNamespace(RMSNorm=RMSNorm, RMSNormZeroCentered=RMSNormZeroCentered, rotary_pos_emb=rotary_pos_emb)
