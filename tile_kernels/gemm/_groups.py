"""Groups of rows and the tiles they are cut into, shared by the grouped products.

A tile of `block_m` rows never crosses the end of a group. A thread block counts the tiles of all groups when it starts,
so that it finds the group of a tile by bisection; thread blocks take equally many, since no number is without a tile.
The rows a tile reads behind the end of its group belong to others; their products are not stored.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tile_kernels.core import check
from tile_kernels.core.device import arch_number, arch_of, num_sms_of
from tile_kernels.core.knobs import knobs
from tile_kernels.core.lang import T, macro

HALVES = (torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
AMAX_FLOOR = 1e-4
GROUP = 128  # channels that share a scale factor; also the rows of b that do, and a step of the sum

HOPPER = 90
WARPGROUP = 128
WARPGROUP_ROWS = 64  # of a tile, which one warpgroup multiplies
MAX_GROUPS = 4096
DENSE = 0  # groups of a product of all rows with one matrix: nothing says where they end
BAND = 16  # rows of tiles that a dense product finishes before it goes on to the next
#: Registers of a thread where one warpgroup loads for two that multiply; together the 64 K of an SM.
LOADING_REGISTERS, MULTIPLYING_REGISTERS = 24, 240
NUM_SMS_WITHOUT_GPU = 3  # few, so that the interpreter sees a thread block take several tiles

#: Warps with different roles meet at barriers of their own; one for all threads would stop them for ever.
#: Every index is in bounds by what the kernel says itself: further guards would cost registers.
EXPLICIT_BARRIERS = {
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
}


def wastes_little(extent: int, block: int) -> bool:
    """Whether blocks of this size cover the extent with few columns to spare: they are faster than smaller ones."""
    return 4 * (-(-extent // block) * block - extent) <= extent


def swizzled(buffer: Any) -> Any:
    """A layout of shared memory in which neither the rows of a tile nor its columns meet in a bank."""
    from tilelang.layout import make_swizzled_layout

    return make_swizzled_layout(buffer)


@macro
def count_tiles(group_end, first_shared, num_rows, num_groups: int, block_m: int, num_threads: int):
    """`first_shared[g]` = tiles of the groups before g, for g up to `num_groups`. All threads take part."""
    thread = T.get_thread_binding()
    for part in T.serial(T.ceildiv(num_groups, num_threads)):
        if part * num_threads + thread < num_groups:
            first_shared[part * num_threads + thread + 1] = T.min(group_end[part * num_threads + thread], num_rows)
    T.sync_threads()
    if thread < 32:
        before = T.alloc_var(T.int32, init=0)  # tiles of earlier parts
        start = T.alloc_var(T.int32, init=0)  # of this thread's group
        count = T.alloc_var(T.int32, init=0)
        other = T.alloc_var(T.int32, init=0)
        last = T.alloc_var(T.int32, init=0)  # where the groups of earlier parts end
        for part in T.serial(T.ceildiv(num_groups, 32)):
            group = part * 32 + thread
            end = first_shared[T.min(group, num_groups - 1) + 1]
            start = T.shfl_up(end, 1)
            if thread == 0:
                start = last
            count = T.if_then_else(group < num_groups, T.truncdiv(T.max(end - start, 0) + block_m - 1, block_m), 0)
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


def num_tiles(group_end: Any, first_shared: Any, num_rows: Any, num_groups: int, block_m: int, tiles_n: int) -> Any:
    """Tiles of all groups and of the rows behind them, times the `tiles_n` tiles of a row of tiles."""
    if num_groups == DENSE:
        return T.truncdiv(num_rows + block_m - 1, block_m) * tiles_n
    behind = T.max(num_rows - group_end[num_groups - 1], 0)
    return (first_shared[num_groups] + T.truncdiv(behind + block_m - 1, block_m)) * tiles_n


@macro
def locate_tile(group_end, first_shared, index, num_rows, num_groups: int, block_m: int, tiles_n: int, tile):
    """`tile` = (group, first row, end of the group, 1 if there is something to multiply, number in its row of tiles).

    The rows behind all groups are group `num_groups`, which has no matrix: they are only stored, as zeros.
    """
    if num_groups == DENSE:
        # Tiles that run at a time form a rectangle as high as wide: their operands stay in the L2 cache.
        band = T.truncdiv(index, BAND * tiles_n)
        inner = index - band * (BAND * tiles_n)
        height = T.max(T.min(T.truncdiv(num_rows + block_m - 1, block_m) - band * BAND, BAND), 1)
        tile[0] = 0
        tile[4] = T.truncdiv(inner, height)
        tile[1] = T.if_then_else(tile[4] < tiles_n, (band * BAND + T.truncmod(inner, height)) * block_m, num_rows)
        tile[2] = num_rows
        tile[3] = T.if_then_else(tile[1] < num_rows, 1, 0)
    else:
        tile[0] = 0
        tile_m = T.truncdiv(index, tiles_n)
        for step in T.unroll(num_groups.bit_length(), unroll_factor=1):
            later = tile[0] + (1 << (num_groups.bit_length() - 1 - step))
            if later <= num_groups and first_shared[T.min(later, num_groups)] <= tile_m:
                tile[0] = later
        locate_rows(group_end, tile_m - first_shared[tile[0]], num_rows, num_groups, block_m, tile)
        tile[4] = T.truncmod(index, tiles_n)


@macro
def locate_rows(group_end, tile_in_group, num_rows, num_groups: int, block_m: int, tile):
    """`tile[1:4]` of a tile of group `tile[0]`; see `locate_tile`."""
    group = tile[0]
    start = T.if_then_else(group > 0, group_end[T.max(group, 1) - 1], 0)
    tile[1] = start + tile_in_group * block_m
    tile[2] = T.if_then_else(group < num_groups, T.min(group_end[T.min(group, num_groups - 1)], num_rows), num_rows)
    tile[3] = T.if_then_else(group < num_groups and tile[1] < tile[2], 1, 0)


@macro
def find_rows(group_end, group, num_rows, num_groups: int, rows):
    """`rows` = where the rows of the group begin and end, which is never before; there are none behind the groups."""
    if num_groups == DENSE:
        rows[0] = 0
        rows[1] = T.if_then_else(group > 0, 0, num_rows)
    else:
        rows[0] = T.if_then_else(group > 0, group_end[T.max(T.min(group, num_groups), 1) - 1], 0)
        rows[1] = T.max(T.min(group_end[T.min(group, num_groups - 1)], num_rows), rows[0])


def num_turns(tiles: Any, num_blocks: Any) -> Any:
    """Turns after which `num_blocks` thread blocks have taken all tiles; in the last some find none."""
    return T.truncdiv(tiles + num_blocks - 1, num_blocks)


def silu(x: Any) -> Any:
    """The SiLU x / (1 + exp(-x)) by the bare functions of the hardware, exact enough for what is stored."""
    return x * T.fast_rcp(1.0 + T.__exp(-x))


@macro
def skip_steps(full, free, used, steps, ring: int):
    """Hand the buffers of a tile back: a warpgroup whose rows lie behind the end of the group has no use for them."""
    for _ in T.unroll(steps, unroll_factor=1):
        slot = T.truncmod(used[0], ring)
        T.mbarrier_wait_parity(full[slot], T.truncdiv(used[0], ring) & 1)
        T.barrier_arrive(free[slot])
        used[0] += 1


@macro
def store_rows(acc_frag, d_shared, d, row, end, col, width: int, block_n: int, member: int):
    """Store what warpgroup `member` has summed, by way of `d_shared`: the rows from `row` on that lie before `end`.

    A whole tile is left to the copy engine, which stores while the warpgroup goes on; the next call waits for it.
    """
    T.tma_store_wait(0)
    T.sync_threads(8 + member, WARPGROUP)
    T.copy(acc_frag, d_shared)
    T.fence_proxy_async()
    T.sync_threads(8 + member, WARPGROUP)
    if row + WARPGROUP_ROWS <= end:
        T.tma_copy(d_shared, d[row : row + WARPGROUP_ROWS, col : col + block_n])
    else:
        for part in T.unroll(WARPGROUP_ROWS // 8, unroll_factor=1):  # rare: neither code nor registers are spent on it
            for i, j in T.Parallel(8, block_n):
                if row + part * 8 + i < end and col + j < width:
                    d[row + part * 8 + i, col + j] = d_shared[part * 8 + i, j]


def num_workers(x: Tensor) -> int:
    """Thread blocks that take the tiles by turns: one for each SM of the GPU of `x`. Results do not depend on it."""
    if not x.is_cuda or isinstance(x, FakeTensor):
        return NUM_SMS_WITHOUT_GPU
    return knobs.num_sms or num_sms_of(x.get_device())


def has_warpgroups(x: Tensor) -> bool:
    """Whether the GPU of `x` multiplies by warpgroups, as Hopper does; without a GPU it is taken for one."""
    return not x.is_cuda or isinstance(x, FakeTensor) or arch_number(arch_of(x.get_device())) == HOPPER


# Checks -------------------------------------------------------------------------------------


def check_operands(extents: tuple[int, ...], **operands: Tensor) -> None:
    """What the loads of a product need of its operands."""
    for name, x in operands.items():
        check.contiguous(x, name)
        for extent in extents:
            check.multiple(extent * x.element_size(), 16, f'the bytes of a row of {name}')
        if check.vector_bytes(x) < 16:
            check.fail(name, 'must begin at a multiple of 16 bytes', check.describe(x), hint=f'pass {name}.clone()')
    check.same_device(**operands)


def check_groups(group_end: Tensor, num_groups: int, a: Tensor) -> None:
    """Where the groups of the rows of `a` end."""
    check.at_most(num_groups, MAX_GROUPS, 'num_groups')
    check.shape(group_end, 'group_end', 'num_groups', dtype=torch.int32, num_groups=num_groups)
    check.contiguous(group_end, 'group_end')
    check.same_device(a=a, group_end=group_end)


def check_product(a: Tensor, b: Tensor, group_end: Tensor) -> tuple[int, int, int, int]:
    """The operands of a product in half precision; returns num_rows, num_groups, n, k."""
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=HALVES)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=a.dtype, k=k)
    check_operands((n, k), a=a, b=b)
    check_groups(group_end, num_groups, a)
    return num_rows, num_groups, n, k


def check_gradient(dd: Tensor, a: Tensor, b: Tensor, group_end: Tensor) -> tuple[int, int, int, int]:
    """The same with the gradient of the result."""
    num_rows, n = check.shape(dd, 'dd', 'num_rows n', dtype=HALVES)
    _, k = check.shape(a, 'a', 'num_rows k', dtype=dd.dtype, num_rows=num_rows)
    num_groups, _, _ = check.shape(b, 'b', 'num_groups n k', dtype=dd.dtype, n=n, k=k)
    check_operands((n, k), dd=dd, a=a, b=b)
    check_groups(group_end, num_groups, a)
    return num_rows, num_groups, n, k


def check_fp8(
    a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor, group_end: Tensor, multiple_of: int
) -> tuple[int, int, int, int]:
    """The operands of a product of fp8 codes; returns num_rows, num_groups, n (a multiple as given), k."""
    num_rows, k = check.shape(a, 'a', 'num_rows k', dtype=FP8)
    num_groups, n, _ = check.shape(b, 'b', 'num_groups n k', dtype=FP8, k=k)
    sf = dict(dtype=torch.float32, depth_groups=-(-k // GROUP))
    check.packed(a_sf, 'a_sf', 'num_rows depth_groups', num_rows=num_rows, **sf)
    check.packed(b_sf, 'b_sf', 'num_groups n_groups depth_groups', num_groups=num_groups, n_groups=-(-n // GROUP), **sf)
    check_operands((k,), a=a, b=b)
    check_groups(group_end, num_groups, a)
    check.same_device(a=a, a_sf=a_sf, b_sf=b_sf)
    check.multiple(n, multiple_of, 'the rows of a matrix of b')
    return num_rows, num_groups, n, k


# Arguments of cases -------------------------------------------------------------------------


def random_ends(num_rows: int, num_groups: int, alignment: int = 1, behind: int = 0, whole: bool = False) -> Tensor:
    """Ends of groups of random sizes, some of them empty.

    `behind` rows or more follow the last group, none if `whole`.
    """
    cuts = torch.rand(num_groups).cumsum(0)
    ends = (cuts / cuts[-1:] * ((num_rows - behind) // alignment)).round().int() * alignment
    ends = torch.where(torch.arange(num_groups) % 3 == 1, ends.roll(1), ends).sort().values.int()
    if whole:
        ends[-1] = num_rows
    return ends


def product_flops(a: Tensor, b: Tensor, group_end: Tensor, **others: Tensor) -> int:
    """Operations of a grouped product: every row of a group meets all of its matrix."""
    return 2 * int(group_end[-1]) * b.shape[1] * b.shape[2]


def random_operands(num_rows: int, n: int, k: int, num_groups: int, dtype: torch.dtype, **ends) -> dict:
    """Arguments of a product in half precision."""
    a, b = torch.randn(num_rows, k, dtype=dtype), torch.randn(num_groups, n, k, dtype=dtype) / k**0.5
    return dict(a=a, b=b, group_end=random_ends(num_rows, num_groups, **ends))


def random_gradient(**case) -> dict:
    """The same with the gradient of the result."""
    made = random_operands(**case)
    return dict(dd=torch.randn(made['a'].shape[0], made['b'].shape[1], dtype=made['a'].dtype), **made)


def random_fp8(num_rows: int, n: int, k: int, num_groups: int, **ends) -> dict:
    """Arguments of a product of fp8 codes."""
    return dict(
        a=torch.randn(num_rows, k).to(FP8),
        a_sf=torch.rand(num_rows, -(-k // GROUP)) + 0.5,
        b=torch.randn(num_groups, n, k).to(FP8),
        b_sf=(torch.rand(num_groups, -(-n // GROUP), -(-k // GROUP)) + 0.5) / k**0.5,
        group_end=random_ends(num_rows, num_groups, **ends),
    )


def random_fp8_swiglu(**case) -> dict:
    """The same for SwiGLU: scale factors of up large enough for those of the result to be told apart from 0."""
    made = random_fp8(**case)
    gate_sf, up_sf = made['b_sf'].chunk(2, dim=1)
    return made | dict(b_sf=torch.cat((gate_sf, up_sf * 4096), dim=1))


SUMS = dict(rtol=1e-2, atol=1e-2)  # float32 sums in another order, rounded to half precision
CODES = dict(rtol=0.13, atol=0.25)  # a neighbour is an eighth away; fp8 sums keep 14 bits of their largest term
