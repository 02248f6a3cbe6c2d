"""Device code of `route_topk_`: rows that are not chosen by score, and where a chosen expert lives.

Random rows need distinct experts for their slots. A permutation of all experts, seeded by rank and token, gives every
slot its own without looking at the others: a Feistel network permutes a power of four that is at least the number of
experts, and what lands outside walks on until it lands inside.
"""

from __future__ import annotations

from typing import Any

from tile_kernels.core.lang import T, macro
from tile_kernels.moe._macros import WARP, Place, RowLayout, score, softmax_of_row, store_rows
from tile_kernels.moe.scoring import ScoringFunc

#: Replicas of an expert are taken in turns: a token is this many turns ahead of the one before it.
TURNS_PER_TOKEN = 23333
#: Rounds of the permutation; three mix, one more for good measure.
NUM_ROUNDS = 4
#: Separates the random numbers of the weights from those of the permutation.
WEIGHT_STREAM = 0x9E3779B9


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
    """A random expert below `num_places`, another one for every slot, and a random weight in [0, 1), where wanted."""
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
    """Where a token's routing is fixed, its experts are those given; one that does not exist becomes -1 without score.

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
    """The physical expert that stands for a logical one: tokens take its replicas in turns, each rank from another."""
    turn = T.cast(token, 'int64') * T.int64(TURNS_PER_TOKEN) + T.cast(ep_rank, 'int64')
    replica = T.truncmod(turn, T.cast(T.max(logical_count[expert], 1), 'int64'))
    return to_physical_map[expert, T.cast(replica, 'int32')]


@macro
def store_scores(scores, scoring: ScoringFunc, at: Place, layout: RowLayout, alive, x):
    """The scores of all experts of the rows of a warp, 0 in rows that are not alive."""
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
