"""Kernels of `reduce_rows` and `weighted_reduce_rows`: the sum of rows and its gradients."""

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, macro
from tile_kernels.moe.expand_to_fused_kernels import (
    CONVERTED_ROW_PASS_CONFIGS,
    ROW_SPACE,
    RowSplit,
    clear_places,
    find_padding,
    load_places,
    num_shares,
)

#: Rows of a token that are in flight at once.
MAX_IN_FLIGHT = 9

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, x_dtype: torch.dtype, y_dtype: torch.dtype, width: int, num_topk: int, *rest: int) -> dict:
    """One vector per thread, with num_topk loads in flight; many small blocks hide their latency."""
    early = is_short(rest[-1] * hidden * (num_topk * x_dtype.itemsize + y_dtype.itemsize))
    return dict(row_threads=128 if hidden // width >= 128 else 32, vectors=1, num_threads=128, early=early)


def choose_bwd(hidden: int, dtype: torch.dtype, width: int, num_topk: int, *rest: int) -> dict:
    """As forward, but one block owns a token and adds up its dot products."""
    return dict(row_threads=128 if hidden // width >= 128 else 32, num_threads=128)


# Kernels ------------------------------------------------------------------------------------


@macro
def load_factors(
    token, token_topk_to_pos, topk_weights, x_sf, num_expanded, weighted, has_x_sf, pos_local, factor_local
):
    """Positions of a token and the factors of their rows; a slot without a position gets -1 and -0.

    Every lane of a warp reads one slot, and shuffles hand it to the others. A skipped slot is a row of zeros times -0.
    Its product is -0, which changes no sum, not even the sign of a zero.
    """
    num_topk = pos_local.shape[0]
    place_local = T.alloc_local((T.ceildiv(num_topk, WARP),), T.int32)
    own_local = T.alloc_local((T.ceildiv(num_topk, WARP),), T.float32)
    load_places(token_topk_to_pos, token, place_local)
    for c in T.unroll(T.ceildiv(num_topk, WARP)):
        if place_local[c] >= num_expanded:
            place_local[c] = -1
        own_local[c] = T.float32(-0.0)
        if place_local[c] >= 0:
            slot = c * WARP + T.get_thread_binding() % WARP
            own_local[c] = topk_weights[token, slot] if weighted else T.float32(1.0)
            if has_x_sf:
                own_local[c] = own_local[c] * x_sf[place_local[c]]
    for k in T.unroll(num_topk):
        pos_local[k] = T.shfl_sync(place_local[k // WARP], k % WARP)
        factor_local[k] = T.shfl_sync(own_local[k // WARP], k % WARP)


@macro
def load_vectors(x, pos_local, slot, num_slots, index, x_local):
    """Read vector `index` of the rows of `num_slots` slots from `slot` on; zeros where a slot has no position."""
    width = x_local.shape[1]
    T.clear(x_local)
    for i in T.unroll(num_slots):
        if pos_local[slot + i] >= 0:
            for e in T.vectorized(width):
                x_local[i, e] = x[pos_local[slot + i], index * width + e]


@kernel(choose=choose, space=dict(**ROW_SPACE, early=EARLY), pass_configs=CONVERTED_ROW_PASS_CONFIGS)
def reduce_rows_kernel(
    hidden: int,
    x_dtype: torch.dtype,
    y_dtype: torch.dtype,
    width: int,
    num_topk: int,
    weighted: bool,
    has_x_sf: bool,
    has_sf: bool,
    *,
    row_threads: int,
    vectors: int,
    num_threads: int,
    early: bool = False,
):
    """Rows of `hidden` elements, `width` elements per access."""
    rounds = -(-num_topk // MAX_IN_FLIGHT)
    depth = -(-num_topk // rounds)
    split = RowSplit.of(hidden // width, row_threads, vectors, num_threads)
    num_tokens, num_expanded = T.dynamic('num_tokens'), T.dynamic('num_expanded')

    @T.prim_func
    def reduce_rows(
        x: T.Tensor((num_expanded, hidden), T.dtype(x_dtype)),
        topk_weights: T.Tensor((num_tokens, num_topk), T.float32),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
        x_sf: T.Tensor((num_expanded,), T.float32),
        sf: T.Tensor((1,), T.float32),
        y: T.Tensor((num_tokens, hidden), T.dtype(y_dtype)),
    ):
        with T.Kernel(T.ceildiv(num_tokens, split.rows) * split.parts, threads=split.num_threads) as pid:
            if early:
                begin_early()
            pos_local = T.alloc_local((num_topk,), T.int32)
            factor_local = T.alloc_local((num_topk,), T.float32)
            x_local = T.alloc_local((depth, width), T.dtype(x_dtype))
            sum_local = T.alloc_local((width,), T.float32)
            y_local = T.alloc_local((width,), T.dtype(y_dtype))
            tx = T.get_thread_binding()
            token = pid // split.parts * split.rows + tx // row_threads

            if token < num_tokens:
                load_factors(
                    token,
                    token_topk_to_pos,
                    topk_weights,
                    x_sf,
                    num_expanded,
                    weighted,
                    has_x_sf,
                    pos_local,
                    factor_local,
                )
                for v in T.serial(split.vectors):
                    index = (pid % split.parts * split.vectors + v) * row_threads + tx % row_threads
                    if index < hidden // width:
                        T.clear(sum_local)
                        for r in T.unroll(rounds, explicit=True):
                            load_vectors(x, pos_local, r * depth, T.min(depth, num_topk - r * depth), index, x_local)
                            for i in T.unroll(depth):
                                if r * depth + i < num_topk:
                                    for e in T.unroll(width):
                                        sum_local[e] = T.ieee_fmaf(
                                            T.cast(x_local[i, e], T.float32), factor_local[r * depth + i], sum_local[e]
                                        )
                        for e in T.vectorized(width):
                            y_local[e] = T.cast(sum_local[e] * sf[0] if has_sf else sum_local[e], T.dtype(y_dtype))
                        for e in T.vectorized(width):
                            y[token, index * width + e] = y_local[e]

    return reduce_rows


@kernel(choose=lambda *static: dict(num_threads=256), space=dict(num_threads=(128, 256, 512)))
def invert_places_kernel(num_topk: int, *, num_threads: int):
    """`pos_to_slot[token_topk_to_pos[t, k]] = t * num_topk + k`, -1 where no slot has the position."""
    num_tokens, num_expanded = T.dynamic('num_tokens'), T.dynamic('num_expanded')

    @T.prim_func
    def invert_places(
        pos_to_slot: T.Tensor((num_expanded,), T.int32),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
    ):
        with T.Kernel(T.ceildiv(num_expanded, num_threads), threads=num_threads) as pid:
            pos = pid * num_threads + T.get_thread_binding()
            if pos < num_expanded:
                pos_to_slot[pos] = -1

        with T.Kernel(T.max(1, T.ceildiv(num_tokens * num_topk, num_threads)), threads=num_threads) as pid:
            slot = pid * num_threads + T.get_thread_binding()
            if slot < num_tokens * num_topk:
                pos = token_topk_to_pos[slot // num_topk, slot % num_topk]
                if pos >= 0 and pos < num_expanded:
                    pos_to_slot[pos] = slot

    return invert_places


@macro
def dot_vectors(a_local, b_local, i, dot_local, k):
    """`dot_local[k] += a . b[i]`."""
    for e in T.unroll(a_local.shape[0]):
        dot_local[k] = T.ieee_fmaf(T.cast(a_local[e], T.float32), T.cast(b_local[i, e], T.float32), dot_local[k])


@kernel(
    choose=choose_bwd,
    space=dict(row_threads=(32, 64, 128, 256), num_threads=(128, 256, 512)),
    pass_configs=CONVERTED_ROW_PASS_CONFIGS,
    fixed='row_threads',
)
def reduce_rows_bwd_kernel(
    hidden: int,
    dtype: torch.dtype,
    width: int,
    num_topk: int,
    weighted: bool,
    has_x_sf: bool,
    has_sf: bool,
    *,
    row_threads: int,
    num_threads: int,
):
    """Gradients of x (0 in rows without a slot) and of the weights, if there are any."""
    rounds = -(-num_topk // MAX_IN_FLIGHT)
    depth = -(-num_topk // rounds)
    rows = max(1, num_threads // row_threads)
    num_threads = rows * row_threads
    row_warps = row_threads // WARP
    num_tokens, num_expanded = T.dynamic('num_tokens'), T.dynamic('num_expanded')

    @T.prim_func
    def reduce_rows_bwd(
        dy: T.Tensor((num_tokens, hidden), T.dtype(dtype)),
        x: T.Tensor((num_expanded, hidden), T.dtype(dtype)),
        topk_weights: T.Tensor((num_tokens, num_topk), T.float32),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
        pos_to_slot: T.Tensor((num_expanded,), T.int32),
        x_sf: T.Tensor((num_expanded,), T.float32),
        sf: T.Tensor((1,), T.float32),
        dx: T.Tensor((num_expanded, hidden), T.dtype(dtype)),
        dtopk_weights: T.Tensor((num_tokens, num_topk), T.float32),
    ):
        with T.Kernel(T.ceildiv(num_shares(num_tokens, num_expanded), rows), threads=num_threads) as pid:
            dy_local = T.alloc_local((width,), T.dtype(dtype))
            dx_local = T.alloc_local((width,), T.dtype(dtype))
            x_local = T.alloc_local((depth, width), T.dtype(dtype))
            pos_local = T.alloc_local((num_topk,), T.int32)
            factor_local = T.alloc_local((num_topk,), T.float32)
            dot_local = T.alloc_local((num_topk,), T.float32)
            dot_shared = T.alloc_shared((num_threads // WARP, num_topk), T.float32)
            tx = T.get_thread_binding()
            token = pid * rows + tx // row_threads

            T.clear(dot_local)
            if token < num_tokens:
                load_factors(
                    token,
                    token_topk_to_pos,
                    topk_weights,
                    x_sf,
                    num_expanded,
                    weighted,
                    has_x_sf,
                    pos_local,
                    factor_local,
                )
                for part in T.serial(T.ceildiv(hidden // width, row_threads)):
                    index = part * row_threads + tx % row_threads
                    if index < hidden // width:
                        for e in T.vectorized(width):
                            dy_local[e] = dy[token, index * width + e]
                        for r in T.unroll(rounds, explicit=True):
                            if weighted:
                                load_vectors(
                                    x, pos_local, r * depth, T.min(depth, num_topk - r * depth), index, x_local
                                )
                                for i in T.unroll(depth):
                                    if r * depth + i < num_topk and pos_local[r * depth + i] >= 0:
                                        dot_vectors(dy_local, x_local, i, dot_local, r * depth + i)
                            for i in T.unroll(depth):
                                if r * depth + i < num_topk and pos_local[r * depth + i] >= 0:
                                    factor = factor_local[r * depth + i] * (sf[0] if has_sf else T.float32(1.0))
                                    for e in T.vectorized(width):
                                        dx_local[e] = T.cast(T.cast(dy_local[e], T.float32) * factor, dx.dtype)
                                    for e in T.vectorized(width):
                                        dx[pos_local[r * depth + i], index * width + e] = dx_local[e]

            padding = find_padding(pos_to_slot, token, num_tokens)
            for part in T.serial(T.ceildiv(hidden // width, row_threads)):
                clear_places(
                    padding, token, num_tokens, dx, 1, width, part * row_threads + tx % row_threads, row_threads
                )

            if weighted:
                for k in T.unroll(num_topk):
                    dot_local[k] = T.warp_reduce_sum(dot_local[k])
                    if tx % WARP == 0:
                        dot_shared[tx // WARP, k] = dot_local[k]
                T.sync_threads()
                for i in T.serial(T.ceildiv(rows * num_topk, num_threads)):
                    row, slot = (i * num_threads + tx) // num_topk, (i * num_threads + tx) % num_topk
                    if row < rows and pid * rows + row < num_tokens:
                        dot = T.alloc_var(T.float32, init=0.0)
                        for w in T.unroll(row_warps):
                            dot += dot_shared[row * row_warps + w, slot]
                        if has_x_sf:
                            pos = token_topk_to_pos[pid * rows + row, slot]
                            if pos >= 0 and pos < num_expanded:
                                dot *= x_sf[pos]
                        dtopk_weights[pid * rows + row, slot] = dot * sf[0] if has_sf else dot

    return reduce_rows_bwd
