"""Backward of top-k gating: from the weights of the chosen experts to all logits.

With g[k] = s dweights[t, k], x[k] the chosen logits and u[k] their scores:

    softmax over the chosen     p = softmax(x)              dx[k] = p[k] (g[k] - sum_j g[j] p[j])
    softmax over all            p = softmax(logits[t])      the same; -p[e] sum_j g[j] p[j] for the other experts e
    others, renormalized        D = sum_j u[j]              dx[k] = u'(x[k]) / D (g[k] - sum_j g[j] u[j] / D)
    others                                                  dx[k] = u'(x[k]) g[k]

One warp owns one token: it writes what all experts get (mostly zeros), then what the chosen ones get. Memory bound: the
floor is writing dlogits, and reading logits where all of them have a gradient.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._macros import (
    EPSILON,
    WARP,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    exp_of_chosen,
    load_rows,
    peak_of_chosen,
    score,
    slope,
    softmax_of_row,
    store_rows,
    sum_of_chosen,
    width_of,
)
from tile_kernels.moe.scoring import SCORINGS, ScoringFunc
from tile_kernels.moe.topk_gate import DTYPES

# Config -------------------------------------------------------------------------------------


def choose(*static_and_size: int) -> dict:
    """Few tokens spread over the SMs."""
    return dict(num_warps=1 if static_and_size[-1] <= 1024 else 4)


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_warps=(1, 2, 4, 8)), pass_configs=WARP_PASS_CONFIGS)
def topk_gating_bwd_kernel(
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    scoring: ScoringFunc,
    renormalize: bool,
    vector_bytes: int,
    packed: bool,
    *,
    num_warps: int,
):
    """Gradient of the logits of one token per warp: what all experts get, then what the chosen ones get."""
    layout = RowLayout.of(num_experts, dtype.itemsize, vector_bytes)
    num_picks = -(-num_topk // WARP)
    is_softmax = scoring == ScoringFunc.SOFTMAX
    is_dense = is_softmax and not renormalize
    num_tokens = T.dynamic('num_tokens')
    row_stride = num_experts if packed else T.dynamic('row_stride')

    @T.prim_func
    def topk_gating_bwd(
        dweights: T.Tensor((num_tokens, num_topk), 'float32'),
        logits: T.StridedTensor((num_tokens, num_experts), (row_stride, 1), T.dtype(dtype)),
        indices: T.Tensor((num_tokens, num_topk), T.dtype(index_dtype)),
        dlogits: T.Tensor((num_tokens, num_experts), T.dtype(dtype)),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, num_warps), threads=num_warps * WARP) as pid:
            T.assume(row_stride % layout.vec == 0)
            x_local = T.alloc_local((1, layout.num_slots), 'float32')
            expert_local = T.alloc_local((num_picks,), 'int32')
            value_local = T.alloc_local((num_picks,), 'float32')
            rise_local = T.alloc_local((num_picks,), 'float32')
            dweight_local = T.alloc_local((num_picks,), 'float32')
            share_local = T.alloc_local((num_picks,), 'float32')
            peak = T.alloc_var('float32')
            total = T.alloc_var('float32')
            shared_part = T.alloc_var('float32')
            tokens_local = T.alloc_local((1,), 'int32')
            tx = T.get_thread_binding()
            tokens_local[0] = pid * num_warps + tx // WARP
            at = Place(num_warps, 1, tx, tokens_local, tokens_local[0])

            if at.token < num_tokens:
                for p in T.unroll(num_picks):
                    if p * WARP + at.lane < num_topk:
                        expert_local[p] = T.cast(indices[at.token, p * WARP + at.lane], 'int32')
                        rise_local[p] = T.cast(logits[at.token, expert_local[p]], 'float32')
                        value_local[p] = score(rise_local[p], scoring)
                        rise_local[p] = slope(rise_local[p], value_local[p], scoring)
                        dweight_local[p] = dweights[at.token, p * WARP + at.lane] * scale
                if is_dense:
                    load_rows(logits, at, layout, x_local)
                    peak, total = softmax_of_row(x_local, 0, layout.num_slots)
                elif is_softmax:
                    peak = peak_of_chosen(value_local, at, num_topk)
                if is_softmax:
                    exp_of_chosen(value_local, peak, at, num_topk)
                if renormalize:
                    total = sum_of_chosen(value_local, at, num_topk, width_of(num_topk)) + T.float32(EPSILON)

                # A normalized weight falls by its share of whatever another one rises.
                shared_part = 0.0
                if is_softmax or renormalize:
                    for p in T.unroll(num_picks):
                        if p * WARP + at.lane < num_topk:
                            if is_softmax:
                                rise_local[p] = value_local[p]
                            rise_local[p] = rise_local[p] / total
                            share_local[p] = value_local[p] / total * dweight_local[p]
                    shared_part = sum_of_chosen(share_local, at, num_topk, WARP if is_dense else width_of(num_topk))

                for s in T.unroll(layout.num_slots):
                    if is_dense:
                        x_local[0, s] = -T.exp(x_local[0, s] - peak) / total * shared_part
                    else:
                        x_local[0, s] = 0.0
                store_rows(x_local, dlogits, at, layout)
                T.sync_warp()
                for p in T.unroll(num_picks):
                    if p * WARP + at.lane < num_topk:
                        dlogits[at.token, expert_local[p]] = T.cast(
                            rise_local[p] * (dweight_local[p] - shared_part), T.dtype(dtype)
                        )

    return topk_gating_bwd


# Op -----------------------------------------------------------------------------------------


@op(outputs='dlogits')
def topk_gating_bwd(
    dweights: Tensor,
    logits: Tensor,
    indices: Tensor,
    scoring: str = 'softmax',
    renormalize: bool = True,
    routed_scaling_factor: float = 1.0,
) -> Tensor:
    """Gradient of the logits of `topk_gating`.

    Args:
        dweights: (num_tokens, top_k) float32, contiguous; gradient of the weights.
        logits: (num_tokens, num_experts), as given to `topk_gating`.
        indices: (num_tokens, top_k) int64 or int32, as returned by it; the experts of a token are distinct.
        scoring: as given to `topk_gating`.
        renormalize: as given to `topk_gating`.
        routed_scaling_factor: as given to `topk_gating`.

    Returns:
        (num_tokens, num_experts) in the dtype of logits; zero for experts that had no part in the weights.
    """
    num_tokens, num_experts = check.shape(logits, 'logits', 'num_tokens num_experts', dtype=DTYPES)
    _, top_k = check.shape(
        indices, 'indices', 'num_tokens top_k', dtype=(torch.int64, torch.int32), num_tokens=num_tokens
    )
    check.shape(dweights, 'dweights', 'num_tokens top_k', dtype=torch.float32, num_tokens=num_tokens, top_k=top_k)
    check.one_of(scoring, SCORINGS, 'scoring')
    check.contiguous(dweights, 'dweights')
    check.contiguous(indices, 'indices')
    check.unit_stride(logits, 'logits')
    check.same_device(logits=logits, indices=indices, dweights=dweights)
    dlogits = logits.new_empty(num_tokens, num_experts)
    static = (
        num_experts,
        top_k,
        logits.dtype,
        indices.dtype,
        ScoringFunc.from_str(scoring),
        renormalize,
        check.vector_bytes(logits),
        logits.is_contiguous(),
    )
    launch(topk_gating_bwd_kernel, static, dweights, logits, indices, dlogits, routed_scaling_factor)
    return dlogits


# Cases --------------------------------------------------------------------------------------


def make(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, scoring: str, renormalize: bool) -> dict:
    """Any distinct experts serve as the chosen ones."""
    logits = torch.randn(num_tokens, num_experts, dtype=dtype)
    indices = torch.rand(num_tokens, num_experts).topk(top_k).indices
    return dict(
        dweights=torch.randn(num_tokens, top_k),
        logits=logits,
        indices=indices,
        scoring=scoring,
        renormalize=renormalize,
        routed_scaling_factor=2.5,
    )


topk_gating_bwd.cases(
    make=make,
    match=dict(rtol=1e-4, atol=1e-6),
    smoke=grid(
        num_tokens=[0, 5], num_experts=[64], top_k=[6], dtype=DTYPES[:1], scoring=SCORINGS, renormalize=[False, True]
    )
    + grid(num_tokens=[3], num_experts=[36], top_k=[36], dtype=DTYPES[:1], scoring=SCORINGS, renormalize=[True]),
    full=grid(
        num_tokens=[4001],
        num_experts=[256, 72],
        top_k=[8, 40],
        dtype=DTYPES[:1],
        scoring=SCORINGS,
        renormalize=[False, True],
    ),
    bench=grid(
        num_tokens=[4096, 16384],
        num_experts=[256],
        top_k=[8],
        dtype=DTYPES[:1],
        scoring=['softmax', 'sigmoid'],
        renormalize=[True],
    ),
)
