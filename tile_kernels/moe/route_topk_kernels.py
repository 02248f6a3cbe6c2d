"""Kernels of `route_topk_` and its gradient: random and given experts, and physical experts of logical ones.

Random tokens need distinct experts for their slots. A permutation of all experts, seeded by rank and token, gives every
slot its own expert without looking at the others. A Feistel network permutes a power of four that is at least the
number of experts. A result that is no expert is permuted again until it is one.
"""

from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, macro
from tile_kernels.moe._macros import (
    EPSILON,
    FAST_FUNCTIONS,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    choose_warps,
    load_rows,
    score,
    softmax_of_row,
    store_rows,
    sum_of_chosen,
    sum_of_renormalized,
    sum_over,
)
from tile_kernels.moe.mask_indices_by_tp import local_index
from tile_kernels.moe.scoring import ScoringFunc
from tile_kernels.moe.topk_gate_kernels import select_topk
from tile_kernels.moe.topk_gating_kernels import Bias, ScoreRanking, choose

#: The pick after the last one: the shared experts.
SHARED = -1

#: Tokens use the replicas of an expert in turn: each token is this many turns ahead of the one before.
TURNS_PER_TOKEN = 23333

#: Rounds of the permutation: three are enough to mix, one more is a reserve.
NUM_ROUNDS = 4

#: Separates the random numbers of the weights from those of the permutation.
WEIGHT_STREAM = 0x9E3779B9

# Choices that are no ranking ----------------------------------------------------------------


def mix(x: Any) -> Any:
    """A hash of 32 bits."""
    x = (x ^ (x >> T.uint32(16))) * T.uint32(0x85EBCA6B)
    x = (x ^ (x >> T.uint32(13))) * T.uint32(0xC2B2AE35)
    return x ^ (x >> T.uint32(16))


@macro
def permuted(index, seed, half_bits):
    """`index` under a permutation of the numbers of 2 * half_bits bits."""
    left = T.alloc_var('uint32')
    right = T.alloc_var('uint32')
    mixed = T.alloc_var('uint32')
    left = index >> half_bits
    right = index & ((T.uint32(1) << half_bits) - T.uint32(1))
    for i in T.unroll(NUM_ROUNDS):
        mixed = left ^ (mix(seed + right * T.uint32(NUM_ROUNDS) + T.cast(i, 'uint32')) >> (T.uint32(32) - half_bits))
        left = right
        right = mixed
    return (left << half_bits) | right


@macro
def draw_if(wanted, slot, num_places, seed, expert, weight):
    """Where `wanted`: a random expert below `num_places`, distinct for every slot, and a random weight in [0, 1)."""
    at = T.alloc_var('uint32')
    half_bits = T.alloc_var('uint32')
    drawn = T.alloc_var('int32')
    drawn_weight = T.alloc_var('float32')
    drawn = expert
    drawn_weight = weight
    if wanted != 0:
        half_bits = T.uint32(1)
        while (num_places - T.uint32(1)) >> (half_bits + half_bits) != T.uint32(0):
            half_bits = half_bits + T.uint32(1)
        at = permuted(T.cast(slot, 'uint32'), seed, half_bits)
        while at >= num_places:
            at = permuted(at, seed, half_bits)
        drawn = T.cast(at, 'int32')
        bits = mix(mix(seed ^ T.uint32(WEIGHT_STREAM)) + T.cast(slot, 'uint32')) >> T.uint32(8)
        drawn_weight = T.cast(bits, 'float32') * T.float32(2**-24)
    return drawn, drawn_weight


@macro
def take_given(fix_routing_mask, topk_idx, logits, scoring: ScoringFunc, num_topk: int, at: Place, expert, value):
    """Use the given experts of tokens with fixed routing; a number that is no expert becomes -1 without score.

    `expert` and `value` are those of `select_topk`.
    """
    if fix_routing_mask[at.token] != T.uint8(0):
        for p in T.unroll(-(-num_topk // WARP)):
            if p * WARP + at.sublane < num_topk:
                given = topk_idx[at.token, p * WARP + at.sublane]
                expert[p] = -1
                value[p] = -T.infinity('float32') if scoring == ScoringFunc.SOFTMAX else T.float32(0)
                if given >= T.int64(0) and given < T.cast(logits.shape[1], 'int64'):
                    expert[p] = T.cast(given, 'int32')
                    value[p] = score(T.cast(logits[at.token, expert[p]], 'float32'), scoring)


@macro
def count_places(logical_count, num_logical: int, lane):
    """Number of physical experts, by all lanes of a warp."""
    total = T.alloc_var('int32')
    total = 0
    for i in T.serial(-(-num_logical // WARP)):
        if i * WARP + lane < num_logical:
            total = total + logical_count[i * WARP + lane]
    return T.warp_reduce_sum(total)


@macro
def place_of(expert, token, to_physical_map, logical_count, ep_rank):
    """The physical expert of a logical one: tokens use its replicas in turn, and each rank starts at another."""
    turn = T.cast(token, 'int64') * T.int64(TURNS_PER_TOKEN) + T.cast(ep_rank, 'int64')
    replica = T.truncmod(turn, T.cast(T.max(logical_count[expert], 1), 'int64'))
    return to_physical_map[expert, T.cast(replica, 'int32')]


@macro
def store_scores(scores, scoring: ScoringFunc, at: Place, layout: RowLayout, alive, x):
    """Store the scores of all experts for the rows of a warp, 0 in rows that are not alive."""
    value = T.alloc_local((at.rows, layout.num_slots), 'float32')
    for r in range(at.rows):
        if scoring == ScoringFunc.SOFTMAX:
            peak, total = softmax_of_row(x, r, layout.num_slots)
            for s in T.unroll(layout.num_slots):
                value[r, s] = T.exp(x[r, s] - peak) / total
        else:
            for s in T.unroll(layout.num_slots):
                value[r, s] = score(x[r, s], scoring)
        for s in T.unroll(layout.num_slots):
            if alive[r] == 0:
                value[r, s] = 0.0
    store_rows(value, scores, at, layout)


# Kernels ------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_warps=(1, 2, 4, 8), rows=(1, 2), early=EARLY), pass_configs=WARP_PASS_CONFIGS)
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
    early: bool = False,
):
    """Experts, weights and physical experts of one or two tokens per warp; `given` names the optional tensors."""
    layout = RowLayout.of(num_experts, dtype.itemsize, vector_bytes)
    biased = 'bias' in given or 'image' in given
    ranking = ScoreRanking.of(layout, num_topk, scoring, biased, num_groups, num_topk_groups)
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
            if early:
                begin_early()
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

                # Flags of the tokens: image, random, masked out.
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
                all_bias = Bias(biases[0], biases[1], image_rows, image_part)
                select_topk(ranking, logits, all_bias, at, x_local, expert_local, value_local)
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


def slope_of_score(u, scoring: ScoringFunc):
    """Derivative of a score, from the score itself."""
    if scoring == ScoringFunc.SIGMOID:
        return u * (T.float32(1) - u)
    if scoring == ScoringFunc.SQRTSOFTPLUS:
        # (1 - exp(-v)) / v loses precision for small v; there a short series is exact enough.
        v = u * u
        series = T.float32(1)
        for i in (7, 6, 5, 4, 3, 2):
            series = T.float32(1) - v * T.float32(1 / i) * series
        steep = (T.float32(1) - T.exp(-v)) / u
        return T.float32(0.5) * T.Select(v < T.float32(0.25), u * series, steep)
    return u if scoring == ScoringFunc.SOFTMAX else T.float32(1)


@macro
def gather_equal(expert, route, num_topk: int, lane, total, is_first):
    """Sum the gradients of all slots with the same expert, in the order of slots; the first such slot gets the sum."""
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


@kernel(choose=choose_warps, space=dict(num_warps=(1, 2, 4, 8)), pass_configs=WARP_PASS_CONFIGS)
def route_topk_bwd_kernel(
    num_experts: int, num_topk: int, scoring: ScoringFunc, is_dense: bool, vector_bytes: int, *, num_warps: int
):
    """Gradient of the logits of one token per warp: first of all experts, then of the chosen ones."""
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
