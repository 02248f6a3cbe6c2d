"""Products with few rows of a: the sum over k is split over warps and blocks, in a fixed order. See `gemm`.

A block multiplies 128 rows of b with a slice of k. A warp takes tiles of 16 rows of b and 64 bytes of k in turn, as the
first operand of mma. A lane has 16 bytes of rows g and g + 8, at byte 16 t of the tile. It has the same
bytes of a row of a. So channels have another order in the instruction, but the same in both operands. A thread copies
its own bytes by cp.async and reads no others, so the loop needs no barrier.
"""

from typing import Any

import torch

from tile_kernels.core.cost import count_product
from tile_kernels.core.gpus import SUM_SMS
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, macro
from tile_kernels.gemm._macros import DENSE, FP8, GROUP, end_before

MOST_ROWS = 16  # rows of a
STRIP = 8  # tiles of 16 rows of b in a block
ROWS = 16
ROW_WARPS = 8
TURN_BITS = ROW_WARPS.bit_length() - 1
TILE_BYTES = 64
SLICE_TILES = 32  # tiles along k of a block, at most

#: Threads wait for their own copies only, so TileLang must not insert barriers.
ROWS_PASS_CONFIGS = {'TL_DISABLE_THREAD_STORAGE_SYNC': True}


def best_splits(strips: int, cols: int, most_cols: int) -> int:
    """Blocks that share the sum over `cols` tiles, so that two blocks run on every SM with little left over.

    The number fixes the order of the sum, so it does not depend on the GPU.
    """
    least = -(-cols // most_cols)
    most = max(least, min(least + 15, cols // ROW_WARPS))
    splits = min(range(least, most + 1), key=lambda count: (-(-strips * count // (2 * SUM_SMS)) / count, count))
    return -(-cols // -(-cols // splits))  # without empty ones


def few_rows_splits(n: int, k: int, itemsize: int) -> int:
    """Blocks that share the sum over k of a product with few rows."""
    return best_splits(-(-n // (STRIP * ROWS)), -(-k * itemsize // TILE_BYTES), SLICE_TILES)


def choose_rows(*given: Any) -> dict:
    """One or two octets of rows."""
    return dict(octets=1 if given[-1] <= 8 else 2, early=False)


@macro
def find_group(group_end, row, num_rows, num_groups: int, place):
    """`place` = (group of a row, its first row, its end); rows behind the last group are group `num_groups`.

    The group of a row is the first one that ends after it. All lanes of a warp call this together.
    """
    place[0] = 0
    if num_groups == DENSE:
        place[1] = 0
        place[2] = num_rows
    else:
        found = T.alloc_var(T.int32, init=num_groups)
        for part in T.serial(T.ceildiv(num_groups, WARP)):
            other = part * WARP + T.truncmod(T.get_thread_binding(), WARP)
            if other < found and group_end[T.min(other, num_groups - 1)] > row:
                found = other
        place[0] = T.warp_reduce_min(found)
        group = place[0]
        place[1] = end_before(group_end, group, num_rows, num_groups)
        place[2] = T.if_then_else(
            group < num_groups, T.min(group_end[T.min(group, num_groups - 1)], num_rows), num_rows
        )


@kernel(
    choose=choose_rows,
    space=dict(octets=(1, 2), early=EARLY),
    pass_configs=ROWS_PASS_CONFIGS,
    serves=lambda static, gpu: static.dtype is not FP8 or gpu.arch >= 89,
    flops=count_product,
    fixed='octets',
)
def few_rows_kernel(n: int, k: int, num_groups: int, dtype: torch.dtype, *, octets: int, early: bool):
    """Up to 16 rows of a, in all groups together. With groups, the block of the first row of a group multiplies it."""
    elem, size = T.dtype(dtype), dtype.itemsize
    lanes = 16 // size  # channels of a lane in a tile
    fp8 = dtype is FP8
    out = T.bfloat16 if fp8 else elem
    name = {torch.bfloat16: 'bf16', torch.float16: 'fp16', FP8: 'e4m3'}[dtype]
    shape = 'm16n8k32' if fp8 else 'm16n8k16'
    num_rows = T.dynamic('num_rows')
    num_matrices = max(num_groups, 1)
    tile_k = TILE_BYTES // size
    strips, cols = -(-n // (STRIP * ROWS)), -(-k // tile_k)
    splits = few_rows_splits(n, k, size)
    slice_tiles = -(-cols // splits)
    slice_k, tokens, threads = slice_tiles * tile_k, octets * 8, ROW_WARPS * WARP
    groups, slice_groups = -(-k // GROUP), -(-slice_k // GROUP) + 1

    @macro
    def copy_tile(b, matrix, strip, r, tile, last, b_shared):
        """Start to copy the bytes of this lane of a tile; every call is one group of copies."""
        thread = T.get_thread_binding()
        channel = tile * tile_k + thread % 4 * lanes
        if tile < last:
            for half in (0, 1):
                row = T.min((strip * STRIP + r) * ROWS + half * 8 + thread % WARP // 4, n - 1)
                if channel < k:
                    T.ptx_cp_async(
                        T.access_ptr(b_shared[r, half, thread, 0], 'w', lanes),
                        T.access_ptr(b[matrix, row, channel], 'r', lanes),
                        lanes,
                    )
                else:
                    for e in T.vectorized(lanes):
                        b_shared[r, half, thread, e] = T.cast(0, elem)
        T.ptx_commit_group()

    @T.prim_func
    def few_rows(
        a: T.Tensor((num_rows, k), elem),
        b: T.Tensor((num_matrices, n, k), elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        a_sf: T.Tensor((num_rows, groups), T.float32),
        b_sf: T.Tensor((-(-n // GROUP), groups), T.float32),
        d: T.Tensor((num_rows, n), out),
        part: T.Tensor((splits, num_rows, n), T.float32),
    ):
        with T.Kernel(strips, splits, num_rows if num_groups else 1, threads=threads) as (strip, split, row):
            if early:
                begin_early()
            T.annotate_min_blocks_per_sm(1 if fp8 and octets == 2 else 2)  # the sums of groups need registers, too
            thread = T.get_thread_binding()
            warp, lane = thread // WARP, thread % WARP
            a_shared = T.alloc_shared((tokens, slice_k + lanes), elem)
            b_shared = T.alloc_shared((STRIP, 2, threads, lanes), elem)
            sf_shared = T.alloc_shared((tokens, slice_groups), T.float32)
            sum_shared = T.alloc_shared((ROW_WARPS, tokens, STRIP * ROWS + 4), T.float32)
            a_local = T.alloc_local((octets, lanes), elem)
            b_local = T.alloc_local((2, lanes), elem)
            pair_local = T.alloc_local((4,), T.uint32)
            total_local = T.alloc_local((STRIP, octets, 4), T.float32)
            group_local = T.alloc_local((1, octets, 4), T.float32)
            vector_local = T.alloc_local((lanes,), elem)
            place = T.alloc_local((3,), T.int32)
            b_words = T.view(b_local, (2, 4), T.uint32)
            a_words = T.view(a_local, (octets, 4), T.uint32)
            find_group(group_end, row, num_rows, num_groups, place)
            start, end = place[1], place[2]
            matrix = T.min(place[0], num_matrices - 1)
            first = split * slice_tiles
            last = T.if_then_else(place[0] < num_matrices, T.min(first + slice_tiles, cols), first)
            if start == row or num_groups == DENSE:
                for r in T.unroll(STRIP):
                    copy_tile(b, matrix, strip, r, first + warp, last, b_shared)
                for i in T.unroll(T.ceildiv(tokens * slice_k // lanes, threads), unroll_factor=4):
                    vector = i * threads + thread
                    token, channel = vector // (slice_k // lanes), vector % (slice_k // lanes) * lanes
                    if token < tokens:
                        if start + token < end and first * tile_k + channel < k:
                            for e in T.vectorized(lanes):
                                vector_local[e] = a[start + token, first * tile_k + channel + e]
                        else:
                            for e in T.vectorized(lanes):
                                vector_local[e] = T.cast(0, elem)
                        for e in T.vectorized(lanes):
                            a_shared[token, channel + e] = vector_local[e]
                if fp8:
                    for i in T.serial(T.ceildiv(tokens * slice_groups, threads)):
                        token, group = (i * threads + thread) // slice_groups, (i * threads + thread) % slice_groups
                        column = first * tile_k // GROUP + group
                        if token < tokens:
                            sf_shared[token, group] = 0.0
                            if token < num_rows and column < groups:
                                sf_shared[token, group] = a_sf[token, column] * b_sf[strip, column]
                T.clear(total_local)
                T.sync_threads()
                # A shift: TVM takes this ceildiv for 1 where some warps have no tile.
                for turn in T.serial(T.shift_right(T.max(last - first - warp, 0) + ROW_WARPS - 1, TURN_BITS)):
                    tile = first + warp + turn * ROW_WARPS
                    channel = (tile - first) * tile_k + lane % 4 * lanes
                    for octet in T.unroll(octets):
                        for e in T.vectorized(lanes):
                            a_local[octet, e] = a_shared[octet * 8 + lane // 4, channel + e]
                    for r in T.unroll(STRIP):
                        T.ptx_wait_group(STRIP - 1)
                        for half in T.unroll(2):
                            for e in T.vectorized(lanes):
                                b_local[half, e] = b_shared[r, half, thread, e]
                        if fp8:
                            T.clear(group_local)
                        for step in T.unroll(2):
                            for e in T.unroll(4):
                                pair_local[e] = b_words[e % 2, step * 2 + e // 2]
                            for octet in T.unroll(octets):
                                sums = group_local if fp8 else total_local
                                T.ptx_mma(
                                    'float32',
                                    shape,
                                    'row',
                                    'col',
                                    name,
                                    name,
                                    'fp32',
                                    T.access_ptr(pair_local[0], 'r', 4),
                                    0,
                                    T.access_ptr(a_words[octet, step * 2], 'r', 2),
                                    0,
                                    T.access_ptr(sums[0 if fp8 else r, octet, 0], 'rw', 4),
                                    0,
                                    T.bool(False),
                                )
                        if fp8:
                            group = tile * tile_k // GROUP - first * tile_k // GROUP
                            for octet in T.unroll(octets):
                                for e in T.unroll(4):
                                    factor = sf_shared[octet * 8 + lane % 4 * 2 + e % 2, group]
                                    total_local[r, octet, e] = T.ieee_fmaf(
                                        group_local[0, octet, e], factor, total_local[r, octet, e]
                                    )
                        copy_tile(b, matrix, strip, r, tile + ROW_WARPS, last, b_shared)
                T.ptx_wait_group(0)
                T.sync_threads()
                for r in T.unroll(STRIP):
                    for octet in T.unroll(octets):
                        for e in T.unroll(4):
                            column = r * ROWS + e // 2 * 8 + lane // 4
                            sum_shared[warp, octet * 8 + lane % 4 * 2 + e % 2, column] = total_local[r, octet, e]
                T.sync_threads()
                for i in T.unroll(tokens * STRIP * ROWS // threads):
                    width = STRIP * ROWS
                    token, column = i * (threads // width) + thread // width, thread % width
                    if start + token < end and strip * width + column < n:
                        total = T.alloc_var(T.float32, init=0.0)
                        for w in T.unroll(ROW_WARPS):
                            total = total + sum_shared[w, token, column]
                        if splits > 1:
                            part[split, start + token, strip * width + column] = total
                        else:
                            d[start + token, strip * width + column] = T.cast(total, out)

    return few_rows


SUM_THREADS = 256


@kernel()
def sum_splits_kernel(n: int, dtype: torch.dtype, bias_dtype: torch.dtype | None):
    """Add the sums of the blocks that share k, in ascending order, and the bias."""
    num_rows, splits = T.dynamic('num_rows'), T.dynamic('splits')
    bias_elem = T.dtype(bias_dtype or dtype)

    @T.prim_func
    def sum_splits(
        part: T.Tensor((splits, num_rows, n), T.float32),
        bias: T.Tensor((n,), bias_elem),
        d: T.Tensor((num_rows, n), T.dtype(dtype)),
    ):
        with T.Kernel(T.ceildiv(n, SUM_THREADS), num_rows, threads=SUM_THREADS) as (block, row):
            column = block * SUM_THREADS + T.get_thread_binding()
            T.pdl_sync()
            if column < n:
                total = T.alloc_var(T.float32, init=0.0)
                for split in T.serial(splits):
                    total = total + part[split, row, column]
                if bias_dtype is not None:
                    total = total + T.cast(bias[column], T.float32)
                d[row, column] = T.cast(total, T.dtype(dtype))

    return sum_splits
