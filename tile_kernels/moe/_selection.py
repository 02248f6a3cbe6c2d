"""Top-k of a row, or of two, by one warp: the part that all gates share.

Two ways lead to the k best scores of a row:

    by cut      The k-th largest lane maximum is a cut that at least k scores reach, and few more do. Those few are
                gathered, one per lane, and each counts how many of the others come before it: that is its rank. So few
                lanes are busy with it that one half of a warp ranks one row while the other half ranks another.
                Only the few are scored: the cut goes through logits where scores rise with them, and through estimates
                of the scores, lowered by what these can be off, where a bias is added.
    by rounds   k times the warp finds the best score that is left. Slower, and right for every row: it takes over where
                a cut does not separate (ties, too few finite scores) and for large k.

Scores are compared as the keys of `_keys`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tile_kernels.core.lang import T, macro
from tile_kernels.moe._groups import keep_best_estimates, keep_best_groups
from tile_kernels.moe._keys import LOWEST, NAN_KEY, from_order_key, order_key, rank_key
from tile_kernels.moe._macros import WARP, Place, RowLayout, estimate, estimate_error, score
from tile_kernels.moe.scoring import ScoringFunc

#: How far cuts through logits are lowered, and where that lowers scores by several units in the last place.
LOWERED = 2.0**-8
STEEP = {ScoringFunc.SIGMOID: (-80.0, 8.0), ScoringFunc.SQRTSOFTPLUS: (-80.0, 1024.0)}
#: Logits per lane up to which two rows fit into the registers of a warp.
MAX_SLOTS_OF_TWO = 32


@dataclass(frozen=True)
class Bias:
    """What is added to the scores of a token before they rank; tokens of images may have a bias of their own."""

    plain: Any = None
    image: Any = None
    image_rows: Any = None  # for every row whether its token is of an image
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
class Ranking:
    """Which experts of a row are chosen: the `num_topk` of largest score (+ bias), in the best groups only."""

    layout: RowLayout
    num_topk: int
    scoring: ScoringFunc = ScoringFunc.IDENTITY
    biased: bool = False
    num_groups: int = 1
    num_topk_groups: int = 1

    @property
    def num_picks(self) -> int:
        """Choices per lane."""
        return -(-self.num_topk // WARP)

    @property
    def grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.num_topk_groups < self.num_groups

    @property
    def by_logit(self) -> bool:
        """Whether the logit itself is what ranks."""
        return self.scoring in (ScoringFunc.SOFTMAX, ScoringFunc.IDENTITY) and not self.biased

    @property
    def deferred(self) -> bool:
        """Whether only candidates are scored: scores rise with logits, so the logits can be cut instead."""
        return not (self.by_logit or self.biased or self.grouped)

    @property
    def estimated(self) -> bool:
        """Whether estimates of the scores are cut and only candidates are scored: exact scores cost several times."""
        return (self.biased or self.grouped) and self.scoring in (ScoringFunc.SIGMOID, ScoringFunc.SQRTSOFTPLUS)

    @property
    def error(self) -> float:
        """What can be off in what is cut; sums of groups need sharper estimates than a cut."""
        return estimate_error(self.scoring, self.grouped) if self.estimated else 0.0

    @property
    def margin(self) -> float:
        """How far a cut is lowered: an estimate is off by `error`, and so is the one the cut was taken from."""
        return 2 * self.error if self.estimated else LOWERED

    def rows_by_cut(self, rows: int) -> int:
        """How many of `rows` rows a warp takes at once; 0 where a cut would mostly leave too many candidates."""
        if self.num_topk > WARP // 2:
            return 0
        fits = self.num_topk + 4 <= WARP // rows and self.layout.num_slots <= MAX_SLOTS_OF_TWO
        return rows if fits and not self.grouped else 1


# By cut -------------------------------------------------------------------------------------


@macro
def find_cuts(x, at: Place, num_slots: int, rounds: int, cut):
    """For every row the key of the `rounds`-th largest lane maximum, equal ones counted once; NaN never is one."""
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
        cut[r] = T.Select(cut[r] == 0, -1, cut[r])  # -0 - (+0) has the sign of what is below


@macro
def lower_cuts(cut, rows: int, margin: float):
    """Lower cuts by `margin`, so that everything that may be as good as what reaches them exactly does, too.

    The rounding of the sum of an estimate with its bias comes on top.
    """
    for r in T.unroll(rows):
        level = from_order_key(cut[r])
        cut[r] = order_key(level - (T.float32(margin) + T.abs(level) * T.float32(2**-20)))


@macro
def level_of_part(at: Place, cuts):
    """Where the row of the part was cut."""
    level = T.alloc_var('float32')
    for r in T.unroll(at.rows):
        if at.part == r:
            level = from_order_key(cuts[r])
    return level


@macro
def gather(x, cut, at: Place, layout: RowLayout, found, count):
    """List the slots of every row that reach its cut in `found`, in any order; `count` them, or stop after 32."""
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
            for s in T.unroll(slots):  # the sign says who is below; a NaN has none and will rank last
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
                # The last 32 entries are a dump, so that no lane branches.
                place_or_dump = T.Select(left[r] != T.uint32(0), place, found.shape[2] - WARP + at.lane)
                found[at.warp, r, place_or_dump] = (word * 32 + slots - 1 - bit) * WARP + at.lane
                left[r] = left[r] & ~(T.uint32(1) << T.cast(bit, 'uint32'))
                count[r] = count[r] + T.cast(T.popcount(votes[r]), 'int32')
                if count[r] > WARP:
                    left[r] = T.uint32(0)
                votes[r] = T.cast(T.ballot(left[r] != T.uint32(0)), 'uint32')
                waiting = waiting | votes[r]


def append_sign(bits, word):
    """`bits`, moved up by one, and the uppermost bit of `word`."""
    return T.call_extern('uint32', '__funnelshift_l', word, bits, T.uint32(1))


@macro
def count_larger(mine, count, likely: int, at: Place, tickets):
    """How many lanes of a part hold a larger number; from lane `count` on none does. Equal numbers are not counted."""
    rank = T.alloc_var('uint32')
    tickets[at.warp, at.lane] = mine
    T.sync_warp()
    rank = T.uint32(0)
    for c in T.unroll(likely):  # the sign of a difference is cheaper to add up than a comparison
        rank = rank + (T.reinterpret(mine - tickets[at.warp, at.part * at.width + c], 'uint32') >> T.uint32(31))
    for c in T.unroll(likely, count, unroll_factor=1):
        rank = rank + (T.reinterpret(mine - tickets[at.warp, at.part * at.width + c], 'uint32') >> T.uint32(31))
    return T.cast(rank, 'int32')


@macro
def count_better(key, expert, count, at: Place, tickets):
    """How many lanes of a part hold a larger key, or an equal one of a smaller expert; from `count` on none does."""
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
def select_by_cut(ranking: Ranking, logits, bias: Bias, at: Place, x, expert, value):
    """Choose by cuts through the rows of `x`; returns a mask of the lanes whose row no cut could separate."""
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
        lower_cuts(cuts, at.rows, ranking.margin)
    gather(x, cuts, at, ranking.layout, found, counts)
    T.sync_warp()
    count = 0  # of all rows, a byte each: picked by a shift, since indexed by the part they would leave the registers
    for r in T.unroll(at.rows):
        separates = T.isfinite(from_order_key(cuts[r])) and counts[r] <= at.width
        count = count | (T.Select(separates, counts[r], 0) << (8 * r))
    count = (count >> (8 * at.part)) & 0xFF

    source = T.max(T.min(at.sublane, count - 1), 0)
    if count > 0:
        source = found[at.warp, at.part, source]
    expert[0] = ranking.layout.expert(source >> 5, source & (WARP - 1))
    value[0] = score(T.cast(logits[at.token, expert[0]], 'float32'), ranking.scoring)
    ranked = value[0]
    if ranking.biased:
        ranked = ranked + bias.of_part(expert[0])
    if ranking.scoring in (ScoringFunc.SOFTMAX, ScoringFunc.IDENTITY):
        ranked = T.Select(ranked == T.float32(0), T.float32(0), ranked)  # -0 is no smaller
    likely = min(num_topk + 3, at.width)
    mine = T.Select(at.sublane < count, ranked, -T.infinity('float32'))
    rank = count_larger(mine, count, likely, at, numbers)
    wanted = T.Select(at.sublane < count, T.uint32(1) << T.cast(first + rank, 'uint32'), T.uint32(0))
    taken = (T.warp_reduce_bitor(wanted) >> T.cast(first, 'uint32')) & T.uint32((1 << at.width) - 1)
    clash = T.cast(T.popcount(taken), 'int32') != count or (at.sublane < count and not T.isfinite(ranked))
    if T.ballot(clash) != T.uint64(0):  # equal ones want one place: rank those of a smaller expert before the others
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
            # The last score chosen must lie above all that were not listed: where scores are flat they may be equal.
            level = level_of_part(at, cuts)
            low, high = STEEP[ranking.scoring]
            settled = (level > T.float32(low) and level < T.float32(high)) or (
                values[at.warp, first + num_topk - 1] > values[at.warp, first + count - 1]
            )
    return T.cast(T.ballot(not settled), 'uint32')


# By rounds ----------------------------------------------------------------------------------


@macro
def key_row(ranking: Ranking, logits, bias: Bias, at: Place, row: int, x, keys):
    """What ranks the experts of a row, as keys; `x` still holds the logits where they are all that ranks."""
    layout = ranking.layout
    ranked = T.alloc_var('float32')
    for s in T.unroll(layout.num_slots):
        expert = layout.expert(s, at.lane)
        keys[s] = LOWEST
        if expert < layout.num_experts:
            if ranking.by_logit and not ranking.grouped:
                ranked = x[row, s]
            else:
                ranked = score(T.cast(logits[at.tokens[row], expert], 'float32'), ranking.scoring)
            if ranking.biased:
                ranked = ranked + bias.of_row(expert, row)
            keys[s] = rank_key(ranked)
    if ranking.grouped:
        keep_best_groups(layout, ranking.num_groups, ranking.num_topk_groups, at, keys)


@macro
def select_by_rounds(ranking: Ranking, logits, bias: Bias, at: Place, row: int, x, expert, value):
    """Take the best score that is left, of the smallest expert among equals, `num_topk` times; any row."""
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
                value[pick] = score(T.cast(logits[at.token, won], 'float32'), ranking.scoring)


# Both ---------------------------------------------------------------------------------------


@macro
def rank_rows(ranking: Ranking, bias: Bias, at: Place, x):
    """Turn the logits of all rows into what their cuts go through; returns whether it is certain which groups drop out.

    A warp that takes groups into account has one row.
    """
    layout, num_slots = ranking.layout, ranking.layout.num_slots
    width = layout.float_vec
    keys = T.alloc_local((num_slots,), 'int32')
    bias_local = T.alloc_local((num_slots,), 'float32')
    certain = T.alloc_var('bool')
    certain = True
    if ranking.biased and bias.image is None:
        for i in T.unroll(num_slots // width):
            if layout.expert(i * width, at.lane) < layout.num_experts:
                for j in T.vectorized(width):
                    bias_local[i * width + j] = bias.plain[layout.expert(i * width, at.lane) + j]
    for s in T.unroll(num_slots):
        if layout.expert(s, at.lane) < layout.num_experts:
            for r in T.unroll(at.rows):
                if ranking.estimated:
                    x[r, s] = estimate(x[r, s], ranking.scoring, ranking.grouped)
                else:
                    x[r, s] = score(x[r, s], ranking.scoring)
                if ranking.biased:
                    if bias.image is None:
                        x[r, s] = x[r, s] + bias_local[s]
                    else:
                        x[r, s] = x[r, s] + bias.of_row(layout.expert(s, at.lane), r)
    if ranking.estimated and ranking.grouped:
        certain = keep_best_estimates(layout, ranking.num_groups, ranking.num_topk_groups, ranking.error, at, x)
    elif ranking.grouped:
        for s in T.unroll(num_slots):
            keys[s] = LOWEST
            if layout.expert(s, at.lane) < layout.num_experts:
                keys[s] = rank_key(x[0, s])
        keep_best_groups(layout, ranking.num_groups, ranking.num_topk_groups, at, keys)
        for s in T.unroll(num_slots):
            if keys[s] < NAN_KEY:  # dropped; LOWEST itself is a literal the simplifier cannot compare with
                x[0, s] = -T.infinity('float32')
    return certain


@macro
def select_topk(ranking: Ranking, logits, bias: Bias, at: Place, x, expert, value):
    """Choose the experts of the tokens of a warp, whose logits are in `x`: choice k is pick k // 32 of sublane k % 32.

    `expert` gets the choices and `value` their scores without bias (for softmax their logits); where k is `num_topk` or
    more they mean nothing. `x` is overwritten.
    """
    unsettled = T.alloc_var('uint32')
    unsettled = T.uint32(0xFFFFFFFF)
    if ranking.rows_by_cut(at.rows) > 0:
        certain = T.alloc_var('bool')
        certain = True
        if not ((ranking.by_logit and not ranking.grouped) or ranking.deferred):
            certain = rank_rows(ranking, bias, at, x)
        unsettled = select_by_cut(ranking, logits, bias, at, x, expert, value)
        if not certain:
            unsettled = T.uint32(0xFFFFFFFF)
    for r in range(at.rows):
        if (unsettled >> T.uint32(r * at.width)) & T.uint32(1) != T.uint32(0):
            select_by_rounds(ranking, logits, bias, at, r, x, expert, value)
