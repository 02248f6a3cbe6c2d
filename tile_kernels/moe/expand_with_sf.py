"""Expand quantised rows: codes and scale factors of every token go to each of its places in expert order.

    y[p, h]    = x[t, h]                                    p = token_topk_to_pos[t, k] >= 0
    y_sf[p, g] = x_sf[t, g]
    y[p, h]    = y_sf[p, g] = 0                             where pos_to_expert[p] < 0

Codes and row-major scale factors are moved like the rows of `expand`, by the same threads. Column-major ones of many
rows are gathered by blocks of their own, see `_sf_columns`; a small launch before finds the token of every place.
Memory bound: the floor is one read of x and x_sf and one write of y and y_sf.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._rows import (
    BITS,
    ROW_PASS_CONFIGS,
    ROW_SPACE,
    WARP,
    RowSplit,
    bits_of,
    check_places,
    choose_rows,
    clear_places,
    find_padding,
    load_places,
    load_row,
    num_shares,
    row_width,
    store_to_places,
)
from tile_kernels.moe._samples import random_places
from tile_kernels.moe._sf_columns import (
    FEW_PLACES,
    NOTE_THREADS,
    TILE_PLACES,
    empty_sf,
    gather_sf_columns,
    note_tokens,
    sf_type,
    tile_shape,
)

# Config -------------------------------------------------------------------------------------


def choose(
    hidden: int,
    elem_size: int,
    width: int,
    num_topk: int,
    num_groups: int,
    sf_size: int,
    sf_width: int,
    col: bool,
    num_expanded: int,
) -> dict:
    """Many rows: all of a row in flight before it is written. Few rows: many small blocks."""
    return choose_rows(hidden // width, num_expanded) | dict(gather=col and num_expanded > FEW_PLACES)


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(**ROW_SPACE, gather=(False, True)), pass_configs=ROW_PASS_CONFIGS)
def expand_with_sf_kernel(
    hidden: int,
    elem_size: int,
    width: int,
    num_topk: int,
    num_groups: int,
    sf_size: int,
    sf_width: int,
    col: bool,
    *,
    row_threads: int,
    vectors: int,
    num_threads: int,
    gather: bool,
):
    """Rows of `hidden` elements of `elem_size` bytes, `width` in an access, and `num_groups` scale factors alike.

    With `gather`, column-major scale factors are written by tiles; `pos_to_token` is scratch for that.
    """
    dtype, sf_dtype = T.dtype(BITS[elem_size]), T.dtype(BITS[sf_size])
    split = RowSplit.of(hidden // width, row_threads, vectors, num_threads)
    sf_vectors = -(-num_groups // (sf_width * row_threads * split.parts))
    num_tokens, num_expanded = T.dynamic('num_tokens'), T.dynamic('num_expanded')
    x_pitch, x_sf_pitch = T.dynamic('x_pitch'), T.dynamic('x_sf_pitch')

    @T.prim_func
    def expand_with_sf(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), dtype),
        x_sf: T.StridedTensor((num_tokens, num_groups), (x_sf_pitch, 1), sf_dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
        pos_to_expert: T.Tensor((num_expanded,), T.int32),
        pos_to_token: T.Tensor((num_expanded,), T.int32),
        y: T.Tensor((num_expanded, hidden), dtype),
        y_sf: sf_type(num_expanded, num_groups, sf_dtype, col),
    ):
        if gather:
            with T.Kernel(T.max(1, T.ceildiv(num_tokens, NOTE_THREADS)), threads=NOTE_THREADS) as pid:
                T.pdl_trigger()
                note_tokens(token_topk_to_pos, pid * NOTE_THREADS + T.get_thread_binding(), pos_to_token)

        tiles = T.ceildiv(num_expanded, TILE_PLACES) if gather else 0
        blocks = T.ceildiv(num_shares(num_tokens, num_expanded), split.rows)
        with T.Kernel(tiles + blocks * split.parts, threads=split.num_threads) as pid:
            T.assume(x_pitch % width == 0)
            T.assume(x_sf_pitch % sf_width == 0)
            row_local = T.alloc_local((split.vectors, width), dtype)
            sf_local = T.alloc_local((sf_vectors, sf_width), sf_dtype)
            place_local = T.alloc_local((T.ceildiv(num_topk, WARP),), T.int32)
            tx = T.get_thread_binding()
            part = (pid - tiles) % split.parts
            first = part * (split.vectors * row_threads) + tx % row_threads
            sf_first = part * (sf_vectors * row_threads) + tx % row_threads
            token = (pid - tiles) // split.parts * split.rows + tx // row_threads

            if gather:
                token_shared = T.alloc_shared((TILE_PLACES,), T.int32)
                tile_shared = T.alloc_shared(tile_shape(num_groups), sf_dtype)
            if gather and pid < tiles:
                gather_sf_columns(
                    x_sf,
                    pos_to_token,
                    pos_to_expert,
                    y_sf,
                    pid * TILE_PLACES,
                    split.num_threads,
                    token_shared,
                    tile_shared,
                )
            else:
                if token < num_tokens:
                    load_row(x, token, first, row_threads, row_local)
                    if not gather:
                        load_row(x_sf, token, sf_first, row_threads, sf_local)
                    load_places(token_topk_to_pos, token, place_local)
                padding = find_padding(pos_to_expert, token, num_tokens)
                clear_places(padding, token, num_tokens, y, split.vectors, width, first, row_threads)
                if not gather:
                    clear_places(padding, token, num_tokens, y_sf, sf_vectors, sf_width, sf_first, row_threads)
                if token < num_tokens:
                    if not gather:
                        store_to_places(sf_local, y_sf, place_local, num_topk, sf_first, row_threads)
                    store_to_places(row_local, y, place_local, num_topk, first, row_threads)

    return expand_with_sf


# Ops ----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def expand_with_sf(
    x: Tensor, x_sf: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, col: bool = False
) -> tuple[Tensor, Tensor]:
    """Copy codes and scale factors of every token to each of its places in expert order.

    Args:
        x: (num_tokens, stored) codes of any format in their container; rows may lie apart.
        x_sf: (num_tokens, num_groups) scale factors, row-major, packed or not; rows may lie apart.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no place.
        pos_to_expert: (num_expanded,) int32; its sign says whether a place is taken.
        col: whether the result's scale factors are column-major with 16-byte aligned columns.

    Returns:
        Codes (num_expanded, stored) and scale factors (num_expanded, num_groups), bits unchanged, 0 where
        pos_to_expert is negative.
    """
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden')
    _, num_groups = check.shape(x_sf, 'x_sf', 'num_tokens num_groups', num_tokens=num_tokens)
    num_topk, num_expanded = check_places(token_topk_to_pos, pos_to_expert, num_tokens)
    check.at_least(hidden, 1, 'hidden')
    check.unit_stride(x, 'x')
    check.unit_stride(x_sf, 'x_sf')
    check.same_device(x=x, x_sf=x_sf, token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert)
    y = torch.empty((num_expanded, hidden), dtype=x.dtype, device=x.device)
    y_sf = empty_sf(num_expanded, num_groups, x_sf.dtype, col, x.device)
    sf_width = 1 if col else row_width(num_groups, x_sf, y_sf)
    static = (hidden, x.element_size(), row_width(hidden, x, y), num_topk)
    static += (num_groups, x_sf.element_size(), sf_width, col)
    pos_to_token = torch.empty_like(pos_to_expert) if col else None
    maps = (token_topk_to_pos, pos_to_expert, pos_to_token)
    launch(
        expand_with_sf_kernel, static, bits_of(x), bits_of(x_sf), *maps, bits_of(y), bits_of(y_sf), size=num_expanded
    )
    return y, y_sf


@check.names(x_sf='x[1]')
def expand_to_fused_with_sf(
    x: tuple[Tensor, Tensor],
    num_per_channels: int,
    token_topk_to_pos: Tensor,
    pos_to_expert: Tensor,
    use_tma_aligned_col_major_sf: bool = False,
) -> tuple[Tensor, Tensor]:
    """Expand a quantised tensor with one scale factor for each token and `num_per_channels` channels.

    Args:
        x: codes (num_tokens, stored) and row-major scale factors (num_tokens, num_groups), float32 or packed int32.
        num_per_channels: channels that share a scale factor.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no place.
        pos_to_expert: (num_expanded,) int32; its sign says whether a place is taken.
        use_tma_aligned_col_major_sf: whether the result's scale factors are column-major, columns 16-byte aligned.

    Returns:
        Codes (num_expanded, stored) and scale factors (num_expanded, num_groups); 0 where pos_to_expert is negative.
    """
    data, sf = check.pair(x, 'x')
    check.at_least(num_per_channels, 1, 'num_per_channels')
    _, stored = check.shape(data, 'x[0]', 'num_tokens stored')
    num_groups = -(-stored * (2 if data.dtype is torch.int8 else 1) // num_per_channels)
    packed = sf.dtype is torch.int32
    check.shape(sf, 'x[1]', 'num_tokens num_groups', num_groups=-(-num_groups // 4) if packed else num_groups)
    return expand_with_sf(data, sf, token_topk_to_pos, pos_to_expert, use_tma_aligned_col_major_sf)


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    num_topk: int,
    hidden: int,
    dtype: torch.dtype,
    num_groups: int,
    sf_dtype: torch.dtype,
    col: bool,
    num_experts: int = 8,
    padding: int = 3,
    unrouted: float = 0.2,
) -> dict:
    token_topk_to_pos, pos_to_expert = random_places(num_tokens, num_topk, num_experts, unrouted, padding)
    return dict(
        x=torch.randint(0, 127, (num_tokens, hidden), dtype=torch.uint8).view(dtype),
        x_sf=torch.randint(0, 127, (num_tokens, num_groups), dtype=BITS[sf_dtype.itemsize]).view(sf_dtype),
        token_topk_to_pos=token_topk_to_pos,
        pos_to_expert=pos_to_expert,
        col=col,
    )


E4M3, F32, PACKED = torch.float8_e4m3fn, torch.float32, torch.int32
BENCH = dict(num_tokens=[4096, 21913], num_topk=[8], hidden=[7168], dtype=[E4M3], num_experts=[32], padding=[0])

expand_with_sf.cases(
    make=_make,
    match='bitwise',
    smoke=grid(
        num_tokens=[0, 1, 37],
        num_topk=[6],
        hidden=[256],
        dtype=[E4M3],
        num_groups=[8],
        sf_dtype=[F32, PACKED],
        col=[False, True],
    )
    + grid(  # a tail of groups, several chunks of them, one byte each
        num_tokens=[5],
        num_topk=[9],
        hidden=[67],
        dtype=[torch.int8],
        num_groups=[5, 131],
        sf_dtype=[E4M3],
        col=[False, True],
    )
    + grid(  # more padding than rows
        num_tokens=[6],
        num_topk=[2],
        hidden=[64],
        dtype=[E4M3],
        num_groups=[1],
        sf_dtype=[F32],
        col=[False, True],
        padding=[70],
    )
    + grid(  # so many places that tiles are gathered, one and several chunks of groups
        num_tokens=[37],
        num_topk=[6],
        hidden=[64],
        dtype=[E4M3],
        num_groups=[5, 70],
        sf_dtype=[F32],
        col=[True],
        padding=[240],
    ),
    full=grid(
        num_tokens=[4001],
        num_topk=[2, 8, 9],
        hidden=[576, 2048, 7168],
        dtype=[E4M3],
        num_groups=[18, 56, 224],
        sf_dtype=[F32, PACKED],
        col=[False, True],
    )
    + grid(  # more than 2^31 codes
        num_tokens=[100003],
        num_topk=[3],
        hidden=[7168],
        dtype=[E4M3],
        num_groups=[56],
        sf_dtype=[F32],
        col=[False, True],
    ),
    bench=grid(**BENCH, num_groups=[56], sf_dtype=[F32], col=[False, True], unrouted=[0.7])
    + grid(**BENCH, num_groups=[14], sf_dtype=[PACKED], col=[True], unrouted=[0.7])
    + grid(
        num_tokens=[64], num_topk=[8], hidden=[7168], dtype=[E4M3], num_groups=[56], sf_dtype=[F32], col=[False, True]
    ),
)
