"""`MoELayer`: a whole mixture-of-experts layer, from hidden states to hidden states.

    gate -> map -> expand -> gate_up_proj -> SwiGLU -> down_proj -> weighted reduce        (+ shared experts)

Rows travel to their experts in one buffer sorted by expert; where an expert's rows end is known to the device alone,
so nothing waits for it, and the layer can be compiled, captured in a CUDA graph, exported and checkpointed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tile_kernels.core import check
from tile_kernels.core.errors import ArgumentError
from tile_kernels.gemm import grouped_gemm
from tile_kernels.moe.group_count import aux_fi, group_count
from tile_kernels.moe.routing import fused_expand_reduce, token_to_expert_map
from tile_kernels.moe.topk_gating import topk_gating
from tile_kernels.quant.swiglu_forward import swiglu_forward

COMPUTE_DTYPES = (torch.bfloat16, torch.float16)


class MoEGate(nn.Module):
    """Scores of all experts for every token, and the choice of the best.

    `weight` is (num_experts, hidden_dim). `e_score_correction_bias` moves the choice, never the weights; it exists if
    the layer balances its load by it.
    """

    def __init__(
        self, num_experts: int, topk: int, hidden_dim: int, balance: bool, options: dict, factory: dict
    ) -> None:
        super().__init__()
        self.topk = topk
        self.options = options
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_dim, **factory))
        bias = torch.zeros(num_experts, device=factory['device']) if balance else None
        self.register_buffer('e_score_correction_bias', bias)

    def forward(self, x: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Weights (num_tokens, topk) float32 and experts (num_tokens, topk) int64."""
        weight = self.weight if weight is None else weight
        logits = x.float() @ weight.float().T
        return topk_gating(logits, self.topk, bias=self.e_score_correction_bias, **self.options)


class Experts(nn.Module):
    """SwiGLU experts, stacked: `gate_up_proj` is (num_experts, 2 * intermediate_dim, hidden_dim), gate rows first."""

    def __init__(self, num_experts: int, hidden_dim: int, intermediate_dim: int, factory: dict) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_dim, hidden_dim, **factory))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, intermediate_dim, **factory))

    def forward(self, rows: Tensor, expert_end: Tensor) -> Tensor:
        """Rows in expert order; those of expert e end before expert_end[e]."""
        hidden = grouped_gemm(rows, self.gate_up_proj.to(rows.dtype), expert_end)
        return grouped_gemm(swiglu_forward(hidden, dtype=rows.dtype), self.down_proj.to(rows.dtype), expert_end)


class SharedExperts(nn.Module):
    """Experts that see every token, as one SwiGLU of their joint width."""

    def __init__(self, hidden_dim: int, intermediate_dim: int, factory: dict) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_dim, 2 * intermediate_dim, bias=False, **factory)
        self.down_proj = nn.Linear(intermediate_dim, hidden_dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Rows in, rows out."""
        hidden = nn.functional.linear(x, self.gate_up_proj.weight.to(x.dtype))
        return nn.functional.linear(swiglu_forward(hidden, dtype=x.dtype), self.down_proj.weight.to(x.dtype))


class MoELayer(nn.Module):
    """A mixture-of-experts layer with stacked SwiGLU experts; trainable.

    Args:
        num_experts: up to 4096.
        topk: experts of a token, up to 64.
        hidden_dim: width of the tokens, a multiple of 8.
        intermediate_dim: width inside an expert, a multiple of 8; `hidden_dim` unless given.
        num_shared_experts: experts that see every token.
        scoring: 'softmax', 'sigmoid', 'sqrtsoftplus' or 'identity'.
        renormalize: divide the weights of a token by their sum.
        routed_scaling_factor: factor of the weights.
        num_groups: groups of experts, of which `num_topk_groups` stay in the choice.
        num_topk_groups: see `num_groups`.
        balance_rate: step of the bias that `update_bias` moves against the load; 0: no bias.
        compute_dtype: bfloat16 or float16, in which the experts compute; parameters may be float32.
        dtype: of the parameters.
        device: of the parameters.

    Parameters are named `gate.weight`, `experts.gate_up_proj`, `experts.down_proj` and, with shared experts,
    `shared_experts.gate_up_proj.weight` and `shared_experts.down_proj.weight`.
    """

    tokens_per_expert: Tensor

    def __init__(
        self,
        num_experts: int,
        topk: int,
        hidden_dim: int,
        intermediate_dim: int | None = None,
        *,
        num_shared_experts: int = 0,
        scoring: str = 'softmax',
        renormalize: bool = True,
        routed_scaling_factor: float = 1.0,
        num_groups: int | None = None,
        num_topk_groups: int | None = None,
        balance_rate: float = 0.0,
        compute_dtype: torch.dtype = torch.bfloat16,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        intermediate_dim = hidden_dim if intermediate_dim is None else intermediate_dim
        check.at_least(topk, 1, 'topk')
        check.at_most(topk, num_experts, 'topk')
        check.multiple(hidden_dim, 8, 'hidden_dim')
        check.multiple(intermediate_dim, 8, 'intermediate_dim')
        check.one_of(compute_dtype, COMPUTE_DTYPES, 'compute_dtype')
        factory = dict(dtype=dtype, device=device)
        options = dict(
            scoring=scoring,
            renormalize=renormalize,
            routed_scaling_factor=routed_scaling_factor,
            num_groups=num_groups,
            num_topk_groups=num_topk_groups,
        )
        self.num_experts, self.hidden_dim, self.intermediate_dim = num_experts, hidden_dim, intermediate_dim
        self.balance_rate = balance_rate
        self.compute_dtype = compute_dtype
        self.gate = MoEGate(num_experts, topk, hidden_dim, balance_rate != 0, options, factory)
        self.experts = Experts(num_experts, hidden_dim, intermediate_dim, factory)
        self.shared_experts = (
            SharedExperts(hidden_dim, num_shared_experts * intermediate_dim, factory) if num_shared_experts else None
        )
        counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer('tokens_per_expert', counts, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weights from N(0, 1 / inputs)."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, gate_weight: Tensor | None = None) -> Tensor:
        """The layer's output, of x's shape and dtype.

        Args:
            x: (..., hidden_dim).
            gate_weight: (num_experts, hidden_dim) to score with instead of the layer's own.
        """
        if x.shape[-1] != self.hidden_dim:
            raise ArgumentError(f'MoELayer: x must be (..., {self.hidden_dim}), got {check.describe(x)}')
        rows = x.reshape(-1, self.hidden_dim).to(self.compute_dtype)
        weights, indices = self.gate(rows, gate_weight)
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert += group_count(indices, self.num_experts)
        routing = token_to_expert_map(indices, self.num_experts)
        y = fused_expand_reduce(rows, routing, lambda r, map: self.experts(r, map.expert_end), weights)
        if self.shared_experts is not None:
            y = y + self.shared_experts(rows)
        return y.to(x.dtype).reshape(x.shape)

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias of every expert against its load since the last call, and count anew; call it once a step."""
        bias = self.gate.e_score_correction_bias
        if bias is not None:
            load = self.tokens_per_expert.float()
            bias += self.balance_rate * torch.sign(load.mean() - load)
        self.tokens_per_expert.zero_()

    def load_fraction(self, indices: Tensor) -> Tensor:
        """The f of the auxiliary balance loss for a choice of experts: 1 everywhere if the load is even."""
        return aux_fi(indices, self.num_experts, self.gate.topk)
