"""Route few tokens in one launch: logits, experts, maps, and rows that are quantized and in expert order.

    logits = gate_logits(hidden_states, gate_weight)
    weights, indices = topk_gating(logits, top_k, ...)
    maps = fused_mapping(indices, num_experts, num_expanded, alignment)
    rows = expand_and_per_token_cast(hidden_states, token_topk_to_pos, pos_to_expert, fmt)

The results have the same bits as those of the four ops. Up to 256 tokens run in one launch, if all its blocks fit on
the GPU at the same time. Other calls run the four ops. Latency bound: two grid barriers instead of four launches.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.launch import gpu_of, launch
from tile_kernels.core.op import op
from tile_kernels.moe._checks import BITS, MAX_EXPERTS, check_groups
from tile_kernels.moe.expand_and_per_token_cast import DATA, GROUPS, expand_and_per_token_cast, sf_size_of
from tile_kernels.moe.fused_mapping import fused_mapping
from tile_kernels.moe.gate_logits import gate_logits
from tile_kernels.moe.gate_logits_kernels import num_parts_for
from tile_kernels.moe.route_kernels import BLOCK_M, MAX_HIDDEN, MAX_TOKENS, num_blocks, route_kernel
from tile_kernels.moe.scoring import SCORINGS, ScoringFunc
from tile_kernels.moe.topk_gating import topk_gating

MAX_TOPK = 16


class Routed(NamedTuple):
    """What `route` returns: the results of `topk_gating` and `fused_mapping`, and the rows."""

    weights: Tensor
    indices: Tensor
    pos_to_expert: Tensor
    pos_to_token: Tensor
    pos_to_token_topk: Tensor
    token_topk_to_pos: Tensor
    expert_start: Tensor
    expert_end: Tensor
    num_tokens_per_expert: Tensor
    overflow: Tensor
    rows: QuantTensor


# Op -----------------------------------------------------------------------------------------


@op(
    outputs='weights indices pos_to_expert pos_to_token pos_to_token_topk token_topk_to_pos '
    'expert_start expert_end num_tokens_per_expert overflow y y_sf'
)
def _route(
    hidden_states: Tensor,
    gate_weight: Tensor,
    top_k: int,
    num_expanded: int,
    alignment: int,
    fmt: QuantFormat,
    scoring: str = 'softmax',
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, ...]:
    """See `route`."""
    num_tokens, hidden = check.shape(hidden_states, 'hidden_states', 'num_tokens hidden', dtype=torch.bfloat16)
    num_experts, _ = check.shape(gate_weight, 'gate_weight', 'num_experts hidden', dtype=torch.bfloat16, hidden=hidden)
    if bias is not None:
        check.shape(bias, 'bias', 'num_experts', dtype=torch.float32, num_experts=num_experts)
    groups = check_groups(num_experts, top_k, num_groups, num_topk_groups)
    check.same_device(hidden_states=hidden_states, gate_weight=gate_weight, bias=bias)
    if not fits(hidden_states, gate_weight, bias, top_k):
        weights, indices = topk_gating.call(
            gate_logits.call(hidden_states, gate_weight),
            top_k,
            scoring=scoring,
            renormalize=renormalize,
            bias=bias,
            num_groups=num_groups,
            num_topk_groups=num_topk_groups,
            routed_scaling_factor=routed_scaling_factor,
            index_dtype=index_dtype,
        )
        places = fused_mapping.call(indices, num_experts, num_expanded, alignment)
        rows = expand_and_per_token_cast.call(hidden_states, places[3], places[0], fmt)
        return weights, indices, *places, rows.data, rows.sf

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return hidden_states.new_empty(shape, dtype=dtype)

    weights = empty(num_tokens, top_k, dtype=torch.float32)
    indices = empty(num_tokens, top_k, dtype=index_dtype)
    maps = (empty(num_expanded), empty(num_expanded), empty(num_expanded), empty(num_tokens, top_k))
    experts = (empty(num_experts), empty(num_experts), empty(num_experts), empty(1))
    y = fmt.empty(num_expanded, hidden, hidden_states.device)
    num_parts = num_parts_for(num_tokens, hidden)
    parts = empty(num_parts, num_tokens, num_experts, dtype=torch.float32)
    kind = ScoringFunc.from_str(scoring)
    tiles_m = torch.sym_max(1, -(-num_tokens // BLOCK_M))
    static = (num_experts, hidden, num_parts, tiles_m, top_k, index_dtype, kind, renormalize, bias is not None, *groups)
    codes = (y.data.view(torch.uint8), y.sf.view(BITS[sf_size_of(fmt, fmt.blocks(1, hidden)[1])]))
    launch(
        route_kernel,
        (*static, fmt),
        hidden_states,
        gate_weight,
        bias,
        parts,
        weights,
        indices,
        *maps,
        *experts,
        *codes,
        alignment,
        routed_scaling_factor,
        fmt.amax_floor,
    )
    return weights, indices, *maps, *experts, y.data, y.sf


def fits(hidden_states: Tensor, gate_weight: Tensor, bias: Tensor | None, top_k: int) -> bool:
    """Whether one launch can route these tokens."""
    (num_tokens, hidden), num_experts, gpu = hidden_states.shape, gate_weight.shape[0], gpu_of(hidden_states)
    if not (gpu.has_wgmma and 1 <= num_tokens <= MAX_TOKENS and top_k <= MAX_TOPK and hidden <= MAX_HIDDEN):
        return False
    blocks = num_blocks(-(-num_tokens // BLOCK_M), num_experts, num_parts_for(num_tokens, hidden))
    return blocks <= gpu.sms and check.vector_bytes(hidden_states, gate_weight, bias) == 16


@_route.public
def route(
    hidden_states: Tensor,
    gate_weight: Tensor,
    top_k: int,
    num_expanded: int,
    alignment: int,
    fmt: QuantFormat | str,
    *,
    scoring: str = 'softmax',
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> Routed:
    """Choose experts for every token, and write its quantized row to its position in expert order; no gradients.

    Args:
        hidden_states: (num_tokens, hidden) bfloat16; rows may be strided.
        gate_weight: (num_experts, hidden) bfloat16, contiguous.
        top_k: experts per token.
        num_expanded: number of positions; slots beyond get none.
        alignment: every expert begins at a multiple of it.
        fmt: as in `expand_and_per_token_cast`.
        scoring: as in `topk_gating`, also the following.
        renormalize: whether to divide the weights of a token by their sum.
        bias: (num_experts,) float32; changes the choice, not the weights.
        num_groups: number of equal groups of neighboring experts.
        num_topk_groups: number of groups to choose from.
        routed_scaling_factor: multiplies the weights.
        index_dtype: torch.int64 or torch.int32.

    Returns:
        The results of the four ops by name, with the same bits.
    """
    _, hidden = check.shape(hidden_states, 'hidden_states', 'num_tokens hidden', dtype=torch.bfloat16)
    num_experts, _ = check.shape(gate_weight, 'gate_weight', 'num_experts hidden', dtype=torch.bfloat16, hidden=hidden)
    check.unit_stride(hidden_states, 'hidden_states')
    check.contiguous(gate_weight, 'gate_weight')
    check.at_least(hidden, 1, 'hidden')
    check.at_least(num_experts, 1, 'num_experts')
    check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
    check.at_least(num_expanded, 0, 'num_expanded')
    check.at_least(alignment, 1, 'alignment')
    check.one_of(scoring, SCORINGS, 'scoring')
    fmt = QuantFormat.parse(fmt)
    check.one_of(fmt.data.name, DATA, 'data of fmt')
    check.one_of(fmt.sf_block, [(1, group) for group in GROUPS], 'scale block of fmt')
    choice: dict[str, Any] = dict(
        scoring=scoring,
        renormalize=renormalize,
        bias=bias,
        num_groups=num_groups,
        num_topk_groups=num_topk_groups,
        routed_scaling_factor=routed_scaling_factor,
        index_dtype=index_dtype,
    )
    found = route.call(hidden_states, gate_weight, top_k, num_expanded, alignment, fmt, **choice)
    data, sf = found[-2:]
    return Routed._make([*found[:-2], QuantTensor(data, sf, fmt)])


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int, num_experts: int, top_k: int, hidden: int, fmt: str, alignment: int = 1, spare: int = 3,
    scoring: str = 'softmax', biased: bool = False, **options: Any,
) -> dict:  # fmt: skip
    """Small integers: the sums of logits are exact in any order, so equal logits are equal everywhere."""
    hidden_states = torch.randint(-2, 3, (num_tokens, hidden)).to(torch.bfloat16)
    gate_weight = torch.randint(-2, 3, (num_experts, hidden)).mul(2.0**-5).to(torch.bfloat16)
    bias = torch.randn(num_experts).mul(4).round().div(64) if biased else None
    num_expanded = max(0, num_tokens * top_k + (alignment - 1) * num_experts + spare)
    return dict(
        hidden_states=hidden_states,
        gate_weight=gate_weight,
        top_k=top_k,
        num_expanded=num_expanded,
        alignment=alignment,
        fmt=QuantFormat.parse(fmt),
        scoring=scoring,
        bias=bias,
        **options,
    )


E4M3 = 'e4m3_1x128_f32'
_route.cases(
    make=_make,
    match=dict(rtol=2e-6, atol=1e-7),
    smoke=grid(num_tokens=[1, 70], num_experts=[72], top_k=[6], hidden=[1032], fmt=[E4M3], alignment=[4])
    + grid(
        num_tokens=[5],
        num_experts=[64],
        top_k=[8],
        hidden=[336],
        fmt=['e2m1_1x32_ue8m0x4_col'],
        spare=[-9],
        scoring=['sigmoid'],
        biased=[True],
        num_groups=[8],
        num_topk_groups=[3],
    ),
    full=grid(num_tokens=[1, 64, 65, 128, 130, 256], num_experts=[256], top_k=[8], hidden=[7168, 2048], fmt=[E4M3])
    + grid(num_tokens=[3, 200], num_experts=[40, 160], top_k=[1, 16], hidden=[5120], fmt=['e4m3_1x128_ue8m0x4_col']),
    bench=grid(num_tokens=[1, 16, 64, 256], num_experts=[256], top_k=[8], hidden=[7168], fmt=[E4M3], spare=[0])
    + grid(num_tokens=[1, 16, 64], num_experts=[64], top_k=[6], hidden=[2048], fmt=[E4M3], spare=[0]),
)
