"""Kernels of `topk_gating` and its gradient, and the ranking by score, bias and group."""

from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, macro
from tile_kernels.moe._macros import (
    EPSILON,
    FAST_FUNCTIONS,
    LOWEST,
    NAN_KEY,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    choose_warps,
    estimate,
    estimate_error,
    exp_of_chosen,
    from_order_key,
    load_rows,
    order_key,
    peak_of_chosen,
    rank_key,
    score,
    slope,
    softmax_of_row,
    store_rows,
    sum_of_chosen,
    sum_of_renormalized,
    width_of,
)
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.topk_gate_kernels import Ranking, select_topk
from tile_kernels.moe.topk_sum_and_topk_group_idx import rank_of_group, sum_groups

#: Margin of cuts through logits, and the logits where it lowers scores by several units in the last place.
LOWERED = 2.0**-8
STEEP = {ScoringFunc.SIGMOID: (-80.0, 8.0), ScoringFunc.SQRTSOFTPLUS: (-80.0, 1024.0)}

# Config -------------------------------------------------------------------------------------


def choose(num_experts: int, *static_and_size: Any) -> dict:
    """Few tokens spread over the SMs, one per block. With many tokens per SM, a warp ranks two rows at once."""
    num_groups, num_topk_groups, _, _, size = static_and_size[-5:]
    early = is_short(4 * size * num_experts)
    if size <= 1024:
        return dict(num_warps=1, rows=1, early=early)
    grouped = num_topk_groups < num_groups  # then a warp has one row, and an SM holds few blocks of one warp
    num_warps, rows = (1, 2) if size >= 3072 and not grouped else (4, 1)
    return dict(num_warps=num_warps, rows=rows, early=early)


# Groups -------------------------------------------------------------------------------------


@macro
def keep_best_groups(layout: RowLayout, num_groups: int, num_topk_groups: int, at: Place, keys):
    """Drop experts outside the `num_topk_groups` groups whose two best scores have the largest sum."""
    group_size = layout.num_experts // num_groups
    totals = T.alloc_shared((at.num_warps, num_groups), 'int32')
    kept = T.alloc_shared((at.num_warps, num_groups), 'int32')
    sum_groups(layout, num_groups, min(group_size, 2), at, keys, totals)
    for i in T.serial(-(-num_groups // WARP)):
        if i * WARP + at.lane < num_groups:
            rank = rank_of_group(i * WARP + at.lane, num_groups, at, totals)
            kept[at.warp, i * WARP + at.lane] = T.Select(rank < num_topk_groups, 1, 0)
    T.sync_warp()
    for s in T.unroll(layout.num_slots):
        expert = layout.expert(s, at.lane)
        if expert < layout.num_experts and kept[at.warp, expert // group_size] == 0:
            keys[s] = LOWEST


@macro
def keep_best_estimates(layout: RowLayout, num_groups: int, num_topk_groups: int, error: float, at: Place, x):
    """The same for the first row of `x`, estimates that are off by up to `error`; dropped ones become -inf.

    Returns whether the result is certain. Then the number of groups is right, and the gap between the last sum kept and
    the first one dropped is larger than both errors.
    """
    group_size = layout.num_experts // num_groups
    totals = T.alloc_shared((at.num_warps, num_groups), 'float32')
    kept = T.alloc_shared((at.num_warps, num_groups), 'int32')
    scores = T.alloc_local((layout.num_slots,), 'float32')
    last_kept = T.alloc_var('float32')
    first_dropped = T.alloc_var('float32')
    num_kept = T.alloc_var('int32')
    rank = T.alloc_var('uint32')
    for s in T.unroll(layout.num_slots):
        scores[s] = T.max(x[0, s], -T.infinity('float32'))  # NaN must not be chosen
    sum_groups(layout, num_groups, min(group_size, 2), at, scores, totals)
    last_kept = T.infinity('float32')
    first_dropped = -T.infinity('float32')
    num_kept = 0
    for i in T.serial(-(-num_groups // WARP)):
        if i * WARP + at.lane < num_groups:
            total = totals[at.warp, i * WARP + at.lane]
            rank = T.uint32(0)
            for g in T.unroll(num_groups, unroll_factor=16):  # cheaper than a comparison
                rank = rank + (T.reinterpret(total - totals[at.warp, g], 'uint32') >> T.uint32(31))
            kept[at.warp, i * WARP + at.lane] = 0
            if rank < T.uint32(num_topk_groups):
                kept[at.warp, i * WARP + at.lane] = 1
                num_kept = num_kept + 1
                last_kept = T.min(last_kept, total)
            else:
                first_dropped = T.max(first_dropped, total)
    T.sync_warp()
    for s in T.unroll(layout.num_slots):
        expert = layout.expert(s, at.lane)
        if expert < layout.num_experts and kept[at.warp, expert // group_size] == 0:
            x[0, s] = -T.infinity('float32')
    level = from_order_key(T.warp_reduce_min(order_key(last_kept)))
    gap = level - from_order_key(T.warp_reduce_max(order_key(first_dropped)))
    is_wide = gap > T.float32(4 * error) + T.abs(level) * T.float32(2**-19)
    return is_wide and T.warp_reduce_sum(num_kept) == num_topk_groups


# Ranking ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bias:
    """Bias of the scores of a token; image tokens may have their own bias."""

    plain: Any = None
    image: Any = None
    image_rows: Any = None  # for every row: is its token an image token?
    image_part: Any = None  # the same for the token of the part

    def of_row(self, expert: Any, row: Any) -> Any:
        """Bias of an expert for the token of a row."""
        return self._of(expert, self.image_rows[row] != 0 if self.image is not None else None)

    def of_part(self, expert: Any) -> Any:
        """Bias of an expert for the token of the part."""
        return self._of(expert, self.image_part != 0 if self.image is not None else None)

    def _of(self, expert: Any, is_image: Any) -> Any:
        plain = T.float32(0) if self.plain is None else self.plain[expert]
        return plain if is_image is None else T.if_then_else(is_image, self.image[expert], plain)


@dataclass(frozen=True)
class ScoreRanking(Ranking):
    """Rank by score, plus bias, and in the best groups only."""

    scoring: ScoringFunc = ScoringFunc.IDENTITY
    num_groups: int = 1
    num_topk_groups: int = 1

    @classmethod
    def of(
        cls,
        layout: RowLayout,
        num_topk: int,
        scoring: ScoringFunc,
        has_bias: bool,
        num_groups: int,
        num_topk_groups: int,
    ) -> 'ScoreRanking':
        """The ranking with its flags."""
        grouped = num_topk_groups < num_groups
        has_zeros = scoring in (ScoringFunc.SOFTMAX, ScoringFunc.IDENTITY)
        by_logit = has_zeros and not has_bias
        deferred = not (by_logit or has_bias or grouped)
        estimated = (has_bias or grouped) and not has_zeros
        flags = (by_logit, has_zeros, has_bias, grouped, deferred, estimated)
        return cls(layout, num_topk, *flags, scoring, num_groups, num_topk_groups)

    @property
    def error(self) -> float:
        """Largest error of what is cut. Sums of groups need sharper estimates than a cut."""
        return estimate_error(self.scoring, self.grouped) if self.estimated else 0.0

    @property
    def margin(self) -> float:
        """How far a cut is lowered: the score and the estimate that made the cut are both off by up to `error`."""
        return 2 * self.error if self.estimated else LOWERED

    @property
    def steep(self) -> tuple[float, float]:
        """Between these logits, lowering a cut by the margin lowers scores by several units in the last place."""
        return STEEP[self.scoring]

    def score(self, logit: Any) -> Any:
        """Score of a logit; softmax ranks by the logit itself."""
        return score(logit, self.scoring)

    def keep_best_groups(self, at: Place, keys: Any) -> None:
        """Drop the experts of all groups but the best."""
        keep_best_groups(self.layout, self.num_groups, self.num_topk_groups, at, keys)

    @macro
    def lower_cuts(self, at: Place, cut):
        """Lower cuts by the margin, so that every expert that may be as good as the last candidate is one, too.

        The sum of an estimate and its bias is rounded, which adds to the margin.
        """
        for r in T.unroll(at.rows):
            level = from_order_key(cut[r])
            cut[r] = order_key(level - (T.float32(self.margin) + T.abs(level) * T.float32(2**-20)))

    @macro
    def level_of_part(self, at: Place, cuts):
        """Where the row of the part was cut."""
        level = T.alloc_var('float32')
        for r in T.unroll(at.rows):
            if at.part == r:
                level = from_order_key(cuts[r])
        return level

    @macro
    def rank_rows(self, bias: Bias, at: Place, x):
        """Turn the logits of all rows into what cuts go through; returns whether the groups kept are certain.

        With groups a warp has one row.
        """
        layout, num_slots = self.layout, self.layout.num_slots
        width = layout.float_vec
        keys = T.alloc_local((num_slots,), 'int32')
        bias_local = T.alloc_local((num_slots,), 'float32')
        certain = T.alloc_var('bool')
        certain = True
        if self.has_bias and bias.image is None:
            for i in T.unroll(num_slots // width):
                if layout.expert(i * width, at.lane) < layout.num_experts:
                    for j in T.vectorized(width):
                        bias_local[i * width + j] = bias.plain[layout.expert(i * width, at.lane) + j]
        for s in T.unroll(num_slots):
            if layout.expert(s, at.lane) < layout.num_experts:
                for r in T.unroll(at.rows):
                    if self.estimated:
                        x[r, s] = estimate(x[r, s], self.scoring, self.grouped)
                    else:
                        x[r, s] = self.score(x[r, s])
                    if self.has_bias:
                        if bias.image is None:
                            x[r, s] = x[r, s] + bias_local[s]
                        else:
                            x[r, s] = x[r, s] + bias.of_row(layout.expert(s, at.lane), r)
        if self.estimated and self.grouped:
            certain = keep_best_estimates(layout, self.num_groups, self.num_topk_groups, self.error, at, x)
        elif self.grouped:
            for s in T.unroll(num_slots):
                keys[s] = LOWEST
                if layout.expert(s, at.lane) < layout.num_experts:
                    keys[s] = rank_key(x[0, s])
            self.keep_best_groups(at, keys)
            for s in T.unroll(num_slots):
                if keys[s] < NAN_KEY:  # dropped; the simplifier cannot compare with the literal LOWEST
                    x[0, s] = -T.infinity('float32')
        return certain


# Kernels ------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_warps=(1, 2, 4, 8), rows=(1, 2), early=EARLY), pass_configs=WARP_PASS_CONFIGS)
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
    early: bool = False,
):
    """Experts and weights of one or two tokens per warp."""
    layout = RowLayout.of(num_experts, dtype.itemsize, vector_bytes)
    ranking = ScoreRanking.of(layout, num_topk, scoring, biased, num_groups, num_topk_groups)
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
            if early:
                begin_early()
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


@kernel(choose=choose_warps, space=dict(num_warps=(1, 2, 4, 8)), pass_configs=WARP_PASS_CONFIGS)
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
    """Gradient of the logits of one token per warp: first of all experts, then of the chosen ones."""
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

                # Normalized weights depend on each other: this term is common to all of them.
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
