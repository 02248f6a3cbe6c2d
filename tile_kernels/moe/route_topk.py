"""Routing by top-k: choose the experts of every token, weigh them, and say where they live.

    u[t, e] = score of logits[t, e]                 softmax over e, or of one logit: sigmoid, sqrt(softplus), identity
    r[t, e] = u[t, e] + bias[e]                     what ranks; image_bias for image tokens; softmax ranks by logit
    i[t, :] = the K experts of largest r, best first, in the num_topk_groups groups of largest top-2 sum
    w[t, k] = s u[t, i[t, k]] / sum_j u[t, i[t, j]]
    p[t, k] = to_physical_map[i[t, k], (ep_rank + 23333 t) mod logical_count[i[t, k]]], then its number on this rank

S shared experts follow in slots K to K + S - 1 as experts E + s of weight 1. Some tokens have their experts given, some
take them at random, some are masked out. One warp owns one token or two; `_selection` has the choice. Memory bound for
many tokens: the floor is reading logits and writing weights and indices (and scores, where asked for).
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, Out, op
from tile_kernels.moe._macros import (
    FAST_FUNCTIONS,
    WARP,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    load_rows,
    sum_of_renormalized,
)
from tile_kernels.moe._selection import Bias, Ranking, select_topk
from tile_kernels.moe.mask_indices_by_tp import local_index
from tile_kernels.moe.route_topk_kernels import count_places, draw_if, mix, place_of, store_scores, take_given
from tile_kernels.moe.scoring import SCORINGS, ScoringFunc
from tile_kernels.moe.topk_gate import DTYPES, MAX_EXPERTS, MAX_TOPK
from tile_kernels.moe.topk_gating import check_groups, choose
from tile_kernels.moe.topk_gating import make as make_gating

MAX_SHARED = 16
#: Stands for the pick after the last: the shared experts.
SHARED = -1
#: What a kernel is told about the optional tensors.
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

# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_warps=(1, 2, 4, 8), rows=(1, 2)), pass_configs=WARP_PASS_CONFIGS)
def route_topk_kernel(
    num_experts: int,
    num_topk: int,
    num_shared: int,
    dtype: torch.dtype,
    scoring: ScoringFunc,
    given: tuple[str, ...],
    num_groups: int,
    num_topk_groups: int,
    vector_bytes: int,
    packed: bool,
    *,
    num_warps: int,
    rows: int,
):
    """Choice, weights and places of one or two tokens per warp; `given` names the optional tensors there are."""
    layout = RowLayout.of(num_experts, dtype.itemsize, vector_bytes)
    biased = 'bias' in given or 'image' in given
    ranking = Ranking(layout, num_topk, scoring, biased, num_groups, num_topk_groups)
    rows = max(ranking.rows_by_cut(rows), 1)
    num_slots, num_logical = num_topk + num_shared, num_experts + num_shared
    num_tokens = T.dynamic('num_tokens')
    num_replicas = T.dynamic('num_replicas') if 'map' in given else 1
    row_stride = num_experts if packed else T.dynamic('row_stride')
    unmapped_stride = T.dynamic('unmapped_stride') if 'unmapped' in given else num_topk

    @T.prim_func
    def route_topk(
        logits: T.StridedTensor((num_tokens, num_experts), (row_stride, 1), T.dtype(dtype)),
        topk_idx: T.Tensor((num_tokens, num_slots), 'int64'),
        topk_weights: T.Tensor((num_tokens, num_slots), 'float32'),
        bias: T.Tensor((num_experts,), 'float32'),
        image_bias: T.Tensor((num_experts,), 'float32'),
        image_token_mask: T.Tensor((num_tokens,), 'uint8'),
        mask: T.Tensor((num_tokens,), 'uint8'),
        fix_routing_mask: T.Tensor((num_tokens,), 'uint8'),
        force_random: T.Tensor((num_tokens,), 'uint8'),
        to_physical_map: T.Tensor((num_logical, num_replicas), 'int32'),
        logical_count: T.Tensor((num_logical,), 'int32'),
        unmapped_topk_idx: T.StridedTensor((num_tokens, num_topk), (unmapped_stride, 1), 'int64'),
        scores: T.Tensor((num_tokens, num_experts), 'float32'),
        scale: T.float32,
        ep_rank: T.int32,
        per_rank: T.int32,
        tp_rank: T.int32,
        num_tp_ranks: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, num_warps * rows), threads=num_warps * WARP) as pid:
            T.assume(row_stride % layout.vec == 0)
            T.import_source(FAST_FUNCTIONS)
            x_local = T.alloc_local((rows, layout.num_slots), 'float32')
            expert_local = T.alloc_local((ranking.num_picks,), 'int32')
            value_local = T.alloc_local((ranking.num_picks,), 'float32')
            tokens_local = T.alloc_local((rows,), 'int32')
            alive_rows = T.alloc_local((rows,), 'int32')
            image_rows = T.alloc_local((rows,), 'int32')
            token = T.alloc_var('int32')
            alive = T.alloc_var('int32')
            image_part = T.alloc_var('int32')
            drawn = T.alloc_var('int32')
            num_places = T.alloc_var('uint32')
            seed = T.alloc_var('uint32')
            total = T.alloc_var('float32')
            chosen = T.alloc_var('int32')
            weight = T.alloc_var('float32')
            tx = T.get_thread_binding()
            at = Place(num_warps, rows, tx, tokens_local, token)
            first_token = (pid * num_warps + at.warp) * rows

            if first_token < num_tokens:
                for r in T.unroll(rows):
                    tokens_local[r] = T.min(first_token + r, num_tokens - 1)
                token = T.min(first_token + at.part, num_tokens - 1)
                load_rows(logits, at, layout, x_local)

                # What kind of tokens these are: of an image, given at random, masked out.
                image_part = 0
                drawn = 0
                alive = 1
                for r in T.unroll(rows):
                    image_rows[r] = 0
                    alive_rows[r] = 1
                if 'image' in given:
                    for r in T.unroll(rows):
                        image_rows[r] = T.cast(image_token_mask[tokens_local[r]], 'int32')
                    image_part = T.cast(image_token_mask[token], 'int32')
                if 'mask' in given:
                    for r in T.unroll(rows):
                        alive_rows[r] = T.cast(mask[tokens_local[r]], 'int32')
                    alive = T.cast(mask[token], 'int32')
                if 'random' in given:
                    for r in T.unroll(rows):
                        if force_random[tokens_local[r]] != T.uint8(0):
                            alive_rows[r] = 0
                    drawn = T.cast(force_random[token], 'int32')
                    num_places = T.uint32(num_logical)
                    if 'map' in given:
                        num_places = T.cast(count_places(logical_count, num_logical, at.lane), 'uint32')
                        num_places = T.max(num_places, T.uint32(num_slots))
                    seed = mix(mix(T.cast(ep_rank, 'uint32')) + T.cast(token, 'uint32'))

                if 'scores' in given:
                    store_scores(scores, scoring, at, layout, alive_rows, x_local)
                biases = [b if name in given else None for name, b in (('bias', bias), ('image', image_bias))]
                select_topk(
                    ranking, logits, Bias(*biases, image_rows, image_part), at, x_local, expert_local, value_local
                )
                if 'fixed' in given:
                    take_given(
                        fix_routing_mask, unmapped_topk_idx, logits, scoring, num_topk, at, expert_local, value_local
                    )
                total = sum_of_renormalized(value_local, scoring, at, num_topk)

                for p in (*range(ranking.num_picks), SHARED)[: ranking.num_picks + min(num_shared, 1)]:
                    first_slot, end = (num_topk, num_slots) if p == SHARED else (p * WARP, num_topk)
                    slot = first_slot + at.sublane
                    if slot < end and first_token + at.part < num_tokens:
                        if p == SHARED:
                            chosen = num_experts + at.sublane
                            weight = 1.0
                        else:
                            chosen = expert_local[p]
                            weight = value_local[p] / total * scale
                            if 'unmapped' in given:
                                unmapped_topk_idx[token, slot] = T.cast(
                                    T.Select(alive == 0 or drawn != 0, -1, chosen), 'int64'
                                )
                        if chosen < 0:
                            weight = 0.0
                        elif 'map' in given:
                            chosen = place_of(chosen, token, to_physical_map, logical_count, ep_rank)
                        if 'random' in given:
                            chosen, weight = draw_if(drawn, slot, num_places, seed, chosen, weight)
                        if 'local' in given:
                            chosen = local_index(chosen, per_rank, tp_rank, num_tp_ranks)
                        topk_idx[token, slot] = T.cast(T.Select(alive == 0, -1, chosen), 'int64')
                        topk_weights[token, slot] = T.Select(alive == 0, T.float32(0), weight)

    return route_topk


# Op -----------------------------------------------------------------------------------------


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
    """Choose the experts of every token, weigh them and say where they live, into memory of the caller.

    Experts come in descending order of their score (softmax: of their logit) plus bias; equal ones take the smaller
    expert first and NaN ranks below everything, -inf included. Weights are divided by their sum (plus 1e-20); for
    softmax this is the softmax over the chosen logits. K = topk_idx.shape[1] - num_shared_experts.

    Args:
        topk_idx: (num_tokens, K + num_shared_experts) int64, contiguous; gets the experts.
        topk_weights: the same in float32; gets their weights, 1 for shared experts.
        logits: (num_tokens, num_experts) float32, bfloat16 or float16; rows may be strided; 1 to 4096 experts.
        scoring: 'softmax' over the experts, or 'sigmoid', 'sqrtsoftplus', 'identity' of every logit.
        routed_scaling_factor: multiplies the weights of routed experts.
        num_shared_experts: experts num_experts, num_experts + 1, ... that every token goes to; up to 16.
        bias: (num_experts,) float32; moves the choice, not the weights.
        image_bias: (num_experts,) float32 instead of bias for the tokens of images.
        image_token_mask: (num_tokens,) bool, tokens of images; comes with image_bias.
        num_groups: number of equal groups of neighbouring experts; only experts of the best groups are chosen.
        num_topk_groups: groups that take part: those with the largest sum of their two best scores. Needs num_groups.
        mask: (num_tokens,) bool; False leaves a token out: experts -1, weights and scores 0.
        fix_routing_mask: (num_tokens,) bool; True takes the experts from unmapped_topk_idx. One that does not exist
            there becomes -1 of weight 0.
        force_random: (num_tokens,) bool; True takes distinct random physical experts and random weights, the same for
            the same ep_rank and token. Goes before fix_routing_mask, and mask before it.
        unmapped_topk_idx: (num_tokens, K) int64, rows may be strided; gets the logical experts, -1 where there are none
            (masked and random tokens).
        scores: (num_tokens, num_experts) float32, contiguous; gets u, 0 for masked and random tokens.
        to_physical_map: (num_experts + num_shared_experts, max_replicas) int32, contiguous; physical experts of a
            logical one.
        logical_count: (num_experts + num_shared_experts,) int32; how many of them there are. Comes with the map.
        ep_rank: this rank; ranks and tokens take the replicas of an expert in turns.
        num_ep_ranks: ranks the physical experts are spread over, num_experts + max_replicas - 1 in all.
        tp_rank: this rank among the tensor-parallel ones.
        num_tp_ranks: if more than one, indices become those of the experts on this rank and -1 for all others, as
            by `mask_indices_by_tp`; weights stay.
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
    rows = (logits, topk_idx, topk_weights, bias, image_bias, *flag_bytes)
    maps = (to_physical_map, logical_count, unmapped_topk_idx, scores)
    ranks = (ep_rank, num_physical // num_ep_ranks, tp_rank, num_tp_ranks)
    launch(route_topk_kernel, static, *rows, *maps, routed_scaling_factor, *ranks)


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
    """Every optional argument that `given` names; logits as those of `topk_gating`."""
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
