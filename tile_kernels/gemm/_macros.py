"""Device macros of the products: tiles of row groups, the ring of stages between warpgroups, the stores.

A tile of `block_m` rows never crosses the end of a group. A thread block counts the tiles of all groups when it starts,
and then finds the group of a tile by bisection. Tiles are numbered without gaps, so all thread blocks process equally
many. A tile may read rows after the end of its group; their products are not stored.

Only the device knows the ends, so the host cannot check them. Group g ends at min(group_end[g], num_rows), or where the
group before it ends, if that is later. So no value of `group_end` leads outside a tensor.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.cost import count_product
from tile_kernels.core.jit import PLAIN_PRODUCTS
from tile_kernels.core.lang import WARP, T, macro

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
GROUP = 128  # channels per scale factor; also rows of b per scale factor, and depth of one step of the sum

WARPGROUP = 128
WARPGROUP_ROWS = 64  # rows of a tile that one warpgroup multiplies
DENSE = 0  # num_groups of a dense product
BAND = 16  # rows of tiles in a band; the next band starts after it, and the last band may be higher
#: Registers per thread if one warpgroup loads for two that multiply; together the 64 K registers of an SM.
LOADING_REGISTERS, MULTIPLYING_REGISTERS = 24, 240

#: Options of warp-specialized kernels. Their warpgroups use named barriers; an inserted barrier of all threads would
#: deadlock. The kernels guarantee that every index is in bounds; additional guards would cost registers.
WARPGROUP_ROLES: dict[str, Any] = dict(
    pass_configs={
        'TL_DISABLE_THREAD_STORAGE_SYNC': True,
        'TL_DISABLE_SHARED_MEMORY_REUSE': True,
        'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    },
    serves=lambda static, gpu: gpu.has_wgmma,
    flops=count_product,
)

#: The tile of a product with mma, which every GPU has, and its step along k.
MMA_M, MMA_N, MMA_K = 64, 128, 32
MMA_THREADS = 128
#: Options of the fallback of every product: `T.gemm` on tiles that the threads copy to shared memory. It is simple, and
#: it has not been timed on the GPUs that use it.
FALLBACK: dict[str, Any] = dict(pass_configs=PLAIN_PRODUCTS, flops=count_product)


def wastes_little(extent: int, block: int) -> bool:
    """Whether blocks of this size waste few columns of the extent; if so, they are faster than smaller ones."""
    return 4 * (-(-extent // block) * block - extent) <= extent


def swizzled(buffer: Any) -> Any:
    """A layout of shared memory without bank conflicts in the rows and the columns of a tile."""
    from tilelang.layout import make_swizzled_layout

    return make_swizzled_layout(buffer)


# Groups -------------------------------------------------------------------------------------


@macro
def end_before(group_end, group, num_rows, num_groups: int):
    """The first row of a group: the latest end of the groups before it. All lanes of a warp call this together."""
    latest = T.alloc_var(T.int32, init=0)
    for part in T.serial(T.ceildiv(T.min(group, num_groups), WARP)):
        other = part * WARP + T.truncmod(T.get_thread_binding(), WARP)
        if other < T.min(group, num_groups):
            latest = T.max(latest, group_end[T.min(other, num_groups - 1)])
    return T.min(T.warp_reduce_max(latest), num_rows)


# Tiles --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """The tiling of a product: rows in tiles of `block_m`, columns in `tiles_n` tiles."""

    group_end: Any
    first_shared: Any  # number of tiles before each group; written by `count_tiles`
    num_rows: Any
    num_groups: int
    block_m: int
    tiles_n: int


@macro
def count_tiles(tiles, num_threads: int):
    """`first_shared[g]` = number of tiles before group g, for g up to `num_groups`. All threads take part."""
    group_end, first_shared = tiles.group_end, tiles.first_shared
    num_rows, num_groups, block_m = tiles.num_rows, tiles.num_groups, tiles.block_m
    thread = T.get_thread_binding()
    for part in T.serial(T.ceildiv(num_groups, num_threads)):
        if part * num_threads + thread < num_groups:
            first_shared[part * num_threads + thread + 1] = T.min(group_end[part * num_threads + thread], num_rows)
    T.sync_threads()
    if thread < 32:
        before = T.alloc_var(T.int32, init=0)  # tiles of earlier parts
        start = T.alloc_var(T.int32, init=0)  # first row of this thread's group
        end = T.alloc_var(T.int32, init=0)
        count = T.alloc_var(T.int32, init=0)
        other = T.alloc_var(T.int32, init=0)
        last = T.alloc_var(T.int32, init=0)  # end of the last group of earlier parts
        for part in T.serial(T.ceildiv(num_groups, 32)):
            group = part * 32 + thread
            end = T.max(first_shared[T.min(group, num_groups - 1) + 1], last)
            for step in T.unroll(5):
                other = T.shfl_up(end, 1 << step)
                if thread >= 1 << step:
                    end = T.max(end, other)
            start = T.shfl_up(end, 1)
            if thread == 0:
                start = last
            count = T.if_then_else(group < num_groups, T.truncdiv(end - start + block_m - 1, block_m), 0)
            for step in T.unroll(5):
                other = T.shfl_up(count, 1 << step)
                if thread >= 1 << step:
                    count += other
            last = T.shfl_sync(end, 31)
            T.sync_warp()
            if group < num_groups:
                first_shared[group + 1] = before + count
            before += T.shfl_sync(count, 31)
        if thread == 0:
            first_shared[0] = 0
    T.sync_threads()


def num_turns(number: Any, num_blocks: Any) -> Any:
    """Iterations in which `num_blocks` thread blocks process this many tiles; the last may be partial."""
    return T.truncdiv(number + num_blocks - 1, num_blocks)


@macro
def count_turns(tiles, num_blocks, num_threads: int):
    """Count the tiles of the groups and of the rows after them; returns the iterations of `num_blocks` blocks."""
    tiles_m = T.alloc_var(T.int32, init=0)
    if tiles.num_groups == DENSE:
        tiles_m = T.truncdiv(tiles.num_rows + tiles.block_m - 1, tiles.block_m)
    else:
        count_tiles(tiles, num_threads)
        behind = tiles.num_rows - end_before(tiles.group_end, tiles.num_groups, tiles.num_rows, tiles.num_groups)
        tiles_m = tiles.first_shared[tiles.num_groups] + T.truncdiv(behind + tiles.block_m - 1, tiles.block_m)
    return num_turns(tiles_m * tiles.tiles_n, num_blocks)


@macro
def locate_tile(tiles, index, tile):
    """`tile` = (group, first row, end of the group, 1 if it needs a product, column index of the tile).

    The rows after all groups form group `num_groups`. This group has no matrix; its rows are stored as zeros.
    """
    num_groups, block_m, tiles_n = tiles.num_groups, tiles.block_m, tiles.tiles_n
    tile[0] = 0
    inner = index
    if num_groups != DENSE:
        first_shared = tiles.first_shared
        for step in T.unroll(num_groups.bit_length(), unroll_factor=1):
            later = tile[0] + (1 << (num_groups.bit_length() - 1 - step))
            if later <= num_groups and first_shared[T.min(later, num_groups)] * tiles_n <= index:
                tile[0] = later
        inner = index - first_shared[tile[0]] * tiles_n
        tile[1] = 0
        if tile[0] > 0:
            before = tile[0] - 1
            if first_shared[before] < first_shared[before + 1]:  # this group has rows, so it ends where it says
                tile[1] = T.min(tiles.group_end[before], tiles.num_rows)
            else:
                tile[1] = end_before(tiles.group_end, tile[0], tiles.num_rows, num_groups)
    bound_group(tiles.group_end, tiles.num_rows, num_groups, tile)
    # Tiles that run at the same time form a roughly square rectangle, so their operands stay in the L2 cache.
    tiles_m = T.truncdiv(tile[2] - tile[1] + block_m - 1, block_m)
    band = T.min(T.truncdiv(inner, BAND * tiles_n), T.max(T.truncdiv(tiles_m, BAND), 1) - 1)
    left = tiles_m - band * BAND
    height = T.max(T.if_then_else(left < 2 * BAND, left, BAND), 1)
    place = inner - band * (BAND * tiles_n)
    tile[4] = T.truncdiv(place, height)
    row = tile[1] + (band * BAND + T.truncmod(place, height)) * block_m
    tile[1] = T.if_then_else(tile[4] < tiles_n, row, tile[2])
    tile[3] = T.if_then_else(tile[0] < T.max(num_groups, 1) and tile[1] < tile[2], 1, 0)


@macro
def bound_group(group_end, num_rows, num_groups: int, tile):
    """`tile[2]` = end of group `tile[0]`; it is before the first row `tile[1]` if the group is empty."""
    if num_groups == DENSE:
        tile[1] = 0
        tile[2] = num_rows
    else:
        group = tile[0]
        tile[2] = T.if_then_else(group < num_groups, T.min(group_end[T.min(group, num_groups - 1)], num_rows), num_rows)


@macro
def find_rows(group_end, group, num_rows, num_groups: int, rows):
    """`rows` = first row and end of the group, end >= first; empty for an index after the last group."""
    if num_groups == DENSE:
        rows[0] = 0
        rows[1] = T.if_then_else(group > 0, 0, num_rows)
    else:
        rows[0] = end_before(group_end, group, num_rows, num_groups)
        rows[1] = T.max(T.min(group_end[T.min(group, num_groups - 1)], num_rows), rows[0])


# The ring -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Stages that the last warpgroup of a thread block fills for the `members` warpgroups before it."""

    full: Any
    free: Any
    used: Any  # number of stages this thread has filled or read
    size: int


@macro
def make_ring(size: int, members: int):
    """Create a ring of free stages. Each of the `members` multiplies its own rows of a tile."""
    full = T.alloc_barrier([WARPGROUP] * size)
    free = T.alloc_barrier([members * WARPGROUP] * size)
    used = T.alloc_local((1,), T.int32)
    used[0] = 0
    return Ring(full, free, used, size)


@macro
def next_free(ring):
    """Wait for the next stage to become free; returns its index."""
    slot = T.truncmod(ring.used[0], ring.size)
    T.mbarrier_wait_parity(ring.free[slot], (T.truncdiv(ring.used[0], ring.size) + 1) & 1)
    return slot


@macro
def next_full(ring):
    """Wait for the next stage to become full; returns its index."""
    slot = T.truncmod(ring.used[0], ring.size)
    T.mbarrier_wait_parity(ring.full[slot], T.truncdiv(ring.used[0], ring.size) & 1)
    return slot


@macro
def free_last(ring):
    """Release the previous stage."""
    T.barrier_arrive(ring.free[T.truncmod(ring.used[0] - 1, ring.size)])


@macro
def skip_steps(ring, steps):
    """Release the stages of a tile unread: the rows of this warpgroup are after the end of the group."""
    for _ in T.unroll(steps, unroll_factor=1):
        slot = next_full(ring)
        T.barrier_arrive(ring.free[slot])
        ring.used[0] += 1


@macro
def load_rows(x, row, end, depth, x_shared, slot, barrier):
    """Load the columns from `depth` on of the rows of a tile, 64 rows for each warpgroup with rows in the group."""
    for member in (0, 1)[: int(x_shared.shape[1])]:
        first = row + member * WARPGROUP_ROWS
        if first < end:
            T.tma_copy(
                x[first : first + WARPGROUP_ROWS, depth : depth + x_shared.shape[3]],
                x_shared[slot, member, :, :],
                barrier=barrier[slot],
            )


# Results ------------------------------------------------------------------------------------


def silu(x: Any) -> Any:
    """The SiLU x / (1 + exp(-x)) with fast hardware functions, which are accurate enough for the stored dtypes."""
    return x * T.fast_rcp(1.0 + T.__exp(-x))


@macro
def stage(acc_frag, first: int, d_shared, member: int):
    """Copy the columns from `first` on of the sums of warpgroup `member` to shared memory, for a TMA store.

    It first waits until the previous TMA store has read this memory.
    """
    T.tma_store_wait(0)
    T.sync_threads(8 + member, WARPGROUP)
    T.copy(acc_frag[:, first : first + d_shared.shape[1]], d_shared)
    T.fence_proxy_async()
    T.sync_threads(8 + member, WARPGROUP)


@macro
def store_rows(acc_frag, d_shared, d, row, end, col, width: int, member: int):
    """Store the sums of warpgroup `member` through `d_shared`: the rows from `row` on that are before `end`.

    TMA stores a whole tile while the warpgroup continues; the next call waits for it.
    """
    columns = int(d_shared.shape[1])
    for part in (0, 1, 2, 3)[: int(acc_frag.shape[1]) // columns]:
        first = part * columns
        stage(acc_frag, first, d_shared, member)
        if row + WARPGROUP_ROWS <= end:
            T.tma_copy(d_shared, d[row : row + WARPGROUP_ROWS, col + first : col + first + columns])
        else:
            lanes = 16 // d.dtype.itemsize  # a row is a multiple of 16 bytes, so stores have 16 bytes
            for rows in T.unroll(WARPGROUP_ROWS // 16, unroll_factor=1):  # rarely runs: a loop saves code and registers
                for i, j in T.Parallel(16, columns):
                    if row + rows * 16 + i < end and col + first + T.truncdiv(j, lanes) * lanes < width:
                        d[row + rows * 16 + i, col + first + j] = d_shared[rows * 16 + i, j]


# Products by mma ---------------------------------------------------------------------------


def most_tiles(num_rows: Any, num_groups: int, tiles_n: int) -> Any:
    """The number of tile indices; a group g from row r on starts at r // MMA_M + g, which leaves one spare index."""
    return (T.truncdiv(num_rows, MMA_M) + num_groups + 1) * tiles_n


@macro
def find_tile(group_end, index, num_rows, num_groups: int, tiles_n: int, tile):
    """The tile of an index, like `locate_tile`, but without counting the tiles: the thread block has only one.

    A group g begins at index start(g) // MMA_M + g, where start(g) is the latest end before it. So the index is before
    group g if an earlier group j has end(j) // MMA_M + g > tile_m. The smallest such g is a minimum over all j.
    """
    tile_m = T.truncdiv(index, tiles_n)
    tile[4] = T.truncmod(index, tiles_n)
    tile[0] = 0
    tile[1] = 0
    if num_groups != DENSE:
        found = T.alloc_var(T.int32, init=num_groups)
        for part in T.serial(T.ceildiv(num_groups, WARP)):
            other = part * WARP + T.truncmod(T.get_thread_binding(), WARP)
            if other < num_groups:
                end = T.max(T.min(group_end[T.min(other, num_groups - 1)], num_rows), 0)
                found = T.min(found, T.max(other, tile_m - T.truncdiv(end, MMA_M)))
        tile[0] = T.warp_reduce_min(found)
        tile[1] = end_before(group_end, tile[0], num_rows, num_groups)
    bound_group(group_end, num_rows, num_groups, tile)
    tile[1] += (tile_m - T.truncdiv(tile[1], MMA_M) - tile[0]) * MMA_M
    tile[3] = T.if_then_else(tile[0] < T.max(num_groups, 1) and tile[1] < tile[2], 1, 0)


@macro
def store_tile(acc_frag, d, row, end, col, width: int):
    """Store the rows before `end`."""
    for i, j in T.Parallel(MMA_M, MMA_N):
        if row + i < end and col + j < width:
            d[row + i, col + j] = acc_frag[i, j]
