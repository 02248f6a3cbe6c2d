"""What the ops on residual streams share: tokens of any leading shape, and device code that walks their rows.

A token is `num_streams` rows of `hidden` elements. Either `row_threads` neighbouring threads own a token, and vector i
of each of its rows (`width` elements, 16 bytes) belongs to thread i % row_threads; or `parts` blocks share it, and each
thread has one vector of each row. So what a thread needs of all streams of a channel it reads itself.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.bits import widened

#: Streams a token may have.
STREAMS = (2, 4, 8)

#: Hidden sizes are multiples of this.
HIDDEN_MULTIPLE = 64

#: Code that walks rows keeps within them, so guards would only cost; explicit 16-byte stores stay whole where nvcc
#: splits plain ones of converted values.
ROW_PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True}

#: Threads that may own a token, or a part of it: whole warps, up to 256 threads.
ROW_THREADS = tuple(range(WARP, 257, WARP))


def lead_of(x: Tensor, name: str, spec: str, dtype: torch.dtype, lead: tuple | None = None, **known: int) -> tuple:
    """Check a contiguous tensor (*lead, *spec), extents of spec given by keyword; returns its leading shape."""
    check.dtype(x, name, dtype)
    names, shape = spec.split(), tuple(x.shape)
    rank = len(shape) - len(names)
    rule = f'must be (..., {", ".join(names)})'
    if rank < 0:
        check.fail(name, rule, check.describe(x))
    for dim, extent in zip(names, shape[rank:], strict=True):
        if known.get(dim, extent) != extent:
            check.fail(name, f'{rule} with {dim} = {known[dim]}', check.describe(x))
    if lead is not None and shape[:rank] != lead:
        check.fail(name, f'{rule} with the leading shape {lead}', check.describe(x))
    check.contiguous(x, name)
    return shape[:rank]


def check_streams(num_streams: int, hidden: int) -> None:
    """What the kernels are built for."""
    check.one_of(num_streams, STREAMS, 'the number of streams')
    check.at_least(hidden, HIDDEN_MULTIPLE, 'hidden')
    check.multiple(hidden, HIDDEN_MULTIPLE, 'hidden')


def flat(x: Tensor, lead: tuple, *inner: int) -> Tensor:
    """`x` with one dimension in place of the leading ones and `inner` for the others."""
    shape = (math.prod(lead), *inner)
    return x if tuple(x.shape) == shape else x.view(shape)  # a view costs a replayed call a microsecond


def vector_width(*tensors: Tensor | None) -> int:
    """Elements of the widest access that is aligned in all tensors (of one dtype), up to 16 bytes."""
    sizes = [x.element_size() for x in tensors if x is not None]
    return check.vector_bytes(*(x for x in tensors if x is not None)) // sizes[0]


def mix_width(num_streams: int, *mixes: Tensor) -> int:
    """Elements of an access to the float32 coefficients of a token, rows of `num_streams` or of one."""
    return math.gcd(num_streams, vector_width(*(mix.squeeze(-1) for mix in mixes)))


def row_threads_for(num_vectors: int, vectors: int, possible: Iterable[int] = ROW_THREADS) -> int:
    """Threads of a token: those with the fewest idle, of these the ones that leave about `vectors` to each."""
    return min(possible, key=lambda n: (-(-num_vectors // n) * n, abs(num_vectors / n - vectors)))


def part_threads_for(num_vectors: int) -> int:
    """Threads of a block that has a part of a token, a vector for each: of those with the fewest idle the most.

    Blocks that run at a time then read and write large pieces, close to each other.
    """
    return min(ROW_THREADS, key=lambda n: (-(-num_vectors // n) * n, -n))


def rows_for(row_threads: int) -> int:
    """Tokens of a block of about 128 threads."""
    return max(1, 128 // row_threads)


@macro
def load_vector(x, token, stream, index, x_local, slot):
    """`x_local[slot] = ` vector `index` of a row; x has streams, or is one row for each token."""
    width = x_local.shape[1]
    for e in T.vectorized(width):
        if len(x.shape) == 2:
            x_local[slot, e] = x[token, index * width + e]
        else:
            x_local[slot, e] = x[token, stream, index * width + e]


@macro
def store_vector(y_local, slot, y, token, stream, index):
    """Vector `index` of a row `= y_local[slot]`; y has streams, or is one row for each token."""
    width = y_local.shape[1]
    for e in T.vectorized(width):
        if len(y.shape) == 2:
            y[token, index * width + e] = y_local[slot, e]
        else:
            y[token, stream, index * width + e] = y_local[slot, e]


@macro
def load_streams(x, token, index, x_local, slot):
    """`x_local[slot + c] = ` vector `index` of stream c of a token."""
    for c in T.unroll(x.shape[1]):
        load_vector(x, token, c, index, x_local, slot + c)


@macro
def store_streams(y_local, y, token, index):
    """Write vector `index` of every stream of a token."""
    for c in T.unroll(y.shape[1]):
        store_vector(y_local, c, y, token, c, index)


@macro
def load_mix(mix, token, mix_local, width):
    """The coefficients of a token (num_streams, 1 or num_streams), `width` in an access."""
    last = mix.shape[2]
    for v in T.unroll(mix_local.shape[0] // width):
        for e in T.vectorized(width):
            mix_local[v * width + e] = mix[token, (v * width + e) // last, (v * width + e) % last]


def pairs_of(x_local):
    """Vectors of bfloat16 as words of two, where there are two."""
    slots, width = x_local.shape
    return x_local if width == 1 else T.view(x_local, (slots, width // 2), T.uint32)


@macro
def apply_to_vector(x_local, slot, mix_local, y_local):
    """`y_local[0] = sum_c mix[c] x_local[slot + c]`, in float32 from 0, c ascending, rounded once."""
    width = x_local.shape[1]
    pair = min(width, 2)
    total_local = T.alloc_local((pair,), T.float32)
    x_pairs = pairs_of(x_local)
    for first in T.unroll(width // pair):
        for half in (0, 1)[:pair]:
            total_local[half] = 0.0
            for c in T.unroll(mix_local.shape[0]):
                value = widened(x_pairs[slot + c, first], half)
                total_local[half] = T.ieee_fmaf(mix_local[c], value, total_local[half])
        for half in T.vectorized(pair):  # one instruction rounds two
            y_local[0, first * pair + half] = T.cast(total_local[half], y_local.dtype)


@macro
def post_to_vector(x_local, x_slot, residual_local, slot, post_local, comb_local, y_local):
    """`y[o] = post[o] x_local[x_slot] + sum_i comb[i, o] residual_local[slot + i]`, i ascending, rounded once."""
    num_streams, width = post_local.shape[0], x_local.shape[1]
    pair = min(width, 2)  # two elements of all streams at a time need the fewest registers
    total_local = T.alloc_local((pair,), T.float32)
    x_pairs, residual_pairs = pairs_of(x_local), pairs_of(residual_local)
    for first in T.unroll(width // pair):
        for o in T.unroll(num_streams):
            for half in (0, 1)[:pair]:
                total_local[half] = post_local[o] * widened(x_pairs[x_slot, first], half)
                for i in T.unroll(num_streams):
                    value = widened(residual_pairs[slot + i, first], half)
                    total_local[half] = T.ieee_fmaf(comb_local[i * num_streams + o], value, total_local[half])
            for half in T.vectorized(pair):  # one instruction rounds two; one that rounds one has a quarter of the rate
                y_local[o, first * pair + half] = T.cast(total_local[half], y_local.dtype)


@macro
def sum_scattered(value_local, count):
    """Sum `count` (a power of two, up to 32) values over the lanes of a warp.

    Lane l ends with the sum of value l // (32 / count) in `value_local[0]`: each step halves the values a lane keeps,
    so all sums together cost about as many shuffles as there are values.
    """
    lane = T.get_thread_binding() % WARP
    for step in (16, 8, 4, 2, 1):
        half = count * step // WARP
        upper = lane % (2 * step) >= step
        if half >= 1:
            for i in T.unroll(half):
                kept = T.if_then_else(upper, value_local[half + i], value_local[i])
                sent = T.if_then_else(upper, value_local[i], value_local[half + i])
                value_local[i] = kept + T.shfl_xor(sent, step)
        else:
            value_local[0] = value_local[0] + T.shfl_xor(value_local[0], step)
