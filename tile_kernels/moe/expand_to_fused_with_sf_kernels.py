"""Kernel of `expand_to_fused_with_sf`, and column-major scale factors in expert order.

One launch writes the token of every position. A later launch gathers tiles of neighboring positions: it reads them row
by row into shared memory and writes them column by column. Both sides of global memory then see whole sectors. Writing
the factors of a token directly uses one sector for each, which made the op up to twice as slow. For few positions the
direct write saves a launch.
"""

import torch
from torch import Tensor

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.moe._checks import BITS
from tile_kernels.moe.expand_to_fused_kernels import (
    ROW_PASS_CONFIGS,
    ROW_SPACE,
    RowSplit,
    choose_rows,
    clear_places,
    find_padding,
    load_places,
    load_row,
    num_shares,
    store_to_places,
)

#: Positions of a tile, and scale factors of each per step.
TILE_PLACES = 64
TILE_GROUPS = 64

#: Up to this number of positions is written directly.
FEW_PLACES = 2048

#: Threads of a block that writes `pos_to_token`.
NOTE_THREADS = 128

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
    """Many rows: read all of a row before writing it. Few rows: many small blocks."""
    return choose_rows(hidden // width, num_expanded) | dict(gather=col and num_expanded > FEW_PLACES)


# Scale factors ------------------------------------------------------------------------------


def tile_shape(num_groups: int) -> tuple[int, int]:
    """Shape of the tile; the odd pitch avoids bank conflicts."""
    return TILE_PLACES, min(num_groups, TILE_GROUPS) | 1


def empty_sf(num_expanded: int, num_groups: int, dtype: torch.dtype, col: bool, device: torch.device) -> Tensor:
    """Uninitialized scale factors, row-major or with 16-byte aligned columns."""
    if not col:
        return torch.empty((num_expanded, num_groups), dtype=dtype, device=device)
    aligned = 16 // dtype.itemsize
    pitch = (num_expanded + aligned - 1) // aligned * aligned
    columns = torch.empty_strided((pitch, num_groups), (1, pitch), dtype=dtype, device=device)
    return columns[:num_expanded]


def sf_type(num_expanded, num_groups: int, dtype, col: bool):
    """Parameter type of such scale factors."""
    if col:
        return T.StridedTensor((num_expanded, num_groups), (1, T.dynamic('sf_pitch')), dtype)
    return T.Tensor((num_expanded, num_groups), dtype)


@macro
def note_token(token, place_local, row_threads, pos_to_token):
    """The first warp of a row writes its token to `pos_to_token` at each of its positions."""
    if T.get_thread_binding() % row_threads < WARP:
        for c in T.unroll(place_local.shape[0]):
            if place_local[c] >= 0 and place_local[c] < pos_to_token.shape[0]:
                pos_to_token[place_local[c]] = token


@macro
def note_tokens(token_topk_to_pos, token, pos_to_token):
    """One thread writes a token to `pos_to_token` at each of its positions."""
    if token < token_topk_to_pos.shape[0]:
        for k in T.unroll(token_topk_to_pos.shape[1], unroll_factor=16):
            pos = token_topk_to_pos[token, k]
            if pos >= 0 and pos < pos_to_token.shape[0]:
                pos_to_token[pos] = token


@macro
def gather_sf_columns(sf, pos_to_token, pos_to_expert, y_sf, first, num_threads, token_shared, tile_shared):
    """Write the scale factors of a tile of positions from `first` on: those of their token, 0 for padding.

    Waits for the launch that wrote `pos_to_token` (PDL).
    """
    num_tokens, num_groups = sf.shape
    chunk = min(num_groups, TILE_GROUPS)
    items = -(-TILE_PLACES * chunk // num_threads)
    sf_local = T.alloc_local((items,), sf.dtype)
    token = T.alloc_var(T.int32, init=-1)
    tx = T.get_thread_binding()

    if tx < TILE_PLACES and first + tx < y_sf.shape[0]:
        token = pos_to_expert[first + tx]
    T.pdl_sync()
    if token >= 0:
        token = pos_to_token[first + tx]
    if tx < TILE_PLACES:
        token_shared[tx] = token
    T.sync_threads()
    for c in T.serial(T.ceildiv(num_groups, chunk)):
        T.clear(sf_local)
        for i in T.unroll(items):
            place, group = (i * num_threads + tx) // chunk, (i * num_threads + tx) % chunk
            if place < TILE_PLACES and c * chunk + group < num_groups:
                token = token_shared[place]
                if token >= 0 and token < num_tokens:
                    sf_local[i] = sf[token, c * chunk + group]
        for i in T.unroll(items):
            place, group = (i * num_threads + tx) // chunk, (i * num_threads + tx) % chunk
            if place < TILE_PLACES:
                tile_shared[place, group] = sf_local[i]
        T.sync_threads()
        for i in T.unroll(items):
            place, group = (i * num_threads + tx) % TILE_PLACES, (i * num_threads + tx) // TILE_PLACES
            if first + place < y_sf.shape[0] and group < chunk and c * chunk + group < num_groups:
                y_sf[first + place, c * chunk + group] = tile_shared[place, group]
        T.sync_threads()


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(**ROW_SPACE, gather=(False, True)), pass_configs=ROW_PASS_CONFIGS, fixed='gather')
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
    """Rows of `hidden` elements of `elem_size` bytes, `width` per access, and `num_groups` scale factors.

    With `gather`, tiles of column-major scale factors are gathered; `pos_to_token` is scratch.
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
