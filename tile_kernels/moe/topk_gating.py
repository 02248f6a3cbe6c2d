"""Top-k gating: choose the experts of every token and weigh them, with gradients.

    u[t, e] = score of logits[t, e]                softmax over e, or of one logit: sigmoid, sqrt(softplus), identity
    r[t, e] = u[t, e] + bias[e]                    what ranks; softmax ranks by logits[t, e] + bias[e]
    i[t, :] = the top_k experts of largest r, best first, in the num_topk_groups groups of largest top-2 sum
    w[t, k] = s u[t, i[t, k]] / sum_j u[t, i[t, j]]       renormalized; otherwise s u[t, i[t, k]]

One warp owns one token or two and keeps their logits in registers, so logits are read once; `_selection` has the
choice. Where scores rise with logits only the few candidates are scored. Memory bound for many tokens: the floor is
reading logits and writing weights and indices.
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
    FAST_FUNCTIONS,
    WARP,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    exp_of_chosen,
    load_rows,
    softmax_of_row,
    sum_of_renormalized,
)
from tile_kernels.moe._selection import Bias, Ranking, select_topk
from tile_kernels.moe.scoring import SCORINGS, ScoringFunc
from tile_kernels.moe.topk_gate import DTYPES, MAX_EXPERTS, MAX_TOPK
from tile_kernels.moe.topk_gating_bwd import topk_gating_bwd

# Config -------------------------------------------------------------------------------------


def choose(*static_and_size: object) -> dict:
    """Few tokens spread over the SMs, one per block; where many are left for each, a warp ranks two rows at once."""
    num_groups, num_topk_groups, _, _, size = static_and_size[-5:]
    if size <= 1024:
        return dict(num_warps=1, rows=1)
    grouped = num_topk_groups < num_groups  # then a warp has one row, and SMs hold few blocks of a single warp
    return dict(num_warps=1, rows=2) if size >= 3072 and not grouped else dict(num_warps=4, rows=1)


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_warps=(1, 2, 4, 8), rows=(1, 2)), pass_configs=WARP_PASS_CONFIGS)
def topk_gating_kernel(
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
    scoring: ScoringFunc,
    renormalize: bool,
    biased: bool,
    num_groups: int,
    num_topk_groups: int,
    vector_bytes: int,
    packed: bool,
    *,
    num_warps: int,
    rows: int,
):
    """Choice and weights of one or two tokens per warp."""
    layout = RowLayout.of(num_experts, dtype.itemsize, vector_bytes)
    ranking = Ranking(layout, num_topk, scoring, biased, num_groups, num_topk_groups)
    is_softmax = scoring == ScoringFunc.SOFTMAX
    rows = max(ranking.rows_by_cut(rows), 1)
    num_tokens = T.dynamic('num_tokens')
    row_stride = num_experts if packed else T.dynamic('row_stride')

    @T.prim_func
    def topk_gating(
        logits: T.StridedTensor((num_tokens, num_experts), (row_stride, 1), T.dtype(dtype)),
        bias: T.Tensor((num_experts,), 'float32'),
        weights: T.Tensor((num_tokens, num_topk), 'float32'),
        indices: T.Tensor((num_tokens, num_topk), T.dtype(index_dtype)),
        scale: T.float32,
    ):
        with T.Kernel(T.ceildiv(num_tokens, num_warps * rows), threads=num_warps * WARP) as pid:
            T.assume(row_stride % layout.vec == 0)
            T.import_source(FAST_FUNCTIONS)
            x_local = T.alloc_local((rows, layout.num_slots), 'float32')
            expert_local = T.alloc_local((ranking.num_picks,), 'int32')
            value_local = T.alloc_local((ranking.num_picks,), 'float32')
            peak = T.alloc_var('float32')
            total = T.alloc_var('float32')
            tokens_local = T.alloc_local((rows,), 'int32')
            token = T.alloc_var('int32')
            tx = T.get_thread_binding()
            at = Place(num_warps, rows, tx, tokens_local, token)
            first_token = (pid * num_warps + at.warp) * rows

            if first_token < num_tokens:
                for r in T.unroll(rows):
                    tokens_local[r] = T.min(first_token + r, num_tokens - 1)
                token = T.min(first_token + at.part, num_tokens - 1)
                load_rows(logits, at, layout, x_local)
                total = 1.0
                if is_softmax and not renormalize:
                    for r in range(rows):
                        row_peak, row_total = softmax_of_row(x_local, r, layout.num_slots)
                        if at.part == r:
                            peak = row_peak
                            total = row_total
                select_topk(ranking, logits, Bias(bias), at, x_local, expert_local, value_local)
                if renormalize:
                    total = sum_of_renormalized(value_local, scoring, at, num_topk)
                elif is_softmax:
                    exp_of_chosen(value_local, peak, at, num_topk)
                for p in T.unroll(ranking.num_picks):
                    if p * WARP + at.sublane < num_topk and first_token + at.part < num_tokens:
                        weights[token, p * WARP + at.sublane] = value_local[p] / total * scale
                        indices[token, p * WARP + at.sublane] = T.cast(expert_local[p], T.dtype(index_dtype))

    return topk_gating


# Op -------------------------------------------------------------------------------------------


@op(outputs='weights indices', backward=topk_gating_bwd)
def topk_gating(
    logits: Tensor,
    top_k: int = 8,
    *,
    scoring: str = 'softmax',
    renormalize: bool = True,
    bias: Tensor | None = None,
    num_groups: int | None = None,
    num_topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> tuple[Tensor, Tensor]:
    """Choose `top_k` experts per token and weigh them; differentiable in `logits`.

    Experts come in descending order of their score (softmax: of their logit) plus bias; equal ones take the smaller
    expert first and NaN ranks below everything, -inf included.

    Args:
        logits: (num_tokens, num_experts) float32, bfloat16 or float16; rows may be strided; 1 to 4096 experts.
        top_k: experts per token, from 1 to min(num_experts, 64).
        scoring: 'softmax' over the experts, or 'sigmoid', 'sqrtsoftplus', 'identity' of every logit.
        renormalize: whether the weights of a token are divided by their sum; for softmax this is the softmax over the
            chosen logits.
        bias: (num_experts,) float32; moves the choice, not the weights.
        num_groups: number of equal groups of neighbouring experts; only experts of the best groups are chosen.
        num_topk_groups: groups that take part: those with the largest sum of their two best scores (one, if a group
            has one expert), the first among equals. Needs num_groups.
        routed_scaling_factor: multiplies the weights.
        index_dtype: torch.int64 or torch.int32.

    Returns:
        weights (num_tokens, top_k) float32 and indices (num_tokens, top_k).
    """
    num_tokens, num_experts = check.shape(logits, 'logits', 'num_tokens num_experts', dtype=DTYPES)
    check.at_least(top_k, 1, 'top_k')
    check.at_most(top_k, min(num_experts, MAX_TOPK), 'top_k')
    check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
    check.one_of(scoring, SCORINGS, 'scoring')
    check.one_of(index_dtype, (torch.int64, torch.int32), 'index_dtype')
    check.unit_stride(logits, 'logits')
    if bias is not None:
        check.shape(bias, 'bias', 'num_experts', dtype=torch.float32, num_experts=num_experts)
        check.contiguous(bias, 'bias')
        check.same_device(logits=logits, bias=bias)
    num_groups, num_topk_groups = check_groups(num_experts, top_k, num_groups, num_topk_groups)
    weights = logits.new_empty(num_tokens, top_k, dtype=torch.float32)
    indices = logits.new_empty(num_tokens, top_k, dtype=index_dtype)
    static = (
        num_experts,
        top_k,
        logits.dtype,
        index_dtype,
        ScoringFunc.from_str(scoring),
        renormalize,
        bias is not None,
        num_groups,
        num_topk_groups,
        check.vector_bytes(logits, bias),
        logits.is_contiguous(),
    )
    launch(topk_gating_kernel, static, logits, bias, weights, indices, routed_scaling_factor)
    return weights, indices


def check_groups(
    num_experts: int, top_k: int, num_groups: int | None, num_topk_groups: int | None, name: str = 'top_k'
) -> tuple[int, int]:
    """Groups as the kernels take them: one group of all experts where none are asked for."""
    if num_groups is None and num_topk_groups is None:
        return 1, 1
    if num_groups is None or num_topk_groups is None:
        check.fail('num_groups', 'must come with num_topk_groups', f'{num_groups} and {num_topk_groups}')
    check.integer(num_groups, 'num_groups', 1)
    check.equal(num_experts % num_groups, 0, 'num_experts % num_groups')
    check.integer(num_topk_groups, 'num_topk_groups', 1)
    check.at_most(num_topk_groups, num_groups, 'num_topk_groups')
    check.at_most(top_k, num_experts // num_groups * num_topk_groups, name)
    return num_groups, num_topk_groups


# Cases --------------------------------------------------------------------------------------


def make(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, scoring: str, **options: object) -> dict:
    """Logits on a grid: scores either tie or differ by more than exp and log can be off. Ties are rare in models, so
    what is timed has none: evenly spread logits in random order.
    """
    biased = options.pop('biased', False)
    if options.pop('ties', True):
        logits = torch.randn(num_tokens, num_experts).mul(64).round().div(64).to(dtype)
        logits = logits.abs() if scoring == 'identity' else logits  # weights of a sum near zero have no meaning
    else:
        logits = torch.rand(num_tokens, num_experts).argsort(-1).sub(num_experts // 2).div(num_experts / 8).to(dtype)
    bias = torch.randn(num_experts).mul(4).round().div(64) if biased else None
    return dict(logits=logits, top_k=top_k, scoring=scoring, bias=bias, **options)


FLOAT32, PAIR = DTYPES[:1], dict(num_experts=[256], top_k=[8])
GROUPS = dict(num_groups=[8], num_topk_groups=[3], routed_scaling_factor=[2.5], index_dtype=[torch.int32])
BOTH = dict(renormalize=[False, True])
DISTINCT = dict(ties=[False])

topk_gating.cases(
    make=make,
    match=dict(rtol=2e-6, atol=1e-7),
    smoke=grid(num_tokens=[0, 5], **PAIR, dtype=FLOAT32, scoring=SCORINGS)
    + grid(num_tokens=[3], num_experts=[72], top_k=[6], dtype=DTYPES, scoring=SCORINGS, renormalize=[False])
    + grid(num_tokens=[3], num_experts=[64], top_k=[6], dtype=FLOAT32, scoring=SCORINGS, biased=[True])
    + grid(num_tokens=[3], num_experts=[64], top_k=[6], dtype=FLOAT32, scoring=SCORINGS[:2], **GROUPS),
    full=grid(num_tokens=[4001], **PAIR, dtype=DTYPES, scoring=SCORINGS, biased=[False, True], **BOTH)
    + grid(num_tokens=[1001], num_experts=[36, 130, 1000, 4096], top_k=[1, 17, 36], dtype=FLOAT32, scoring=SCORINGS)
    + grid(num_tokens=[1001], **PAIR, dtype=FLOAT32, scoring=SCORINGS, biased=[False, True], **GROUPS),
    bench=grid(num_tokens=[1, 64, 4096, 16384], **PAIR, dtype=FLOAT32, scoring=SCORINGS, **DISTINCT)
    + grid(num_tokens=[16384], **PAIR, dtype=[torch.bfloat16], scoring=['softmax', 'sigmoid'], **DISTINCT)
    + grid(
        num_tokens=[4096, 16384], **PAIR, dtype=FLOAT32, scoring=['sigmoid', 'sqrtsoftplus'], biased=[True], **DISTINCT
    )
    + grid(num_tokens=[8192], num_experts=[128], top_k=[6], dtype=FLOAT32, scoring=['softmax'], **DISTINCT)
    + grid(num_tokens=[4001], num_experts=[72], top_k=[6], dtype=FLOAT32, scoring=['softmax'], **DISTINCT)
    + grid(num_tokens=[4096], num_experts=[384], top_k=[8], dtype=FLOAT32, scoring=['softmax'], **DISTINCT),
)
