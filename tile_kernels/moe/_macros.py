"""The logits of a token in a warp: layout, loads and stores, scores, keys, and sums over lanes.

A warp holds the logits of one or two tokens in registers, `num_slots` of each per lane. The chosen experts are spread
over lanes, too. One token uses all lanes; two tokens use one half of the warp each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.moe.scoring import ScoringFunc

#: Avoids division by zero for a row of zero scores.
EPSILON = 1e-20
LOG2_E = 1.4426950408889634

#: Warps of a block are independent: the code itself places barriers and guards row ends.
WARP_PASS_CONFIGS = {
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
}

# Config -------------------------------------------------------------------------------------


def choose_warps(*static_and_size: Any) -> dict:
    """One token per warp. Few tokens get blocks of one warp, so that they spread over the SMs."""
    return dict(num_warps=1 if static_and_size[-1] <= 1024 else 4)


# Layout -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowLayout:
    """Layout of a row in a warp: `vec` neighbors per access, the slots of a lane in ascending order."""

    num_experts: int
    vec: int
    float_vec: int  # the same for float32 rows: at most 16 bytes

    @classmethod
    def of(cls, num_experts: int, elem_size: int, vector_bytes: int) -> RowLayout:
        """The widest access that divides a row and uses all lanes."""
        vec = max(vector_bytes // elem_size, 1)
        while vec > 1 and (num_experts % vec or num_experts < WARP * vec):
            vec //= 2
        return cls(num_experts, vec, min(vec, max(vector_bytes // 4, 1)))

    @property
    def num_slots(self) -> int:
        """Scores per lane, including those beyond the end of the row."""
        return -(-self.num_experts // (WARP * self.vec)) * self.vec

    def expert(self, slot: Any, lane: Any) -> Any:
        """The expert in a slot of a lane."""
        return slot // self.vec * (WARP * self.vec) + lane * self.vec + slot % self.vec


@dataclass(frozen=True)
class Place:
    """Warp and lane of a thread. A warp has `rows` tokens and one part (half or all of its lanes) for each."""

    num_warps: int
    rows: int
    thread: Any
    tokens: Any  # of the rows
    token: Any  # of the part

    @property
    def warp(self) -> Any:
        """Warp of the block."""
        return self.thread // WARP

    @property
    def lane(self) -> Any:
        """Lane of the warp."""
        return self.thread % WARP

    @property
    def width(self) -> int:
        """Lanes of a part."""
        return WARP // self.rows

    @property
    def part(self) -> Any:
        """Part of the warp."""
        return self.lane // self.width

    @property
    def sublane(self) -> Any:
        """Lane of the part."""
        return self.lane % self.width


# Keys ---------------------------------------------------------------------------------------

#: Below every key: the key of a slot without an expert, or of an expert that must not be chosen.
LOWEST = -(1 << 31)
NAN_KEY = LOWEST + 1


def order_key(x: Any) -> Any:
    """An int32 in the order of the float `x`, which is not NaN. On the bits, the mapping is its own inverse."""
    bits = T.reinterpret(x, 'int32')
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def from_order_key(key: Any) -> Any:
    """The float of an `order_key`."""
    return T.reinterpret(key ^ ((key >> 31) & 0x7FFFFFFF), 'float32')


def rank_key(x: Any) -> Any:
    """`order_key` with NaN last and both zeros equal."""
    return T.Select(T.isnan(x), NAN_KEY, T.Select(x == T.float32(0), 0, order_key(x)))


# Scores -------------------------------------------------------------------------------------


def score(x: Any, scoring: ScoringFunc) -> Any:
    """The score of a logit; softmax and identity rank by the logit itself."""
    if scoring == ScoringFunc.SIGMOID:
        return T.float32(1) / (T.float32(1) + T.exp(-x))
    if scoring == ScoringFunc.SQRTSOFTPLUS:
        return T.sqrt(T.Select(x > T.float32(20), x, T.log1p(T.exp(x))))
    return x


#: Approximate hardware functions that flush denormals. The CUDA intrinsics add three instructions to handle them.
FAST_FUNCTIONS = """
static __device__ __forceinline__ float ex2_approx(float x) {
  float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}
static __device__ __forceinline__ float sqrt_approx(float x) {
  float y; asm("sqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}
static __device__ __forceinline__ float tanh_approx(float x) {
  float y; asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y;
}
"""

#: Polynomial for log(1 + t) / t, t from 0 to 1, relative error 4e-4. A third hardware function would be the bottleneck.
LOG1P_OVER_T = (0.99960702, -0.48641409, 0.25402489, -0.07434303)


def _fast(name: str, x: Any) -> Any:
    return T.call_extern('float32', name, x)


def estimate(x: Any, scoring: ScoringFunc, is_sharp: bool) -> Any:
    """The score of a logit within `estimate_error`, by `FAST_FUNCTIONS`. It is NaN only for NaN."""
    if scoring == ScoringFunc.SIGMOID and is_sharp:
        return T.fast_rcp(T.float32(1) + _fast('ex2_approx', x * T.float32(-LOG2_E)))
    if scoring == ScoringFunc.SIGMOID:
        return T.float32(0.5) + T.float32(0.5) * _fast('tanh_approx', T.float32(0.5) * x)
    tail = _fast('ex2_approx', T.abs(x) * T.float32(-LOG2_E))  # softplus is max(x, 0) + log(1 + tail)
    ratio = T.float32(LOG1P_OVER_T[3])
    for c in LOG1P_OVER_T[2::-1]:
        ratio = ratio * tail + T.float32(c)
    return _fast('sqrt_approx', tail * ratio + T.max(x, T.float32(0)))


def estimate_error(scoring: ScoringFunc, is_sharp: bool) -> float:
    """Upper bound of the error: that of sigmoid is 1e-6, or half of the 5e-4 of tanh; that of the root is 2e-4."""
    if scoring == ScoringFunc.SIGMOID:
        return 2e-6 if is_sharp else 4e-4
    return 4e-4


def slope(x, value, scoring: ScoringFunc):
    """Derivative of the score `value` of the logit `x`."""
    if scoring == ScoringFunc.SIGMOID:
        return value * (T.float32(1) - value)
    if scoring == ScoringFunc.SQRTSOFTPLUS:
        rise = T.Select(x > T.float32(20), T.float32(1), T.exp(x) / (T.float32(1) + T.exp(x)))
        return T.Select(value > T.float32(0), T.float32(0.5) * rise / value, T.float32(0))
    return T.float32(1)


# Rows ---------------------------------------------------------------------------------------


@macro
def load_rows(logits, at: Place, layout: RowLayout, x):
    """Load the rows of a warp into registers as float32, with -inf beyond their ends."""
    raw = T.alloc_local((at.rows, layout.num_slots), logits.dtype)
    for r in T.unroll(at.rows):
        for i in T.unroll(layout.num_slots // layout.vec):
            first = layout.expert(i * layout.vec, at.lane)
            if first < layout.num_experts:
                for j in T.vectorized(layout.vec):
                    raw[r, i * layout.vec + j] = logits[at.tokens[r], first + j]
            else:
                for j in T.vectorized(layout.vec):
                    raw[r, i * layout.vec + j] = -T.infinity(logits.dtype)
    for r in T.unroll(at.rows):
        for s in T.unroll(layout.num_slots):
            x[r, s] = T.cast(raw[r, s], 'float32')


@macro
def store_rows(x, out, at: Place, layout: RowLayout):
    """Store the rows of a warp, as float32 or in the dtype of the logits."""
    vec = layout.float_vec if out.dtype == 'float32' else layout.vec
    cast = T.alloc_local((at.rows, layout.num_slots), out.dtype)
    for r in T.unroll(at.rows):
        for s in T.unroll(layout.num_slots):
            cast[r, s] = T.cast(x[r, s], out.dtype)
    for r in T.unroll(at.rows):
        for i in T.unroll(layout.num_slots // vec):
            first = layout.expert(i * vec, at.lane)
            if first < layout.num_experts:
                for j in T.vectorized(vec):
                    out[at.tokens[r], first + j] = cast[r, i * vec + j]


# Sums over the warp -------------------------------------------------------------------------


def width_of(num_topk: int) -> int:
    """Number of lanes that hold a chosen expert, rounded up to a power of two."""
    return min(1 << (num_topk - 1).bit_length(), WARP)


@macro
def sum_over(part, width: int):
    """Sum over groups of `width` neighboring lanes."""
    total = T.alloc_var('float32')
    total = part
    for i in T.unroll(width.bit_length() - 1):
        total = total + T.shfl_xor(total, (width // 2) >> i)
    return total


@macro
def max_over(part, width: int):
    """Maximum over groups of `width` neighboring lanes; NaN is ignored."""
    peak = T.alloc_var('float32')
    peak = part
    for i in T.unroll(width.bit_length() - 1):
        peak = T.max(peak, T.shfl_xor(peak, (width // 2) >> i))
    return peak


@macro
def sum_of_chosen(value, at: Place, num_topk: int, width: int):
    """Sum of the values of all chosen experts, over the first `width` lanes of a part, which hold all first picks."""
    total = T.alloc_var('float32')
    total = 0.0
    for p in T.unroll(-(-num_topk // WARP)):
        if p * WARP + at.sublane < num_topk:
            total = total + value[p]
    return sum_over(total, width)


@macro
def peak_of_chosen(value, at: Place, num_topk: int):
    """Largest value of all chosen experts, in the lanes that hold one."""
    peak = T.alloc_var('float32')
    peak = -T.infinity('float32')
    for p in T.unroll(-(-num_topk // WARP)):
        if p * WARP + at.sublane < num_topk:
            peak = T.max(peak, value[p])
    return max_over(peak, width_of(num_topk))


@macro
def exp_of_chosen(value, peak, at: Place, num_topk: int):
    """Replace the values of all chosen experts by exp(value - peak)."""
    for p in T.unroll(-(-num_topk // WARP)):
        if p * WARP + at.sublane < num_topk:
            value[p] = T.exp(value[p] - peak)


@macro
def sum_of_renormalized(value, scoring: ScoringFunc, at: Place, num_topk: int):
    """The divisor that turns the values of all chosen experts into weights. For softmax, logits become exponentials."""
    if scoring == ScoringFunc.SOFTMAX:
        exp_of_chosen(value, peak_of_chosen(value, at, num_topk), at, num_topk)
    return sum_of_chosen(value, at, num_topk, width_of(num_topk)) + T.float32(EPSILON)


@macro
def softmax_of_row(x, row: int, num_slots: int):
    """Largest logit of a row and the sum of exp(logit - largest)."""
    peak = T.alloc_var('float32')
    total = T.alloc_var('float32')
    peak = -T.infinity('float32')
    for s in T.unroll(num_slots):
        peak = T.max(peak, x[row, s])
    peak = max_over(peak, WARP)
    total = 0.0
    for s in T.unroll(num_slots):
        total = total + T.exp(x[row, s] - peak)
    return peak, sum_over(total, WARP)
