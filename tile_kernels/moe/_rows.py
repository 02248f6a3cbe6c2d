"""Device code of the ops that move rows: a row is cut into vectors, `row_threads` neighbouring threads share it.

Vector i of a row belongs to thread i % row_threads. A thread holds a few of them in registers, `row_local[vectors,
width]`; a longer row is handled in several parts.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.lang import T, macro

WARP = 32

#: Type that moves an element of so many bytes as bits.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Code that walks rows keeps within them, so guards would only cost.
ROW_PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True}

#: The same where elements are converted before they are written: nvcc splits a plain 16-byte store of converted values
#: into words, an explicit one stays whole.
CONVERTED_ROW_PASS_CONFIGS = {**ROW_PASS_CONFIGS, 'TL_ENABLE_LOWER_LDGSTG': True}


def row_width(hidden: int, *tensors: Tensor) -> int:
    """Elements of the widest access that is aligned in every row of the tensors and divides a row."""
    return math.gcd(hidden, *(check.vector_bytes(x) // x.element_size() for x in tensors))


def row_threads_for(num_vectors: int, vectors: int = 8) -> int:
    """Threads that leave each up to `vectors` vectors of a row: a power of two, from a warp to 256."""
    return next((n for n in (32, 64, 128) if n * vectors >= num_vectors), 256)


def row_vectors(num_vectors: int, row_threads: int, max_vectors: int = 8) -> int:
    """Vectors of a row that a thread holds at a time: so many that it holds the same number each time."""
    parts = -(-num_vectors // (row_threads * max_vectors))
    return -(-num_vectors // (row_threads * parts))


def bits_of(x: Tensor) -> Tensor:
    """The same elements as integers of their size."""
    if x.element_size() not in BITS:
        check.fail('x', 'must have elements of 1, 2, 4 or 8 bytes', check.describe(x))
    return x.view(BITS[x.element_size()])


def check_places(token_topk_to_pos: Tensor, pos_to_expert: Tensor, num_tokens: int) -> tuple[int, int]:
    """Check the two maps of an expansion; returns num_topk and num_expanded."""
    _, num_topk = check.shape(
        token_topk_to_pos, 'token_topk_to_pos', 'num_tokens num_topk', dtype=torch.int32, num_tokens=num_tokens
    )
    (num_expanded,) = check.shape(pos_to_expert, 'pos_to_expert', 'num_expanded', dtype=torch.int32)
    check.contiguous(token_topk_to_pos, 'token_topk_to_pos')
    check.contiguous(pos_to_expert, 'pos_to_expert')
    return num_topk, num_expanded


@macro
def load_row(x, row, first, row_threads, row_local):
    """Read the vectors first, first + row_threads, ... of a row."""
    vectors, width = row_local.shape
    for v in T.unroll(vectors):
        if first + v * row_threads < x.shape[1] // width:
            for e in T.vectorized(width):
                row_local[v, e] = x[row, (first + v * row_threads) * width + e]


@macro
def store_row(row_local, y, row, first, row_threads):
    """Write the vectors first, first + row_threads, ... of a row."""
    vectors, width = row_local.shape
    for v in T.unroll(vectors):
        if first + v * row_threads < y.shape[1] // width:
            for e in T.vectorized(width):
                y[row, (first + v * row_threads) * width + e] = row_local[v, e]


@macro
def expand_row(x, token, token_topk_to_pos, y, row_threads, row_local):
    """Read the row of a token once and write it to each of its places; `row_threads` threads take part."""
    vectors, width = row_local.shape
    for part in T.serial(T.ceildiv(x.shape[1], width * vectors * row_threads)):
        first = part * vectors * row_threads + T.get_thread_binding() % row_threads
        load_row(x, token, first, row_threads, row_local)
        for k in T.unroll(token_topk_to_pos.shape[1], unroll_factor=8):
            pos = token_topk_to_pos[token, k]
            if pos >= 0 and pos < y.shape[0]:
                store_row(row_local, y, pos, first, row_threads)


@macro
def note_token(token, token_topk_to_pos, row_threads, pos_to_token):
    """Write `token` at each of its places; `row_threads` threads take part."""
    num_topk = token_topk_to_pos.shape[1]
    for i in T.serial(T.ceildiv(num_topk, row_threads)):
        k = i * row_threads + T.get_thread_binding() % row_threads
        if k < num_topk:
            pos = token_topk_to_pos[token, k]
            if pos >= 0 and pos < pos_to_token.shape[0]:
                pos_to_token[pos] = token


@macro
def find_padding(pos_to_expert, first):
    """A word per warp, bit i of which says: place first + i exists and belongs to no expert."""
    lane = T.get_thread_binding() % WARP
    expert = T.alloc_var(T.int32, init=0)
    if first + lane < pos_to_expert.shape[0]:
        expert = pos_to_expert[first + lane]
    return T.cast(T.ballot(expert < 0), T.uint32)


@macro
def clear_rows(y, first, which, row_local):
    """The warp writes zeros to the rows first + i of `y` whose bit i of `which` is set."""
    vectors, width = row_local.shape
    lane = T.get_thread_binding() % WARP
    T.clear(row_local)
    if which != T.uint32(0):
        for i in T.serial(WARP):
            if (which >> T.cast(i, T.uint32)) & T.uint32(1) != T.uint32(0):
                for part in T.serial(T.ceildiv(y.shape[1], width * vectors * WARP)):
                    store_row(row_local, y, first + i, part * vectors * WARP + lane, WARP)
