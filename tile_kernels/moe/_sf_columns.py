"""Column-major scale factors in expert order.

One launch notes the token of every place; a later one gathers each tile of neighbouring places row by row into shared
memory and writes it column by column, so that both sides of global memory see whole sectors. Writing the factors of a
token directly, each to a sector of its own, made the whole up to twice as slow; of few places it saves a launch.
"""

import torch
from torch import Tensor

from tile_kernels.core.lang import T, macro
from tile_kernels.moe._rows import WARP

#: Places of a tile, and scale factors of each that are handled at a time.
TILE_PLACES = 64
TILE_GROUPS = 64

#: Up to so many places are written directly.
FEW_PLACES = 2048

#: Tokens of a block that notes them.
NOTE_THREADS = 128


def tile_shape(num_groups: int) -> tuple[int, int]:
    """Shape of the tile; the odd pitch lets neighbouring places lie in different banks."""
    return TILE_PLACES, min(num_groups, TILE_GROUPS) | 1


def empty_sf(num_expanded: int, num_groups: int, dtype: torch.dtype, col: bool, device: torch.device) -> Tensor:
    """Uninitialised scale factors, row-major or with 16-byte aligned columns."""
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
    """The first warp of a row writes its token at each of its places."""
    if T.get_thread_binding() % row_threads < WARP:
        for c in T.unroll(place_local.shape[0]):
            if place_local[c] >= 0 and place_local[c] < pos_to_token.shape[0]:
                pos_to_token[place_local[c]] = token


@macro
def note_tokens(token_topk_to_pos, token, pos_to_token):
    """Write a token at each of its places, by one thread."""
    if token < token_topk_to_pos.shape[0]:
        for k in T.unroll(token_topk_to_pos.shape[1], unroll_factor=16):
            pos = token_topk_to_pos[token, k]
            if pos >= 0 and pos < pos_to_token.shape[0]:
                pos_to_token[pos] = token


@macro
def gather_sf_columns(sf, pos_to_token, pos_to_expert, y_sf, first, num_threads, token_shared, tile_shared):
    """Write the scale factors of the places first, first + 1, ... of a tile: those of their token, 0 for padding.

    Waits for the launch before, which noted the tokens, so that its own may be made early.
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
