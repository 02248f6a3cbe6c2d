"""Groups of rows and the tiles they are cut into, shared by the grouped products.

A tile of `block_m` rows never crosses the end of a group. Group g owns the tiles from

    first(g) = group_end[g - 1] // block_m + g

on, which leaves it one more than it can need: the ranges are disjoint whatever the sizes, and a thread block finds its
group by bisection of `first` with no pass over the groups before it. A tile past the end of its group does nothing.
The rows a tile reads behind the end of its group belong to others; their products are not stored.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.lang import T, macro

WARPGROUP = 128
MAX_GROUPS = 4096

#: Warps with different roles meet at barriers of their own; one for all threads would stop them for ever.
EXPLICIT_BARRIERS = {'TL_DISABLE_THREAD_STORAGE_SYNC': True, 'TL_DISABLE_SHARED_MEMORY_REUSE': True}


def swizzled(buffer: Any) -> Any:
    """A layout of shared memory in which neither the rows of a tile nor its columns meet in a bank."""
    from tilelang.layout import make_swizzled_layout

    return make_swizzled_layout(buffer)


def num_tiles(num_rows: Any, num_groups: int, block_m: int) -> Any:
    """Tiles of all groups and of the rows behind them."""
    return T.truncdiv(num_rows, block_m) + num_groups + 1


@macro
def locate_tile(group_end, index, num_rows, num_groups: int, block_m: int, tile):
    """`tile` = (group, first row, end of the group, 1 if there is something to multiply).

    The rows behind all groups are group `num_groups`, which has no matrix: they are only stored, as zeros.
    """
    tile[0] = 0
    for step in T.unroll((num_groups + 1).bit_length()):
        later = tile[0] + (1 << ((num_groups + 1).bit_length() - 1 - step))
        first = T.truncdiv(group_end[T.min(later, num_groups) - 1], block_m) + later
        if later <= num_groups and first <= index:
            tile[0] = later
    group = tile[0]
    start = T.if_then_else(group > 0, group_end[T.max(group, 1) - 1], 0)
    end = T.if_then_else(group < num_groups, T.min(group_end[T.min(group, num_groups - 1)], num_rows), num_rows)
    row = start + (index - T.truncdiv(start, block_m) - group) * block_m
    tile[1] = row
    tile[2] = end
    tile[3] = T.if_then_else(group < num_groups and row < end, 1, 0)


def check_operands(num_groups: int, group_end: Tensor, extents: tuple[int, ...], **operands: Tensor) -> None:
    """What the loads of a grouped product need of its operands, and where its groups end."""
    check.at_most(num_groups, MAX_GROUPS, 'num_groups')
    check.shape(group_end, 'group_end', 'num_groups', dtype=torch.int32, num_groups=num_groups)
    check.contiguous(group_end, 'group_end')
    for name, x in operands.items():
        check.contiguous(x, name)
        for extent in extents:
            check.multiple(extent * x.element_size(), 16, f'the bytes of a row of {name}')
        if check.vector_bytes(x) < 16:
            check.fail(name, 'must begin at a multiple of 16 bytes', check.describe(x), hint=f'pass {name}.clone()')
    check.same_device(**operands, group_end=group_end)


def random_ends(num_rows: int, num_groups: int, alignment: int = 1, behind: int = 0) -> Tensor:
    """Ends of groups of random sizes, some of them empty; `behind` rows follow the last."""
    cuts = torch.rand(num_groups).cumsum(0)
    ends = (cuts / cuts[-1:] * ((num_rows - behind) // alignment)).round().int() * alignment
    return torch.where(torch.arange(num_groups) % 3 == 1, ends.roll(1), ends).sort().values.int()
