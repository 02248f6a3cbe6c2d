"""Routing by top-k: choose the experts of every token, weigh them, and map them to physical experts.

    u[t, e] = score of logits[t, e]                 softmax over e, or of one logit: sigmoid, sqrt(softplus), identity
    r[t, e] = u[t, e] + bias[e]                     what ranks; image_bias for image tokens; softmax ranks by logit
    i[t, :] = the K experts of largest r, best first, in the num_topk_groups groups of largest top-2 sum
    w[t, k] = s u[t, i[t, k]] / sum_j u[t, i[t, j]]
    p[t, k] = to_physical_map[i[t, k], (ep_rank + 23333 t) mod logical_count[i[t, k]]], then its number on this rank

S shared experts follow in slots K to K + S - 1 as experts E + s of weight 1. The experts of some tokens are given or
random, and some tokens are masked out. One warp owns one or two tokens; `topk_gate_kernels` finds the experts.

Gradient, with h the gradient of the sums over t of v = u / U, where U[t] = sum_f u[t, f]:

    D[t]    = sum_k u[t, i[t, k]]
    a[t, e] = sum over k with i[t, k] = e of (s dw[t, k] - sum_j dw[t, j] w[t, j]) / D[t]
    b[t, e] = (h[e] - sum_f h[f] v[t, f]) / U[t]
    dlogits[t, e] = u'(logits[t, e]) (a[t, e] + b[t, e])

u' follows from u alone: u (1 - u) for sigmoid, (1 - exp(-u^2)) / 2u for sqrt(softplus), 1 for identity, u for softmax.
The other term of softmax cancels, because w and v stay the same when all scores grow by one factor.
One warp owns one token. It writes the gradient of all experts first (mostly zeros), then that of the chosen ones.

Both are memory bound for many tokens. The floor of the forward is reading logits and writing weights and indices (and
scores, if wanted). The floor of the backward is writing dlogits, and reading scores where all of them have a gradient.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, Out, op
from tile_kernels.moe._checks import DTYPES, MAX_EXPERTS, MAX_TOPK, check_groups
from tile_kernels.moe.route_topk_kernels import route_topk_bwd_kernel, route_topk_kernel
from tile_kernels.moe.scoring import SCORINGS, ScoringFunc
from tile_kernels.moe.topk_gating import make as make_gating

MAX_SHARED = 16

#: Names of the optional tensors in the static arguments of the kernel.
GIVEN = dict(
    bias='bias',
    image_bias='image',
    mask='mask',
    fix_routing_mask='fixed',
    force_random='random',
    unmapped_topk_idx='unmapped',
    scores='scores',
    to_physical_map='map',
)

# Ops ----------------------------------------------------------------------------------------


@op()
def route_topk_(
    topk_idx: Out,
    topk_weights: Out,
    logits: Tensor,
    scoring: str = 'softmax',
    routed_scaling_factor: float = 1.0,
    num_shared_experts: int = 0,
    bias: Tensor | None = None,
    image_bias: Tensor | None = None,
    image_token_mask: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    mask: Tensor | None = None,
    fix_routing_mask: Tensor | None = None,
    force_random: Tensor | None = None,
    unmapped_topk_idx: Mut | None = None,
    scores: Out | None = None,
    to_physical_map: Tensor | None = None,
    logical_count: Tensor | None = None,
    ep_rank: int = 0,
    num_ep_ranks: int = 1,
    tp_rank: int = 0,
    num_tp_ranks: int = 1,
) -> None:
    """Choose the experts of every token, weigh them and map them to physical experts; writes into arguments.

    Experts are in descending order of score (softmax: of logit) plus bias. Of equal ones the smaller comes first. NaN
    ranks below everything, including -inf. Weights are divided by their sum plus 1e-20, which makes softmax the
    softmax over the chosen logits. K = topk_idx.shape[1] - num_shared_experts.

    Args:
        topk_idx: (num_tokens, K + num_shared_experts) int64, contiguous; gets the experts.
        topk_weights: the same in float32; gets their weights, 1 for shared experts.
        logits: (num_tokens, num_experts) float32, bfloat16 or float16; rows may be strided; 1 to 4096 experts.
        scoring: 'softmax' over the experts, or 'sigmoid', 'sqrtsoftplus', 'identity' of every logit.
        routed_scaling_factor: multiplies the weights of routed experts.
        num_shared_experts: experts num_experts, num_experts + 1, ... that every token goes to; up to 16.
        bias: (num_experts,) float32; changes the choice, not the weights.
        image_bias: (num_experts,) float32, used instead of bias for image tokens.
        image_token_mask: (num_tokens,) bool, True for image tokens; needs image_bias.
        num_groups: number of equal groups of neighboring experts; only experts of the best groups are chosen.
        num_topk_groups: number of groups to choose from: those with the largest top-2 sum. Needs num_groups.
        mask: (num_tokens,) bool; False masks a token out: experts -1, weights and scores 0.
        fix_routing_mask: (num_tokens,) bool; True takes the experts from unmapped_topk_idx. A number that is no expert
            becomes -1 with weight 0.
        force_random: (num_tokens,) bool; True takes distinct random physical experts and random weights. They depend on
            ep_rank and token only. It overrides fix_routing_mask, and mask overrides it.
        unmapped_topk_idx: (num_tokens, K) int64, rows may be strided; gets the logical experts, -1 where there are none
            (masked and random tokens).
        scores: (num_tokens, num_experts) float32, contiguous; gets u, 0 for masked and random tokens.
        to_physical_map: (num_experts + num_shared_experts, max_replicas) int32, contiguous; physical experts of a
            logical one.
        logical_count: (num_experts + num_shared_experts,) int32; their number. Needs to_physical_map.
        ep_rank: this rank; ranks and tokens use the replicas of an expert in turn.
        num_ep_ranks: number of ranks that hold the physical experts, num_experts + max_replicas - 1 in all.
        tp_rank: this tensor-parallel rank.
        num_tp_ranks: if more than one, indices become local to this rank, -1 for other ranks, as in
            `mask_indices_by_tp`; weights stay.
    """
    num_tokens, num_experts = check.shape(logits, 'logits', 'num_tokens num_experts', dtype=DTYPES)
    known = dict(num_tokens=num_tokens)
    _, num_slots = check.shape(topk_idx, 'topk_idx', 'num_tokens num_slots', dtype=torch.int64, **known)
    check.packed(topk_weights, 'topk_weights', 'num_tokens num_slots', torch.float32, num_slots=num_slots, **known)
    check.contiguous(topk_idx, 'topk_idx')
    check.unit_stride(logits, 'logits')
    check.at_least(num_shared_experts, 0, 'num_shared_experts')
    check.at_most(num_shared_experts, MAX_SHARED, 'num_shared_experts')
    num_topk, num_logical = num_slots - num_shared_experts, num_experts + num_shared_experts
    check.at_least(num_topk, 1, 'num_topk')
    check.at_most(num_topk, min(num_experts, MAX_TOPK), 'num_topk')
    check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
    check.one_of(scoring, SCORINGS, 'scoring')
    num_groups, num_topk_groups = check_groups(num_experts, num_topk, num_groups, num_topk_groups, 'num_topk')

    flags = dict(
        image_token_mask=image_token_mask, mask=mask, fix_routing_mask=fix_routing_mask, force_random=force_random
    )
    for name, x in flags.items():
        check.packed(x, name, 'num_tokens', torch.bool, **known)
    check.packed(bias, 'bias', 'num_experts', torch.float32, num_experts=num_experts)
    check.packed(image_bias, 'image_bias', 'num_experts', torch.float32, num_experts=num_experts)
    check.packed(scores, 'scores', 'num_tokens num_experts', torch.float32, num_experts=num_experts, **known)
    check.together(image_bias=image_bias, image_token_mask=image_token_mask)
    if unmapped_topk_idx is not None:
        spec = 'num_tokens num_topk'
        check.shape(unmapped_topk_idx, 'unmapped_topk_idx', spec, dtype=torch.int64, num_topk=num_topk, **known)
        check.unit_stride(unmapped_topk_idx, 'unmapped_topk_idx')
    elif fix_routing_mask is not None:
        check.fail('fix_routing_mask', 'must come with unmapped_topk_idx', 'no unmapped_topk_idx')
    num_physical = num_experts
    check.together(to_physical_map=to_physical_map, logical_count=logical_count)
    if to_physical_map is not None:
        spec, logical = 'num_logical max_replicas', dict(num_logical=num_logical)
        check.packed(to_physical_map, 'to_physical_map', spec, torch.int32, **logical)
        check.packed(logical_count, 'logical_count', 'num_logical', torch.int32, **logical)
        check.at_least(to_physical_map.shape[1], 1, 'to_physical_map.shape[1]')
        num_physical += to_physical_map.shape[1] - 1
    check.at_least(ep_rank, 0, 'ep_rank')
    check.at_least(num_ep_ranks, 1, 'num_ep_ranks')
    check.at_most(num_ep_ranks, num_physical, 'num_ep_ranks')
    check.at_least(num_tp_ranks, 1, 'num_tp_ranks')
    check.at_least(tp_rank, 0, 'tp_rank')
    check.at_most(tp_rank, num_tp_ranks - 1, 'tp_rank')

    optional = dict(
        bias=bias,
        image_bias=image_bias,
        unmapped_topk_idx=unmapped_topk_idx,
        scores=scores,
        to_physical_map=to_physical_map,
        logical_count=logical_count,
        **flags,
    )
    check.same_device(logits=logits, topk_idx=topk_idx, topk_weights=topk_weights, **optional)
    given = tuple(GIVEN[name] for name, x in optional.items() if x is not None and name in GIVEN)
    static = (
        num_experts,
        num_topk,
        num_shared_experts,
        logits.dtype,
        ScoringFunc.from_str(scoring),
        given + (('local',) if num_tp_ranks > 1 else ()),
        num_groups,
        num_topk_groups,
        check.vector_bytes(logits, bias, scores),
        logits.is_contiguous(),
    )
    flag_bytes = (None if x is None else x.view(torch.uint8) for x in flags.values())
    rows = (topk_idx, topk_weights, bias, image_bias, *flag_bytes)
    maps = (to_physical_map, logical_count, unmapped_topk_idx, scores)
    ranks = (ep_rank, num_physical // num_ep_ranks, tp_rank, num_tp_ranks)
    launch(route_topk_kernel, static, logits, *rows, *maps, routed_scaling_factor, *ranks)


@op()
def route_topk_bwd_(
    dlogits: Out,
    scores: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    dtopk_weights: Tensor,
    scoring: str = 'softmax',
    routed_scaling_factor: float = 1.0,
    mask: Tensor | None = None,
    dscores_sum: Tensor | None = None,
) -> None:
    """Gradient of the logits of `route_topk_`, written into an argument. Deterministic.

    Args:
        dlogits: (num_tokens, num_experts) float32, contiguous; overwritten.
        scores: (num_tokens, num_experts) float32, contiguous, as written by `route_topk_`.
        topk_idx: (num_tokens, num_topk) int64, contiguous; logical experts, -1 for none. Experts may repeat.
        topk_weights: (num_tokens, num_topk) float32, contiguous; weights of these experts.
        dtopk_weights: (num_tokens, num_topk) float32, contiguous; gradient of the weights.
        scoring: as given to `route_topk_`.
        routed_scaling_factor: as given to `route_topk_`.
        mask: (num_tokens,) bool; True for tokens that dscores_sum covers.
        dscores_sum: (num_seqs, num_experts) float32, contiguous: gradient of the sums of scores / sum(scores) over the
            tokens of a sequence; sequences are of equal length, one after another. Needs mask.
    """
    num_tokens, num_experts = check.shape(scores, 'scores', 'num_tokens num_experts', dtype=torch.float32)
    known, experts = dict(num_tokens=num_tokens), dict(num_experts=num_experts)
    _, num_topk = check.shape(topk_idx, 'topk_idx', 'num_tokens num_topk', dtype=torch.int64, **known)
    check.contiguous(scores, 'scores')
    check.contiguous(topk_idx, 'topk_idx')
    check.packed(dlogits, 'dlogits', 'num_tokens num_experts', torch.float32, **known, **experts)
    for name, x in (('topk_weights', topk_weights), ('dtopk_weights', dtopk_weights)):
        check.packed(x, name, 'num_tokens num_topk', torch.float32, num_topk=num_topk, **known)
    check.packed(mask, 'mask', 'num_tokens', torch.bool, **known)
    check.packed(dscores_sum, 'dscores_sum', 'num_seqs num_experts', torch.float32, **experts)
    check.at_least(num_topk, 1, 'num_topk')
    check.at_most(num_topk, MAX_TOPK, 'num_topk')
    check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
    check.one_of(scoring, SCORINGS, 'scoring')
    seq_len, counted = 1, None
    if dscores_sum is not None:
        if mask is None:
            check.fail('dscores_sum', 'must come with mask', 'no mask')
        num_seqs = dscores_sum.shape[0]
        check.at_least(num_seqs, 1, 'num_seqs')
        check.multiple(num_tokens, num_seqs, 'num_tokens')
        seq_len, counted = num_tokens // num_seqs, mask.view(torch.uint8)
    tensors = (scores, topk_idx, topk_weights, dtopk_weights, counted, dscores_sum, dlogits)
    check.same_device(
        scores=scores,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        dtopk_weights=dtopk_weights,
        mask=mask,
        dscores_sum=dscores_sum,
        dlogits=dlogits,
    )
    static = (
        num_experts,
        num_topk,
        ScoringFunc.from_str(scoring),
        dscores_sum is not None,
        check.vector_bytes(scores, dlogits, dscores_sum),
    )
    launch(route_topk_bwd_kernel, static, *tensors, routed_scaling_factor, seq_len)


# Cases --------------------------------------------------------------------------------------


def make(
    num_tokens: int,
    num_experts: int,
    num_topk: int,
    scoring: str,
    given: str = '',
    num_shared_experts: int = 0,
    dtype: torch.dtype = torch.float32,
    ties: bool = True,
    **options: object,
) -> dict:
    """Make every optional argument that `given` names; logits are those of `topk_gating`."""
    names = given.split()
    arguments = make_gating(num_tokens, num_experts, num_topk, dtype, scoring, biased='bias' in names, ties=ties)
    num_slots, num_logical, max_replicas = num_topk + num_shared_experts, num_experts + num_shared_experts, 4
    tensors = dict(
        image_bias=lambda: torch.randn(num_experts).mul(4).round().div(64),
        unmapped_topk_idx=lambda: torch.rand(num_tokens, num_experts).argsort(-1)[:, :num_topk].contiguous(),
        scores=lambda: torch.empty(num_tokens, num_experts),
        to_physical_map=lambda: torch.randint(0, num_logical + 16, (num_logical, max_replicas), dtype=torch.int32),
        logical_count=lambda: torch.randint(1, max_replicas + 1, (num_logical,), dtype=torch.int32),
        image_token_mask=lambda: torch.rand(num_tokens) < 0.5,
        mask=lambda: torch.rand(num_tokens) < 0.8,
        fix_routing_mask=lambda: torch.rand(num_tokens) < 0.3,
        force_random=lambda: torch.rand(num_tokens) < 0.3,
    )
    return dict(
        topk_idx=torch.empty(num_tokens, num_slots, dtype=torch.int64),
        topk_weights=torch.empty(num_tokens, num_slots),
        logits=arguments['logits'],
        bias=arguments['bias'],
        scoring=scoring,
        num_shared_experts=num_shared_experts,
        routed_scaling_factor=2.5,
        **{name: tensor() for name, tensor in tensors.items() if name in names},
        **options,
    )


def make_bwd(
    num_tokens: int, num_experts: int, num_topk: int, scoring: str, num_seqs: int = 0, is_distinct: bool = True
) -> dict:
    """Random experts are the chosen ones; a few are missing, and some are repeated unless `is_distinct`."""
    scores = torch.rand(num_tokens, num_experts) + 0.01
    scores = scores / scores.sum(-1, keepdim=True) if scoring == 'softmax' else scores
    topk_idx = torch.rand(num_tokens, num_experts).argsort(-1)[:, :num_topk].contiguous()
    topk_idx = topk_idx if is_distinct else topk_idx % (num_experts // 2)
    topk_idx = torch.where(torch.rand(num_tokens, num_topk) < 0.1, -1, topk_idx)
    chosen = torch.where(topk_idx < 0, 0.0, scores.gather(1, topk_idx.clamp(min=0)))
    return dict(
        dlogits=torch.empty(num_tokens, num_experts),
        scores=scores,
        topk_idx=topk_idx,
        topk_weights=chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * 2.5,
        dtopk_weights=torch.randn(num_tokens, num_topk),
        scoring=scoring,
        routed_scaling_factor=2.5,
        mask=torch.rand(num_tokens) < 0.8 if num_seqs else None,
        dscores_sum=torch.randn(num_seqs, num_experts) if num_seqs else None,
    )


IMAGES = 'bias image_bias image_token_mask'
MAP = 'to_physical_map logical_count'
ROWS = 'unmapped_topk_idx fix_routing_mask force_random mask'
GROUPS = dict(num_groups=[8], num_topk_groups=[4])
RANKS = dict(ep_rank=[3], num_ep_ranks=[4], tp_rank=[1], num_tp_ranks=[2])
PAIR = dict(num_experts=[256], num_topk=[8])
DISTINCT = dict(ties=[False])

route_topk_.cases(
    make=make,
    match=dict(rtol=2e-6, atol=1e-7),
    smoke=grid(num_tokens=[0, 5], **PAIR, scoring=['sqrtsoftplus'], given=['bias'])
    + grid(num_tokens=[13], num_experts=[64], num_topk=[6], scoring=SCORINGS, given=[f'{ROWS} scores'])
    + grid(
        num_tokens=[9],
        num_experts=[64],
        num_topk=[6],
        scoring=SCORINGS[:2],
        given=[f'{IMAGES} {MAP} {ROWS}'],
        num_shared_experts=[2],
        **RANKS,
    )
    + grid(num_tokens=[7], num_experts=[72], num_topk=[36], scoring=['softmax'], given=[f'{IMAGES} {MAP} scores'])
    + grid(num_tokens=[4], num_experts=[64], num_topk=[6], scoring=SCORINGS[:3], given=['bias'], **GROUPS),
    full=grid(num_tokens=[1001, 8195], **PAIR, scoring=SCORINGS, given=[f'{IMAGES} {MAP} {ROWS} scores'])
    + grid(num_tokens=[8195], **PAIR, scoring=SCORINGS[:2], given=['bias'], dtype=[torch.bfloat16, torch.float32])
    + grid(num_tokens=[1001], num_experts=[100, 4096], num_topk=[6, 64], scoring=['sigmoid'], given=['bias scores'])
    + grid(num_tokens=[4001], **PAIR, scoring=SCORINGS[:3], given=['bias'], **GROUPS, **RANKS),
    bench=grid(num_tokens=[64, 4096, 16384], **PAIR, scoring=['sqrtsoftplus'], given=['bias'], **DISTINCT)
    + grid(num_tokens=[64, 4096, 16384], **PAIR, scoring=['sigmoid'], given=['bias'], **GROUPS, **DISTINCT)
    + grid(num_tokens=[4001], **PAIR, scoring=['sqrtsoftplus'], given=[f'bias {MAP} mask scores'], **DISTINCT),
)

route_topk_bwd_.cases(
    make=make_bwd,
    match=dict(rtol=1e-4, atol=1e-5),
    smoke=grid(num_tokens=[0, 6], num_experts=[64], num_topk=[6], scoring=SCORINGS, num_seqs=[0, 2])
    + grid(num_tokens=[5], num_experts=[36], num_topk=[36], scoring=['sigmoid'], num_seqs=[1], is_distinct=[False]),
    full=grid(num_tokens=[4002], num_experts=[256, 72], num_topk=[8, 40], scoring=SCORINGS, num_seqs=[0, 3])
    + grid(num_tokens=[501], num_experts=[256], num_topk=[64], scoring=SCORINGS, num_seqs=[3], is_distinct=[False]),
    bench=grid(num_tokens=[64, 4096, 16384], num_experts=[256], num_topk=[8], scoring=['sqrtsoftplus'])
    + grid(num_tokens=[4096], num_experts=[256], num_topk=[8], scoring=['sqrtsoftplus'], num_seqs=[4]),
)
