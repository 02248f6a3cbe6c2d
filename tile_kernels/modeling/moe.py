"""`MoELayer`: a whole mixture-of-experts layer, from hidden states to hidden states.

    gate -> map -> expand -> gate_up_proj -> SwiGLU -> down_proj -> weighted reduce        (+ shared experts)

Rows go to their experts in one buffer sorted by expert. Only the device knows where the rows of an expert end, and the
host never waits. So the layer can be compiled, captured in a CUDA graph, exported and checkpointed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tile_kernels.activation.swiglu_backward import swiglu_backward
from tile_kernels.activation.swiglu_forward import swiglu_forward
from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.front import replayed
from tile_kernels.gemm import (
    grouped_gemm,
    grouped_gemm_bwd,
    grouped_gemm_dequant,
    grouped_gemm_fp8,
    grouped_gemm_fp8_swiglu_cast,
    grouped_gemm_swiglu,
    quantize_weight,
)
from tile_kernels.gemm.packed_weight import FORMATS
from tile_kernels.modeling.quant_linear import PackedModule
from tile_kernels.moe._checks import MAX_EXPERTS, MAX_TOPK, check_groups
from tile_kernels.moe.aux_fi import aux_fi
from tile_kernels.moe.expand_and_per_token_cast import expand_and_per_token_cast
from tile_kernels.moe.expand_to_fused import expand_to_fused, expand_to_fused_bwd
from tile_kernels.moe.gate_logits import gate_logits
from tile_kernels.moe.group_count import group_count
from tile_kernels.moe.reduce_fused import reduce_fused
from tile_kernels.moe.scoring import SCORINGS
from tile_kernels.moe.token_to_expert_map import RoutingMap, token_to_expert_map
from tile_kernels.moe.topk_gating import topk_gating
from tile_kernels.quant.per_block_cast import per_block_cast

if TYPE_CHECKING:
    from tile_kernels.distributed import MoEDistributed

ROWS_FP8 = QuantFormat.parse('e4m3_1x128_f32')
WEIGHTS_FP8 = QuantFormat.parse('e4m3_128x128_f32')

#: Up to this many slots, inference repeats all launches of the layer at once. With more, the host is not the limit, and
#: its intermediate results should not exist at the same time.
REPLAYED_SLOTS = 4096


def _choose(x: Tensor, weight: Tensor, bias: Tensor | None, topk: int, **options: Any) -> tuple[Tensor, Tensor]:
    """Weights and experts of every token."""
    bias = None if bias is None else bias.float()  # a checkpoint may change the dtype (`assign=True`)
    return topk_gating(gate_logits(x, weight.to(x.dtype)), topk, bias=bias, **options)


class MoEGate(nn.Module):
    """Scores of all experts for every token, and the choice of the best.

    `weight` is (num_experts, hidden_dim). `e_score_correction_bias` changes the choice, never the weights. It exists if
    the layer balances its load. It stays float32 when the layer is cast, because bfloat16 would lose its small steps.
    """

    e_score_correction_bias: Tensor | None

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
        return _choose(x, weight, self.e_score_correction_bias, self.topk, **self.options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoEGate:
        bias = self.e_score_correction_bias
        super()._apply(fn, recurse)
        moved = self.e_score_correction_bias
        if bias is not None and moved is not None and moved.dtype is not torch.float32:
            self.e_score_correction_bias = bias.to(moved.device)
        return self


class Experts(nn.Module):
    """SwiGLU experts, stacked: `gate_up_proj` is (num_experts, 2 * intermediate_dim, hidden_dim), gate rows first."""

    def __init__(self, num_experts: int, hidden_dim: int, intermediate_dim: int, factory: dict) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_dim, hidden_dim, **factory))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_dim, intermediate_dim, **factory))
        self.prepared: tuple[Tensor, ...] | None = None

    def forward(self, rows: Tensor, expert_end: Tensor) -> Tensor:
        """Rows in expert order; those of expert e end before expert_end[e]."""
        return _experts(rows, self.gate_up_proj, self.down_proj, expert_end)

    def forward_fp8(self, tokens: Tensor, routing: RoutingMap) -> Tensor:
        """The same from tokens, which are quantized when they are expanded."""
        places = (routing.token_topk_to_pos, routing.pos_to_expert, routing.expert_end)
        if self.prepared is not None and not self.training and not torch.is_grad_enabled():
            return _experts_fp8(tokens, *places, *self.prepared)
        gate_up, down = self.gate_up_proj.to(tokens.dtype), self.down_proj.to(tokens.dtype)
        return _Fp8Experts.apply(tokens, gate_up, down, *places)

    @torch.no_grad()
    def prepare_fp8(self) -> None:
        """Quantize the weights once, for inference; training, moving the module or loading weights discards them."""
        # first to bfloat16, as in `forward_fp8`
        weights = (self.gate_up_proj.to(torch.bfloat16), self.down_proj.to(torch.bfloat16))
        self.prepared = (*_quantize(weights[0]), *_quantize(weights[1]))

    def train(self, mode: bool = True) -> Experts:
        """As for every module; training discards prepared weights."""
        self.prepared = None if mode else self.prepared
        return super().train(mode)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Experts:
        self.prepared = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any) -> None:
        self.prepared = None
        super()._load_from_state_dict(*args)


def _recomputing() -> bool:
    """Whether a checkpointed layer runs again in the backward pass; its tokens are already counted then."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scale factors of stacked matrices, in blocks of 128 x 128."""
    num_experts, n, k = weight.shape
    codes, sf = per_block_cast.call(weight.reshape(num_experts * n, k), WEIGHTS_FP8)
    return codes.view(num_experts, n, k), sf.view(num_experts, n // 128, -1)


def _experts(rows: Tensor, gate_up: Tensor, down: Tensor, expert_end: Tensor) -> Tensor:
    gate_up, down = gate_up.to(rows.dtype), down.to(rows.dtype)
    if torch.is_grad_enabled():
        hidden = swiglu_forward.call(grouped_gemm(rows, gate_up, expert_end), dtype=rows.dtype)
    else:
        hidden = grouped_gemm_swiglu(rows, gate_up, expert_end)
    return grouped_gemm(hidden, down, expert_end)


def _experts_fp8(
    tokens: Tensor,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    expert_end: Tensor,
    gate_up: Tensor,
    gate_up_sf: Tensor,
    down: Tensor,
    down_sf: Tensor,
) -> Tensor:
    rows, rows_sf = expand_and_per_token_cast(tokens, token_topk_to_pos, pos_to_expert, ROWS_FP8)
    hidden, hidden_sf = grouped_gemm_fp8_swiglu_cast(rows, rows_sf, gate_up, gate_up_sf, expert_end)
    return grouped_gemm_fp8(hidden, hidden_sf, down, down_sf, expert_end).to(tokens.dtype)


class _Fp8Experts(torch.autograd.Function):
    """The experts in fp8; gradients are straight-through, those of the experts in bfloat16."""

    @staticmethod
    def forward(
        ctx: Any,
        tokens: Tensor,
        gate_up: Tensor,
        down: Tensor,
        token_topk_to_pos: Tensor,
        pos_to_expert: Tensor,
        expert_end: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(tokens, gate_up, down, token_topk_to_pos, pos_to_expert, expert_end)
        places = (token_topk_to_pos, pos_to_expert, expert_end)
        return _experts_fp8(tokens, *places, *_quantize(gate_up), *_quantize(down))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        tokens, gate_up, down, token_topk_to_pos, pos_to_expert, expert_end = ctx.saved_tensors
        rows = expand_to_fused(tokens, token_topk_to_pos, pos_to_expert)
        hidden = grouped_gemm(rows, gate_up, expert_end)
        act = swiglu_forward.call(hidden, dtype=rows.dtype)
        dact, ddown = grouped_gemm_bwd(dy.contiguous(), act, down, expert_end)
        dhidden = swiglu_backward.call(dact, hidden)[0]
        drows, dgate_up = grouped_gemm_bwd(dhidden, rows, gate_up, expert_end)
        return expand_to_fused_bwd(drows, token_topk_to_pos), dgate_up, ddown, None, None, None


@replayed
def _infer(
    tokens: Tensor,
    gate: Tensor,
    bias: Tensor | None,
    gate_up: Tensor,
    gate_up_sf: Tensor | None,
    down: Tensor,
    down_sf: Tensor | None,
    topk: int,
    scoring: str,
    renormalize: bool,
    routed_scaling_factor: float,
    num_groups: int | None,
    num_topk_groups: int | None,
) -> Tensor:
    """The layer without shared experts; in fp8 if there are scale factors."""
    options = dict(
        scoring=scoring,
        renormalize=renormalize,
        routed_scaling_factor=routed_scaling_factor,
        num_groups=num_groups,
        num_topk_groups=num_topk_groups,
    )
    weights, indices = _choose(tokens, gate, bias, topk, **options)
    routing = token_to_expert_map(indices, gate.shape[0])
    places = routing.token_topk_to_pos, routing.pos_to_expert
    if gate_up_sf is not None and down_sf is not None:
        rows = _experts_fp8(tokens, *places, routing.expert_end, gate_up, gate_up_sf, down, down_sf)
    else:
        rows = _experts(expand_to_fused(tokens, *places), gate_up, down, routing.expert_end)
    return reduce_fused(rows, weights, routing.token_topk_to_pos)


def _is_plain(module: nn.Module, kind: type) -> bool:
    """Whether a call of the module would run nothing but the forward pass of its class."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._compiled_call_impl
    return type(module) is kind and not hooks and 'forward' not in vars(module)


class PackedExperts(nn.Module):
    """Experts with packed, constant weights: `gate_up_proj` and `down_proj` have the tensors of a `PackedWeight`."""

    def __init__(self, experts: Experts, fmt: str) -> None:
        """Quantize the weights of `experts`; on the meta device, only allocate."""
        super().__init__()
        for name in ('gate_up_proj', 'down_proj'):
            weight = getattr(experts, name)
            num_experts, n, k = weight.shape
            stored = weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16
            made = PackedModule(fmt, n, k, stored, weight.device, (num_experts,))
            self.add_module(name, made if weight.is_meta else made.take(quantize_weight(weight, fmt)))

    def forward(self, rows: Tensor, expert_end: Tensor) -> Tensor:
        """Rows in expert order; those of expert e end before expert_end[e]."""
        hidden = grouped_gemm_dequant(rows, self.gate_up_proj.weight, expert_end)
        return grouped_gemm_dequant(swiglu_forward.call(hidden, dtype=rows.dtype), self.down_proj.weight, expert_end)


class SharedExperts(nn.Module):
    """Experts that process every token, as one SwiGLU of their total width."""

    def __init__(self, hidden_dim: int, intermediate_dim: int, factory: dict) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_dim, 2 * intermediate_dim, bias=False, **factory)
        self.down_proj = nn.Linear(intermediate_dim, hidden_dim, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:
        """Rows in, rows out."""
        with torch.autocast(x.device.type, enabled=False):  # the same precision as the other experts
            hidden = nn.functional.linear(x, self.gate_up_proj.weight.to(x.dtype))
            return nn.functional.linear(swiglu_forward.call(hidden, dtype=x.dtype), self.down_proj.weight.to(x.dtype))


@check.names(hidden_states='x')
class MoELayer(nn.Module):
    """A mixture-of-experts layer with stacked SwiGLU experts; trainable.

    Args:
        num_experts: up to 4096.
        topk: experts of a token, up to 64.
        hidden_dim: width of the tokens, a multiple of 8.
        intermediate_dim: width inside an expert, a multiple of 8; `hidden_dim` unless given.
        num_shared_experts: experts that process every token.
        scoring: 'softmax', 'sigmoid', 'sqrtsoftplus' or 'identity'.
        renormalize: divide the weights of a token by their sum.
        routed_scaling_factor: factor of the weights.
        num_groups: number of groups of experts; a token chooses from `num_topk_groups` of them.
        num_topk_groups: see `num_groups`.
        balance_rate: step by which `update_bias` changes the bias against the load; 0: no bias.
        compute: 'bf16' or 'fp8'. In fp8, experts multiply e4m3 codes, with scale factors for 128 channels of
            activations and blocks of 128 x 128 of weights. Gradients are those of bfloat16. Widths must be multiples
            of 128.
        weight_format: a name of `tile_kernels.gemm.FORMATS`: experts have packed, constant weights. They are quantized
            from random ones; load a state_dict, or call `quantize_experts` on a trained layer instead.
        group: process group, or device mesh of one dimension, that holds the experts: each rank has some, and tokens
            are sent to them; see `tile_kernels.distributed.MoEDistributed`.
        fp8_payload: quantize tokens before they are sent.
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
        compute: str = 'bf16',
        weight_format: str | None = None,
        group: Any = None,
        fp8_payload: bool = False,
        dtype: torch.dtype | str = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        intermediate_dim = hidden_dim if intermediate_dim is None else intermediate_dim
        check.integer(num_experts, 'num_experts', 1)
        check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
        check.integer(topk, 'topk', 1)
        check.at_most(topk, min(num_experts, MAX_TOPK), 'topk')
        check.integer(num_shared_experts, 'num_shared_experts', 0)
        check.number(routed_scaling_factor, 'routed_scaling_factor')
        check.at_least(balance_rate, 0, 'balance_rate')
        check.one_of(scoring, SCORINGS, 'scoring')
        check_groups(num_experts, topk, num_groups, num_topk_groups, 'topk')
        check.one_of(compute, ('bf16', 'fp8'), 'compute')
        if weight_format is not None:
            check.one_of(weight_format, FORMATS, 'weight_format')
            check.equal(compute, 'bf16', 'compute of a layer with weight_format')
        for name, width in dict(hidden_dim=hidden_dim, intermediate_dim=intermediate_dim).items():
            check.integer(width, name, 1)
            if weight_format is not None:
                check.multiple(width, FORMATS[weight_format].multiple, name)
            check.multiple(width, 128 if compute == 'fp8' else 8, name)
        dtype = check.to_dtype(dtype, 'dtype')
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            check.fail('dtype', 'must be a dtype of floating point', repr(dtype))
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
        self.compute = compute
        self.gate = MoEGate(num_experts, topk, hidden_dim, balance_rate != 0, options, factory)
        self.router = None
        if group is not None:
            from tile_kernels.distributed import MoEDistributed

            check.equal(compute, 'bf16', 'compute of a layer over several ranks')
            self.router = MoEDistributed(num_experts, topk, group=group, fp8_payload=fp8_payload)
        elif fp8_payload:
            check.fail('fp8_payload', 'must come with group', 'no group')
        num_own = num_experts if self.router is None else self.router.num_local_experts
        self.experts: Experts | PackedExperts = Experts(num_own, hidden_dim, intermediate_dim, factory)
        self.shared_experts = (
            SharedExperts(hidden_dim, num_shared_experts * intermediate_dim, factory) if num_shared_experts else None
        )
        counts = torch.zeros(num_experts, dtype=torch.int64, device=device)
        self.register_buffer('tokens_per_expert', counts, persistent=False)
        self.reset_parameters()
        if weight_format is not None:
            self.quantize_experts(weight_format)

    @torch.no_grad()
    def quantize_experts(self, weight_format: str) -> None:
        """Replace the weights of the experts by packed, constant ones, quantized to the nearest codes."""
        check.one_of(weight_format, FORMATS, 'weight_format')
        if isinstance(self.experts, PackedExperts):
            check.fail('the experts', 'must not be packed yet', 'packed ones', op='MoELayer.quantize_experts')
        check.equal(self.compute, 'bf16', 'compute of a layer with weight_format')
        self.experts = PackedExperts(self.experts, weight_format)

    def reset_parameters(self) -> None:
        """Draw all weights from N(0, 1 / inputs)."""
        for weight in self.parameters():
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)

    def forward(self, x: Tensor, gate_weight: Tensor | None = None) -> Tensor:
        """The layer's output, of x's shape and dtype.

        Args:
            x: (..., hidden_dim).
            gate_weight: (num_experts, hidden_dim), used instead of the weight of the layer.
        """
        if check.tensor(x, 'x').shape[-1:] != (self.hidden_dim,):
            check.fail('x', f'must be (..., {self.hidden_dim})', check.describe(x))
        if not x.is_floating_point():
            check.fail('x', 'must be of floating point', check.describe(x))
        if gate_weight is not None:
            spec = 'num_experts hidden_dim'
            check.shape(gate_weight, 'gate_weight', spec, num_experts=self.num_experts, hidden_dim=self.hidden_dim)
        tokens = x.reshape(-1, self.hidden_dim).to(torch.bfloat16)
        tokens = tokens if tokens.stride(1) == 1 else tokens.contiguous()
        y = self._infer(tokens, gate_weight)
        if y is None:
            weights, indices = self.gate(tokens, gate_weight)
            if self.training and not _recomputing():
                with torch.no_grad():
                    self.tokens_per_expert.add_(group_count(indices, self.num_experts))
            if self.router is None:
                y = self._through_experts(tokens, weights, indices)
            else:
                y = self._through_ranks(self.router, tokens, weights, indices)
        if self.router is None and self.shared_experts is not None:
            y = y + self.shared_experts(tokens)
        y = y.to(x.dtype)  # no view: FSDP would lose its hooks on one that is changed in place, as by `residual += y`
        return y if y.shape == x.shape else torch.ops.aten._unsafe_view(y, x.shape)

    def _infer(self, tokens: Tensor, gate_weight: Tensor | None) -> Tensor | None:
        """The result without shared experts if few tokens need no gradient, and nobody watches the parts; else None."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or self.training or self.router is not None:
            return None
        gate, experts = self.gate, self.experts
        if not (_is_plain(gate, MoEGate) and _is_plain(experts, Experts)):
            return None
        if tokens.shape[0] * gate.topk > REPLAYED_SLOTS:
            return None
        if self.compute == 'fp8':
            if experts.prepared is None:
                return None
            parts = experts.prepared
        else:
            parts = experts.gate_up_proj, None, experts.down_proj, None
        weight = gate.weight if gate_weight is None else gate_weight
        return _infer(tokens, weight, gate.e_score_correction_bias, *parts, gate.topk, **gate.options)

    def _through_ranks(self, router: MoEDistributed, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """The same with experts of other ranks; the shared experts run during the exchange."""
        travelling = router.send_tokens(tokens, indices)
        shared = None if self.shared_experts is None else self.shared_experts(tokens)
        routed = travelling.wait()
        y = router.gather_output(self.experts(routed.hidden, routed.expert_end), weights)
        return y if shared is None else y + shared

    def _through_experts(self, tokens: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        """The weighted sum of the outputs of the chosen experts."""
        routing = token_to_expert_map(indices, self.num_experts)
        if self.compute == 'fp8':
            rows = self.experts.forward_fp8(tokens, routing)
        else:
            expanded = expand_to_fused(tokens, routing.token_topk_to_pos, routing.pos_to_expert)
            rows = self.experts(expanded, routing.expert_end)
        return reduce_fused(rows, weights, routing.token_topk_to_pos)

    @torch.no_grad()
    def update_bias(self) -> None:
        """Change the bias of every expert against its load since the last call; call it once a step. Resets the load.

        With a group, all ranks call it together, and the load is summed over them.
        """
        bias = self.gate.e_score_correction_bias
        if bias is not None:
            if self.router is not None:
                torch.distributed.all_reduce(self.tokens_per_expert, group=self.router.group)
            load = self.tokens_per_expert.float()
            bias += self.balance_rate * torch.sign(load.mean() - load)
        self.tokens_per_expert.zero_()

    def load_fraction(self, indices: Tensor) -> Tensor:
        """Load fractions f of the auxiliary balance loss: all 1 if the load is even."""
        return aux_fi(indices, self.num_experts, self.gate.topk)
