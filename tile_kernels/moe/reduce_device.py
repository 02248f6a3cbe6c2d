"""Kernels of `reduce`: the weighted sum of rows and its gradients. See `reduce.py` for the mathematics."""

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.moe._rows import (
    CONVERTED_ROW_PASS_CONFIGS,
    WARP,
    clear_rows,
    find_padding,
    load_row,
    row_threads_for,
    row_vectors,
    store_row,
)

#: Rows of a token that are read at once.
MAX_IN_FLIGHT = 9

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, x_dtype: torch.dtype, y_dtype: torch.dtype, width: int, num_topk: int, *rest: int) -> dict:
    """Up to eight vectors for each thread, one after another: for each of them num_topk loads are in flight."""
    return dict(row_threads=row_threads_for(hidden // width), num_threads=256)


def choose_bwd(hidden: int, dtype: torch.dtype, width: int, num_topk: int, *rest: int) -> dict:
    """Up to four vectors for each thread: its part of dy stays in registers while it goes through the places."""
    return dict(row_threads=row_threads_for(hidden // width, 4), num_threads=256)


# Kernels ------------------------------------------------------------------------------------


@macro
def load_factors(
    token, token_topk_to_pos, topk_weights, x_sf, num_expanded, weighted, has_x_sf, pos_local, factor_local
):
    """Places of a token and what their rows are multiplied by; a slot without a place gets -1 and -0.

    A skipped slot is a row of zeros times -0: adding the product, -0, leaves every sum as it is, its sign included.
    """
    for k in T.unroll(pos_local.shape[0]):
        pos_local[k] = token_topk_to_pos[token, k]
        if pos_local[k] >= num_expanded:
            pos_local[k] = -1
        factor_local[k] = T.float32(-0.0)
        if pos_local[k] >= 0:
            factor_local[k] = topk_weights[token, k] if weighted else T.float32(1.0)
            if has_x_sf:
                factor_local[k] = factor_local[k] * x_sf[pos_local[k]]


@macro
def load_places(x, pos_local, slot, num_slots, index, x_local):
    """Read vector `index` of the rows of `num_slots` slots from `slot` on; zeros where a slot has no place."""
    width = x_local.shape[1]
    T.clear(x_local)
    for i in T.unroll(num_slots):
        if pos_local[slot + i] >= 0:
            for e in T.vectorized(width):
                x_local[i, e] = x[pos_local[slot + i], index * width + e]


@kernel(
    choose=choose,
    space=dict(row_threads=(32, 64, 128, 256), num_threads=(128, 256, 512)),
    pass_configs=CONVERTED_ROW_PASS_CONFIGS,
)
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
    num_threads: int,
):
    """Rows of `hidden` elements, `width` of them in an access."""
    rounds = -(-num_topk // MAX_IN_FLIGHT)
    depth = -(-num_topk // rounds)
    rows = max(1, num_threads // row_threads)
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
        with T.Kernel(T.ceildiv(num_tokens, rows), threads=rows * row_threads) as pid:
            pos_local = T.alloc_local((num_topk,), T.int32)
            factor_local = T.alloc_local((num_topk,), T.float32)
            x_local = T.alloc_local((depth, width), T.dtype(x_dtype))
            sum_local = T.alloc_local((width,), T.float32)
            y_local = T.alloc_local((width,), T.dtype(y_dtype))
            tx = T.get_thread_binding()
            token = pid * rows + tx // row_threads

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
                        T.clear(sum_local)
                        for r in T.unroll(rounds, explicit=True):
                            load_places(x, pos_local, r * depth, T.min(depth, num_topk - r * depth), index, x_local)
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


@macro
def dot_rows(a_local, b_local, dot_local, k):
    """`dot_local[k] += a . b` over the vectors of a thread."""
    for v in T.unroll(a_local.shape[0]):
        for e in T.unroll(a_local.shape[1]):
            dot_local[k] = T.ieee_fmaf(T.cast(a_local[v, e], T.float32), T.cast(b_local[v, e], T.float32), dot_local[k])


@macro
def scale_row(a_local, factor, b_local):
    """`b = a * factor`, rounded once."""
    for v in T.unroll(a_local.shape[0]):
        for e in T.vectorized(a_local.shape[1]):
            b_local[v, e] = T.cast(T.cast(a_local[v, e], T.float32) * factor, b_local.dtype)


@kernel(choose=lambda *static: dict(num_threads=256), space=dict(num_threads=(128, 256, 512)))
def invert_places_kernel(num_topk: int, *, num_threads: int):
    """`pos_to_slot[token_topk_to_pos[t, k]] = t * num_topk + k`, -1 where no slot has the place."""
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


@kernel(
    choose=choose_bwd,
    space=dict(row_threads=(32, 64, 128, 256), num_threads=(128, 256, 512)),
    pass_configs=CONVERTED_ROW_PASS_CONFIGS,
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
    """Gradients of x (rows without a slot become 0) and, if there are weights, of them."""
    vectors = row_vectors(hidden // width, row_threads, 4)
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
        pad_blocks = T.ceildiv(num_expanded, num_threads)
        with T.Kernel(pad_blocks + T.ceildiv(num_tokens, rows), threads=num_threads) as pid:
            dy_local = T.alloc_local((vectors, width), T.dtype(dtype))
            row_local = T.alloc_local((vectors, width), T.dtype(dtype))
            pos_local = T.alloc_local((num_topk,), T.int32)
            factor_local = T.alloc_local((num_topk,), T.float32)
            dot_local = T.alloc_local((num_topk,), T.float32)
            dot_shared = T.alloc_shared((num_threads // WARP, num_topk), T.float32)
            tx = T.get_thread_binding()

            if pid < pad_blocks:
                place = pid * num_threads + tx // WARP * WARP
                clear_rows(dx, place, find_padding(pos_to_slot, place), row_local)
            else:
                token = (pid - pad_blocks) * rows + tx // row_threads
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
                    for part in T.serial(T.ceildiv(hidden, width * vectors * row_threads)):
                        first = part * vectors * row_threads + tx % row_threads
                        T.clear(dy_local)
                        load_row(dy, token, first, row_threads, dy_local)
                        for k in T.unroll(num_topk):
                            if pos_local[k] >= 0:
                                if weighted:
                                    T.clear(row_local)
                                    load_row(x, pos_local[k], first, row_threads, row_local)
                                    dot_rows(dy_local, row_local, dot_local, k)
                                scale_row(dy_local, factor_local[k] * (sf[0] if has_sf else T.float32(1.0)), row_local)
                                store_row(row_local, dx, pos_local[k], first, row_threads)

                if weighted:
                    for k in T.unroll(num_topk):
                        dot_local[k] = T.warp_reduce_sum(dot_local[k])
                        if tx % WARP == 0:
                            dot_shared[tx // WARP, k] = dot_local[k]
                    T.sync_threads()
                    for i in T.serial(T.ceildiv(rows * num_topk, num_threads)):
                        row, slot = (i * num_threads + tx) // num_topk, (i * num_threads + tx) % num_topk
                        if row < rows and (pid - pad_blocks) * rows + row < num_tokens:
                            dot = T.alloc_var(T.float32, init=0.0)
                            for w in T.unroll(row_warps):
                                dot += dot_shared[row * row_warps + w, slot]
                            if has_x_sf:
                                pos = token_topk_to_pos[(pid - pad_blocks) * rows + row, slot]
                                if pos >= 0 and pos < num_expanded:
                                    dot *= x_sf[pos]
                            dtopk_weights[(pid - pad_blocks) * rows + row, slot] = dot * sf[0] if has_sf else dot

    return reduce_rows_bwd
