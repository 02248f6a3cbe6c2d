"""Kernel of `expand_to_fused`, and the macros of all ops that move rows.

`row_threads` neighboring threads own a row, or a part of a longer one. Each thread holds a few vectors of it in
registers, `row_local[vectors, width]`, with a stride of `row_threads` vectors. Other blocks own the other parts.
"""

from dataclasses import dataclass

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, macro
from tile_kernels.moe._checks import BITS

#: Kernels that walk rows stay within them, so guards are not needed.
ROW_PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True}

#: The same for kernels that convert elements before they write them. An explicit 16-byte store stays whole there; nvcc
#: would split a plain one into words.
CONVERTED_ROW_PASS_CONFIGS = {**ROW_PASS_CONFIGS, 'TL_ENABLE_LOWER_LDGSTG': True}

# Config -------------------------------------------------------------------------------------

#: Config space of the kernels that move rows.
ROW_SPACE = dict(row_threads=(32, 64, 128, 256), vectors=(1, 2, 4, 8), num_threads=(64, 128, 256, 512))


def row_threads_for(num_vectors: int, vectors: int = 8) -> int:
    """Threads of a row with up to `vectors` vectors each: a power of two, from 32 to 256."""
    return next((n for n in (32, 64, 128) if n * vectors >= num_vectors), 256)


def choose_rows(num_vectors: int, num_rows: int, num_threads: int = 128) -> dict:
    """Many rows: all of a row in flight at once. Few rows: one vector per thread and many small blocks."""
    if num_rows > 2048:
        return dict(row_threads=row_threads_for(num_vectors), vectors=8, num_threads=num_threads)
    return dict(row_threads=min(row_threads_for(num_vectors, 2), 128), vectors=1, num_threads=128)


@dataclass(frozen=True)
class RowSplit:
    """How a row is split: over `parts` blocks, `row_threads` threads in each, and `vectors` vectors per thread.

    A block has `rows` groups of `row_threads` threads, one row each.
    """

    parts: int
    vectors: int
    row_threads: int
    rows: int

    @classmethod
    def of(cls, num_vectors: int, row_threads: int, max_vectors: int, num_threads: int) -> 'RowSplit':
        """Up to `max_vectors` per thread, the same number in every part."""
        parts = -(-num_vectors // (row_threads * max_vectors))
        vectors = -(-num_vectors // (row_threads * parts))
        return cls(parts, vectors, row_threads, max(1, num_threads // row_threads))

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return self.rows * self.row_threads


def choose(hidden: int, elem_size: int, width: int, num_topk: int, num_expanded: int) -> dict:
    """Many rows: read all of a row before writing it. Few rows: many small blocks."""
    chosen = choose_rows(hidden // width, num_expanded) | dict(early=is_short(num_expanded * hidden * elem_size))
    return chosen | dict(vectors=4) if chosen['early'] and 256 <= num_expanded <= 2048 else chosen


# Rows ---------------------------------------------------------------------------------------


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
def load_places(token_topk_to_pos, token, place_local):
    """Lane i of every warp reads the positions of the slots i, i + 32, ... of a token, -1 where there is no slot."""
    num_topk = token_topk_to_pos.shape[1]
    for c in T.unroll(T.ceildiv(num_topk, WARP)):
        slot = c * WARP + T.get_thread_binding() % WARP
        place_local[c] = -1
        if slot < num_topk:
            place_local[c] = token_topk_to_pos[token, slot]


#: Positions that are written side by side.
SIDE_BY_SIDE = 8


def slots_at_once(num_topk: int) -> tuple[tuple[int, int], ...]:
    """First slot and number of slots of every round of positions that are written side by side."""
    return tuple((slot, min(SIDE_BY_SIDE, num_topk - slot)) for slot in range(0, num_topk, SIDE_BY_SIDE))


@macro
def take_places(place_local, slot, count, num_expanded, pos_local):
    """Positions of `count` slots from `slot` on, shuffled from the lanes that read them; -1 if out of range."""
    for k in T.unroll(count):
        pos_local[k] = T.shfl_sync(place_local[(slot + k) // WARP], (slot + k) % WARP)
        if pos_local[k] >= num_expanded:
            pos_local[k] = -1


@macro
def store_to_places(row_local, y, place_local, num_topk, first, row_threads):
    """Write the vectors first, first + row_threads, ... of a row to each of its positions.

    Each vector goes to all positions before the next one. This is faster than writing one row after another.
    """
    vectors, width = row_local.shape
    pos_local = T.alloc_local((SIDE_BY_SIDE,), T.int32)
    for slot, count in slots_at_once(num_topk):
        take_places(place_local, slot, count, y.shape[0], pos_local)
        for v in T.unroll(vectors):
            if first + v * row_threads < y.shape[1] // width:
                for k in T.unroll(count):
                    if pos_local[k] >= 0:
                        for e in T.vectorized(width):
                            y[pos_local[k], (first + v * row_threads) * width + e] = row_local[v, e]


# Padding ------------------------------------------------------------------------------------

#: Most positions that a group of threads checks for padding.
MAX_SHARE = 16


def num_shares(num_tokens, num_expanded):
    """Number of thread groups: one for each token, and enough to check all positions."""
    return T.max(num_tokens, T.ceildiv(num_expanded, MAX_SHARE))


def place_of(share, i, num_tokens, num_expanded):
    """Position i of thread group `share`. Positions of a group lie far apart, so all groups clear long padding."""
    return share + T.cast(num_shares(num_tokens, num_expanded), T.int64) * i


@macro
def find_padding(pos_to_expert, share, num_tokens):
    """A word per warp. Bit i says that position i of this thread group exists and has no expert."""
    num_expanded = pos_to_expert.shape[0]
    lane = T.get_thread_binding() % WARP
    expert = T.alloc_var(T.int32, init=0)
    place = place_of(share, lane, num_tokens, num_expanded)
    if lane < MAX_SHARE and share < num_shares(num_tokens, num_expanded) and place < num_expanded:
        expert = pos_to_expert[place]
    return T.cast(T.ballot(expert < 0), T.uint32)


@macro
def clear_places(which, share, num_tokens, y, vectors, width, first, row_threads):
    """Write zeros to the vectors first, first + row_threads, ... of the positions whose bit is set."""
    zero_local = T.alloc_local((vectors, width), y.dtype)
    T.clear(zero_local)
    if which != T.uint32(0):
        for i in T.serial(MAX_SHARE):
            if (which >> T.cast(i, T.uint32)) & T.uint32(1) != T.uint32(0):
                store_row(zero_local, y, place_of(share, i, num_tokens, y.shape[0]), first, row_threads)


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=ROW_SPACE | dict(early=EARLY), pass_configs=ROW_PASS_CONFIGS)
def expand_to_fused_kernel(
    hidden: int,
    elem_size: int,
    width: int,
    num_topk: int,
    *,
    row_threads: int,
    vectors: int,
    num_threads: int,
    early: bool = False,
):
    """Rows of `hidden` elements of `elem_size` bytes, `width` elements per access."""
    dtype = T.dtype(BITS[elem_size])
    split = RowSplit.of(hidden // width, row_threads, vectors, num_threads)
    num_tokens, num_expanded, x_pitch = (T.dynamic(name) for name in ('num_tokens', 'num_expanded', 'x_pitch'))

    @T.prim_func
    def expand_to_fused(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
        pos_to_expert: T.Tensor((num_expanded,), T.int32),
        y: T.Tensor((num_expanded, hidden), dtype),
    ):
        blocks = T.ceildiv(num_shares(num_tokens, num_expanded), split.rows)
        with T.Kernel(blocks * split.parts, threads=split.num_threads) as pid:
            if early:
                begin_early()
            T.assume(x_pitch % width == 0)
            row_local = T.alloc_local((split.vectors, width), dtype)
            place_local = T.alloc_local((T.ceildiv(num_topk, WARP),), T.int32)
            tx = T.get_thread_binding()
            first = pid % split.parts * (split.vectors * row_threads) + tx % row_threads
            token = pid // split.parts * split.rows + tx // row_threads

            if token < num_tokens:
                load_row(x, token, first, row_threads, row_local)
                load_places(token_topk_to_pos, token, place_local)
            padding = find_padding(pos_to_expert, token, num_tokens)
            clear_places(padding, token, num_tokens, y, split.vectors, width, first, row_threads)
            if token < num_tokens:
                store_to_places(row_local, y, place_local, num_topk, first, row_threads)

    return expand_to_fused
