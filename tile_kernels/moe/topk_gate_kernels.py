"""Kernel of `topk_gate`, and the top-k of one or two rows by one warp that all gates use.

Two methods find the k best scores of a row:

    by cut      The k-th largest lane maximum is the cut: at least k scores reach it, and few more do. These candidates
                are gathered, one per lane. The rank of a candidate is the number of candidates before it. Half a warp
                is enough, so the other half ranks another row.
                Only candidates are scored. The cut goes through logits where scores rise with logits. With a bias
                it goes through estimates of the scores and is lowered by their error.
    by rounds   k times, the warp finds the best score that is left. It is slower and handles every row. It is used
                where a cut does not separate (ties, too few finite scores) and for large k.

Scores are compared as integer keys, see `_macros`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, macro
from tile_kernels.moe._macros import (
    LOWEST,
    WARP_PASS_CONFIGS,
    Place,
    RowLayout,
    from_order_key,
    load_rows,
    order_key,
    rank_key,
)

#: Logits per lane up to which two rows fit into the registers of a warp.
MAX_SLOTS_OF_TWO = 32

# Config -------------------------------------------------------------------------------------


def choose(num_experts: int, num_topk: int, dtype: torch.dtype, vector_bytes: int, packed: bool, size: int) -> dict:
    """Few tokens spread over the SMs, one per block. From two waves of blocks on, a warp ranks two rows at once."""
    early = is_short(size * num_experts * dtype.itemsize)
    if size <= 1024:
        return dict(num_warps=1, rows=1, early=early)
    num_warps, rows = (1, 2) if size >= 8192 else (4, 1)
    return dict(num_warps=num_warps, rows=rows, early=early)


# Ranking ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranking:
    """Which experts of a row are chosen: the `num_topk` of largest logit. `topk_gating_kernels` ranks by score."""

    layout: RowLayout
    num_topk: int
    by_logit: bool = True  # the logit itself ranks
    has_zeros: bool = True  # what ranks may be -0
    has_bias: bool = False  # a bias is added to scores
    grouped: bool = False  # only the best groups take part
    deferred: bool = False  # the cut goes through logits, and only candidates are scored: scores rise with logits
    estimated: bool = False  # the cut goes through estimates, and only candidates are scored: exact scores are slow

    @property
    def num_picks(self) -> int:
        """Chosen experts per lane."""
        return -(-self.num_topk // WARP)

    def rows_by_cut(self, rows: int) -> int:
        """How many of `rows` rows a warp ranks at once; 0 if most cuts would leave too many candidates."""
        if self.num_topk > WARP // 2:
            return 0
        fits = self.num_topk + 4 <= WARP // rows and self.layout.num_slots <= MAX_SLOTS_OF_TWO
        return rows if fits and not self.grouped else 1

    def score(self, logit: Any) -> Any:
        """Score of a logit."""
        return logit


# By cut -------------------------------------------------------------------------------------


@macro
def find_cuts(x, at: Place, num_slots: int, rounds: int, cut):
    """For every row, the key of the `rounds`-th largest distinct lane maximum; NaN is ignored."""
    top = T.alloc_local((at.rows,), 'float32')
    key = T.alloc_local((at.rows,), 'int32')
    for r in T.unroll(at.rows):
        top[r] = -T.infinity('float32')
        for s in T.unroll(num_slots):
            top[r] = T.max(top[r], x[r, s])
        key[r] = order_key(top[r])
    for _ in T.unroll(rounds):
        for r in T.unroll(at.rows):
            cut[r] = T.warp_reduce_max(key[r])
            if key[r] == cut[r]:
                key[r] = LOWEST
    for r in T.unroll(at.rows):
        cut[r] = T.Select(cut[r] == 0, -1, cut[r])  # -0 - (+0) would look like a value below the cut


@macro
def gather(x, cut, at: Place, layout: RowLayout, found, count):
    """List the slots that reach the cut of their row in `found`, in any order. `count` them; stop after 32."""
    left = T.alloc_local((at.rows,), 'uint32')
    votes = T.alloc_local((at.rows,), 'uint32')
    waiting = T.alloc_var('uint32')
    lanes_below = (T.uint32(1) << T.cast(at.lane, 'uint32')) - T.uint32(1)
    for r in T.unroll(at.rows):
        count[r] = 0
    for word in (*range(-(-layout.num_slots // 32)),):
        slots = min(layout.num_slots - word * 32, 32)
        waiting = T.uint32(0)
        for r in T.unroll(at.rows):
            left[r] = T.uint32(0)
            for s in T.unroll(slots):  # the sign says which slots are below; a NaN has none and ranks last
                distance = T.reinterpret(x[r, word * 32 + s] - from_order_key(cut[r]), 'uint32')
                left[r] = append_sign(left[r], distance)
            left[r] = ~left[r] & T.uint32((1 << slots) - 1)
            votes[r] = T.cast(T.ballot(left[r] != T.uint32(0)), 'uint32')
            waiting = waiting | votes[r]
        while waiting != T.uint32(0):
            waiting = T.uint32(0)
            for r in T.unroll(at.rows):
                bit = 31 - T.cast(T.clz(left[r]), 'int32')
                place = count[r] + T.cast(T.popcount(votes[r] & lanes_below), 'int32')
                # The last 32 entries take the writes of lanes without a slot, so that no lane branches.
                place_or_dump = T.Select(left[r] != T.uint32(0), place, found.shape[2] - WARP + at.lane)
                found[at.warp, r, place_or_dump] = (word * 32 + slots - 1 - bit) * WARP + at.lane
                left[r] = left[r] & ~(T.uint32(1) << T.cast(bit, 'uint32'))
                count[r] = count[r] + T.cast(T.popcount(votes[r]), 'int32')
                if count[r] > WARP:
                    left[r] = T.uint32(0)
                votes[r] = T.cast(T.ballot(left[r] != T.uint32(0)), 'uint32')
                waiting = waiting | votes[r]


def append_sign(bits, word):
    """`bits` shifted left by one, plus the uppermost bit of `word`."""
    return T.call_extern('uint32', '__funnelshift_l', word, bits, T.uint32(1))


@macro
def count_larger(mine, count, likely: int, at: Place, tickets):
    """How many of the first `count` lanes of a part hold a larger number; equal numbers do not count."""
    rank = T.alloc_var('uint32')
    tickets[at.warp, at.lane] = mine
    T.sync_warp()
    rank = T.uint32(0)
    for c in T.unroll(likely):  # cheaper than a comparison
        rank = rank + (T.reinterpret(mine - tickets[at.warp, at.part * at.width + c], 'uint32') >> T.uint32(31))
    for c in T.unroll(likely, count, unroll_factor=1):
        rank = rank + (T.reinterpret(mine - tickets[at.warp, at.part * at.width + c], 'uint32') >> T.uint32(31))
    return T.cast(rank, 'int32')


@macro
def count_better(key, expert, count, at: Place, tickets):
    """How many of the first `count` lanes of a part hold a larger key, or an equal key of a smaller expert."""
    rank = T.alloc_var('int32')
    mine = T.alloc_var('int64')
    mine = (T.cast(key, 'int64') << T.int64(32)) | T.cast(0x7FFFFFFF - expert, 'int64')
    tickets[at.warp, at.lane] = mine
    T.sync_warp()
    rank = 0
    for c in T.unroll(0, count, unroll_factor=1):
        rank = rank + T.Select(tickets[at.warp, at.part * at.width + c] > mine, 1, 0)
    return rank


@macro
def select_by_cut(ranking: Ranking, logits, bias: Any, at: Place, x, expert, value):
    """Choose by cuts through the rows of `x`. Returns a mask of the lanes whose row the cut does not separate."""
    num_topk, first = ranking.num_topk, at.part * at.width
    found = T.alloc_shared((at.num_warps, at.rows, 3 * WARP), 'int32')
    values = T.alloc_shared((at.num_warps, WARP), 'float32')
    numbers = T.alloc_shared((at.num_warps, WARP), 'float32')
    tickets = T.alloc_shared((at.num_warps, WARP), 'int64')
    cuts = T.alloc_local((at.rows,), 'int32')
    counts = T.alloc_local((at.rows,), 'int32')
    count = T.alloc_var('int32')
    source = T.alloc_var('int32')
    rank = T.alloc_var('int32')
    ranked = T.alloc_var('float32')
    settled = T.alloc_var('bool')
    find_cuts(x, at, ranking.layout.num_slots, num_topk, cuts)
    if ranking.estimated or ranking.deferred:
        ranking.lower_cuts(at, cuts)
    gather(x, cuts, at, ranking.layout, found, counts)
    T.sync_warp()
    count = 0  # one byte per row, read by a shift: an array indexed by the part would leave the registers
    for r in T.unroll(at.rows):
        separates = T.isfinite(from_order_key(cuts[r])) and counts[r] <= at.width
        count = count | (T.Select(separates, counts[r], 0) << (8 * r))
    count = (count >> (8 * at.part)) & 0xFF

    source = T.max(T.min(at.sublane, count - 1), 0)
    if count > 0:
        source = found[at.warp, at.part, source]
    expert[0] = ranking.layout.expert(source >> 5, source & (WARP - 1))
    value[0] = ranking.score(T.cast(logits[at.token, expert[0]], 'float32'))
    ranked = value[0]
    if ranking.has_bias:
        ranked = ranked + bias.of_part(expert[0])
    if ranking.has_zeros:
        ranked = T.Select(ranked == T.float32(0), T.float32(0), ranked)  # -0 equals +0
    likely = min(num_topk + 3, at.width)
    mine = T.Select(at.sublane < count, ranked, -T.infinity('float32'))
    rank = count_larger(mine, count, likely, at, numbers)
    wanted = T.Select(at.sublane < count, T.uint32(1) << T.cast(first + rank, 'uint32'), T.uint32(0))
    taken = (T.warp_reduce_bitor(wanted) >> T.cast(first, 'uint32')) & T.uint32((1 << at.width) - 1)
    clash = T.cast(T.popcount(taken), 'int32') != count or (at.sublane < count and not T.isfinite(ranked))
    if T.ballot(clash) != T.uint64(0):  # equal scores have equal ranks: put the smaller expert first
        key = T.Select(at.sublane < count, rank_key(ranked), LOWEST)
        rank = count_better(key, expert[0], count, at, tickets)
    if at.sublane < count:
        found[at.warp, at.part, rank] = expert[0]
        values[at.warp, first + rank] = value[0]
    T.sync_warp()
    settled = count > 0
    if settled:
        source = T.min(at.sublane, num_topk - 1)
        expert[0] = found[at.warp, at.part, source]
        value[0] = values[at.warp, first + source]
        if ranking.deferred:
            # Scores of different logits may be equal; then a gap after the last expert chosen settles the row.
            level = ranking.level_of_part(at, cuts)
            low, high = ranking.steep
            settled = (level > T.float32(low) and level < T.float32(high)) or (
                values[at.warp, first + num_topk - 1] > values[at.warp, first + count - 1]
            )
    return T.cast(T.ballot(not settled), 'uint32')


# By rounds ----------------------------------------------------------------------------------


@macro
def key_row(ranking: Ranking, logits, bias: Any, at: Place, row: int, x, keys):
    """Keys of the experts of a row. `x` still holds the logits if nothing else ranks."""
    layout = ranking.layout
    ranked = T.alloc_var('float32')
    for s in T.unroll(layout.num_slots):
        expert = layout.expert(s, at.lane)
        keys[s] = LOWEST
        if expert < layout.num_experts:
            if ranking.by_logit and not ranking.grouped:
                ranked = x[row, s]
            else:
                ranked = ranking.score(T.cast(logits[at.tokens[row], expert], 'float32'))
            if ranking.has_bias:
                ranked = ranked + bias.of_row(expert, row)
            keys[s] = rank_key(ranked)
    if ranking.grouped:
        ranking.keep_best_groups(at, keys)


@macro
def select_by_rounds(ranking: Ranking, logits, bias: Any, at: Place, row: int, x, expert, value):
    """`num_topk` times, take the best score that is left, and the smallest expert among equals. Works for any row."""
    layout, lane = ranking.layout, at.lane
    keys = T.alloc_local((layout.num_slots,), 'int32')
    best = T.alloc_var('int32')
    where = T.alloc_var('int32')
    key_row(ranking, logits, bias, at, row, x, keys)
    for pick in T.unroll(ranking.num_picks):
        for k in T.unroll(T.min(ranking.num_topk - pick * WARP, WARP), unroll_factor=1):
            best = LOWEST
            where = layout.num_experts
            for s in T.unroll(layout.num_slots):
                if keys[s] > best:
                    best = keys[s]
                    where = layout.expert(s, lane)
            top = T.warp_reduce_max(best)
            won = T.warp_reduce_min(T.Select(best == top, where, layout.num_experts))
            for s in T.unroll(layout.num_slots):
                if layout.expert(s, lane) == won:
                    keys[s] = LOWEST
            if lane == row * at.width + k:
                expert[pick] = won
                value[pick] = ranking.score(T.cast(logits[at.token, won], 'float32'))


# Both ---------------------------------------------------------------------------------------


@macro
def select_topk(ranking: Ranking, logits, bias: Any, at: Place, x, expert, value):
    """Choose the experts of the tokens of a warp, whose logits are in `x`; overwrites `x`.

    Expert k is pick k // 32 of sublane k % 32. `expert` gets the experts and `value` their scores without bias (for
    softmax their logits). Entries with k >= `num_topk` are undefined.
    """
    unsettled = T.alloc_var('uint32')
    unsettled = T.uint32(0xFFFFFFFF)
    if ranking.rows_by_cut(at.rows) > 0:
        certain = T.alloc_var('bool')
        certain = True
        if not ((ranking.by_logit and not ranking.grouped) or ranking.deferred):
            certain = ranking.rank_rows(bias, at, x)
        unsettled = select_by_cut(ranking, logits, bias, at, x, expert, value)
        if not certain:
            unsettled = T.uint32(0xFFFFFFFF)
    for r in range(at.rows):
        if (unsettled >> T.uint32(r * at.width)) & T.uint32(1) != T.uint32(0):
            select_by_rounds(ranking, logits, bias, at, r, x, expert, value)


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_warps=(1, 2, 4, 8), rows=(1, 2), early=EARLY), pass_configs=WARP_PASS_CONFIGS)
def topk_gate_kernel(
    num_experts: int,
    num_topk: int,
    dtype: torch.dtype,
    vector_bytes: int,
    packed: bool,
    *,
    num_warps: int,
    rows: int,
    early: bool = False,
):
    """Experts of one or two tokens per warp."""
    layout = RowLayout.of(num_experts, dtype.itemsize, vector_bytes)
    ranking = Ranking(layout, num_topk)
    rows = max(ranking.rows_by_cut(rows), 1)
    num_tokens = T.dynamic('num_tokens')
    row_stride = num_experts if packed else T.dynamic('row_stride')

    @T.prim_func
    def topk_gate(
        scores: T.StridedTensor((num_tokens, num_experts), (row_stride, 1), T.dtype(dtype)),
        topk_idx: T.Tensor((num_tokens, num_topk), 'int64'),
    ):
        with T.Kernel(T.ceildiv(num_tokens, num_warps * rows), threads=num_warps * WARP) as pid:
            if early:
                begin_early()
            T.assume(row_stride % layout.vec == 0)
            x_local = T.alloc_local((rows, layout.num_slots), 'float32')
            expert_local = T.alloc_local((ranking.num_picks,), 'int32')
            value_local = T.alloc_local((ranking.num_picks,), 'float32')
            tokens_local = T.alloc_local((rows,), 'int32')
            token = T.alloc_var('int32')
            tx = T.get_thread_binding()
            at = Place(num_warps, rows, tx, tokens_local, token)
            first_token = (pid * num_warps + at.warp) * rows

            if first_token < num_tokens:
                for r in T.unroll(rows):
                    tokens_local[r] = T.min(first_token + r, num_tokens - 1)
                token = T.min(first_token + at.part, num_tokens - 1)
                load_rows(scores, at, layout, x_local)
                select_topk(ranking, scores, None, at, x_local, expert_local, value_local)
                for p in T.unroll(ranking.num_picks):
                    if p * WARP + at.sublane < num_topk and first_token + at.part < num_tokens:
                        topk_idx[token, p * WARP + at.sublane] = T.cast(expert_local[p], 'int64')

    return topk_gate
