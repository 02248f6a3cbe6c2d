"""Backward of routing by top-k: from the weights of the chosen experts, and from summed shares, to all logits.

With the scores u[t, e], the choice i[t, k] and the weights w[t, k] of `route_topk_`, and s its factor:

    D[t]    = sum_k u[t, i[t, k]]
    a[t, e] = sum over k with i[t, k] = e of (s dw[t, k] - sum_j dw[t, j] w[t, j]) / D[t]
    b[t, e] = (h[e] - sum_f h[f] v[t, f]) / U[t]      v = u / U, U[t] = sum_f u[t, f]; h: gradient of sums of v over t
    dlogits[t, e] = u'(logits[t, e]) (a[t, e] + b[t, e])

u' follows from u alone: u (1 - u) for sigmoid, (1 - exp(-u^2)) / 2u for sqrt(softplus), 1 for identity, and u for
softmax, whose other part cancels because weights and shares do not change when all scores grow alike.

One warp owns one token: it writes what all experts get (mostly zeros), then what the chosen ones get. Memory bound: the
floor is writing dlogits, and reading scores where all of them have a gradient.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.moe._macros import (
    EPSILON,
    WARP,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    load_rows,
    store_rows,
    sum_of_chosen,
    sum_over,
)
from tile_kernels.moe.scoring import SCORINGS, ScoringFunc
from tile_kernels.moe.topk_gate import MAX_EXPERTS, MAX_TOPK

# Config -------------------------------------------------------------------------------------


def choose(*static_and_size: int) -> dict:
    """Few tokens spread over the SMs."""
    return dict(num_warps=1 if static_and_size[-1] <= 1024 else 4)


# Kernel -------------------------------------------------------------------------------------


def slope_of_score(u, scoring: ScoringFunc):
    """Derivative of a score, from the score itself."""
    if scoring == ScoringFunc.SIGMOID:
        return u * (T.float32(1) - u)
    if scoring == ScoringFunc.SQRTSOFTPLUS:
        # (1 - exp(-v)) / v loses its digits for small v; there its series is short.
        v = u * u
        series = T.float32(1)
        for i in (7, 6, 5, 4, 3, 2):
            series = T.float32(1) - v * T.float32(1 / i) * series
        steep = (T.float32(1) - T.exp(-v)) / u
        return T.float32(0.5) * T.Select(v < T.float32(0.25), u * series, steep)
    return u if scoring == ScoringFunc.SOFTMAX else T.float32(1)


@macro
def gather_equal(expert, route, num_topk: int, lane, total, is_first):
    """Sum what all slots of a lane's experts get, in the order of slots; the first of equal slots speaks for all."""
    num_picks = -(-num_topk // WARP)
    for p in T.unroll(num_picks):
        total[p] = 0.0
        is_first[p] = 1
    for q in T.unroll(num_picks):
        for j in T.serial(T.min(num_topk - q * WARP, WARP)):
            other = T.shfl_sync(expert[q], j)
            part = T.shfl_sync(route[q], j)
            for p in T.unroll(num_picks):
                if other == expert[p]:
                    total[p] = total[p] + part
                    if q * WARP + j < p * WARP + lane:
                        is_first[p] = 0


@kernel(choose=choose, space=dict(num_warps=(1, 2, 4, 8)), pass_configs=WARP_PASS_CONFIGS)
def route_topk_bwd_kernel(
    num_experts: int, num_topk: int, scoring: ScoringFunc, is_dense: bool, vector_bytes: int, *, num_warps: int
):
    """Gradient of the logits of one token per warp: what all experts get, then what the chosen ones get."""
    layout = RowLayout.of(num_experts, 4, vector_bytes)
    num_picks = -(-num_topk // WARP)
    num_tokens = T.dynamic('num_tokens')
    num_seqs = T.dynamic('num_seqs') if is_dense else 1

    @T.prim_func
    def route_topk_bwd(
        scores: T.Tensor((num_tokens, num_experts), 'float32'),
        topk_idx: T.Tensor((num_tokens, num_topk), 'int64'),
        topk_weights: T.Tensor((num_tokens, num_topk), 'float32'),
        dtopk_weights: T.Tensor((num_tokens, num_topk), 'float32'),
        mask: T.Tensor((num_tokens,), 'uint8'),
        dscores_sum: T.Tensor((num_seqs, num_experts), 'float32'),
        dlogits: T.Tensor((num_tokens, num_experts), 'float32'),
        scale: T.float32,
        seq_len: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, num_warps), threads=num_warps * WARP) as pid:
            u_local = T.alloc_local((1, layout.num_slots), 'float32')
            h_local = T.alloc_local((1, layout.num_slots), 'float32')
            expert_local = T.alloc_local((num_picks,), 'int32')
            score_local = T.alloc_local((num_picks,), 'float32')
            route_local = T.alloc_local((num_picks,), 'float32')
            moved_local = T.alloc_local((num_picks,), 'float32')
            total_local = T.alloc_local((num_picks,), 'float32')
            first_local = T.alloc_local((num_picks,), 'int32')
            total = T.alloc_var('float32')
            moved = T.alloc_var('float32')
            share = T.alloc_var('float32')
            mean = T.alloc_var('float32')
            tokens_local = T.alloc_local((1,), 'int32')
            seqs_local = T.alloc_local((1,), 'int32')
            tx = T.get_thread_binding()
            tokens_local[0] = pid * num_warps + tx // WARP
            at = Place(num_warps, 1, tx, tokens_local, tokens_local[0])

            if at.token < num_tokens:
                if is_dense:
                    seqs_local[0] = T.truncdiv(at.token, seq_len)
                    load_rows(scores, at, layout, u_local)
                    load_rows(dscores_sum, Place(num_warps, 1, tx, seqs_local, seqs_local[0]), layout, h_local)
                for p in T.unroll(num_picks):
                    expert_local[p] = -1
                    score_local[p] = 0.0
                    route_local[p] = 0.0
                    moved_local[p] = 0.0
                    if p * WARP + at.lane < num_topk:
                        expert = topk_idx[at.token, p * WARP + at.lane]
                        if expert >= T.int64(0) and expert < T.int64(num_experts):
                            expert_local[p] = T.cast(expert, 'int32')
                            score_local[p] = scores[at.token, expert_local[p]]
                            route_local[p] = dtopk_weights[at.token, p * WARP + at.lane]
                            moved_local[p] = route_local[p] * topk_weights[at.token, p * WARP + at.lane]
                total = sum_of_chosen(score_local, at, num_topk, WARP) + T.float32(EPSILON)
                moved = sum_of_chosen(moved_local, at, num_topk, WARP)
                for p in T.unroll(num_picks):
                    route_local[p] = (route_local[p] * scale - moved) / total
                gather_equal(expert_local, route_local, num_topk, at.lane, total_local, first_local)

                share = 0.0
                mean = 0.0
                if is_dense:
                    total = 0.0
                    for s in T.unroll(layout.num_slots):
                        if layout.expert(s, at.lane) < num_experts:
                            total = total + u_local[0, s]
                            mean = mean + h_local[0, s] * u_local[0, s]
                    total = sum_over(total, WARP)
                    share = T.Select(mask[at.token] != T.uint8(0), T.float32(1) / total, T.float32(0))
                    mean = sum_over(mean, WARP) * share
                for s in T.unroll(layout.num_slots):
                    if is_dense:
                        h_local[0, s] = slope_of_score(u_local[0, s], scoring) * ((h_local[0, s] - mean) * share)
                        if share == T.float32(0):
                            h_local[0, s] = 0.0
                    else:
                        h_local[0, s] = 0.0
                store_rows(h_local, dlogits, at, layout)
                T.sync_warp()
                for p in T.unroll(num_picks):
                    if expert_local[p] >= 0 and first_local[p] == 1:
                        if is_dense:
                            total_local[p] = (
                                total_local[p] + (dscores_sum[seqs_local[0], expert_local[p]] - mean) * share
                            )
                        dlogits[at.token, expert_local[p]] = total_local[p] * slope_of_score(score_local[p], scoring)

    return route_topk_bwd


# Op -----------------------------------------------------------------------------------------


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
    """Gradient of the logits of `route_topk_`, into memory of the caller. Deterministic.

    Args:
        dlogits: (num_tokens, num_experts) float32, contiguous; overwritten.
        scores: (num_tokens, num_experts) float32, contiguous, as written by `route_topk_`.
        topk_idx: (num_tokens, num_topk) int64, contiguous; logical experts, -1 for none. An expert may come twice.
        topk_weights: (num_tokens, num_topk) float32, contiguous; weights of these experts.
        dtopk_weights: (num_tokens, num_topk) float32, contiguous; gradient of the weights.
        scoring: as given to `route_topk_`.
        routed_scaling_factor: as given to `route_topk_`.
        mask: (num_tokens,) bool; tokens that count in the sums of shares.
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
    num_tokens: int, num_experts: int, num_topk: int, scoring: str, num_seqs: int = 0, is_distinct: bool = True
) -> dict:
    """Any experts serve as the chosen ones; a few are missing, some come twice where they need not be distinct."""
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


route_topk_bwd_.cases(
    make=make,
    match=dict(rtol=1e-4, atol=1e-5),
    smoke=grid(num_tokens=[0, 6], num_experts=[64], num_topk=[6], scoring=SCORINGS, num_seqs=[0, 2])
    + grid(num_tokens=[5], num_experts=[36], num_topk=[36], scoring=['sigmoid'], num_seqs=[1], is_distinct=[False]),
    full=grid(num_tokens=[4002], num_experts=[256, 72], num_topk=[8, 40], scoring=SCORINGS, num_seqs=[0, 3])
    + grid(num_tokens=[501], num_experts=[256], num_topk=[64], scoring=SCORINGS, num_seqs=[3], is_distinct=[False]),
    bench=grid(num_tokens=[64, 4096, 16384], num_experts=[256], num_topk=[8], scoring=['sqrtsoftplus'])
    + grid(num_tokens=[4096], num_experts=[256], num_topk=[8], scoring=['sqrtsoftplus'], num_seqs=[4]),
)
