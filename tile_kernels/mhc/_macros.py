"""Device code that several kernels use, and the launch shapes that go with it.

Rows: a token is `num_streams` rows of `hidden` elements, and a vector is 16 bytes of a row. There are two layouts. In
the first, `row_threads` neighboring threads own a token and thread i reads vectors i, i + row_threads, ... of each row.
In the second, several blocks own a token and each thread reads one vector of each row. In both a thread reads the same
channels of all streams, so sums over streams need no other thread.

Splits: a TF32 number has 11 significant bits. It is the exact sum of a high and a low bfloat16 number, so a TF32
product becomes two bfloat16 products.
"""

from collections.abc import Iterable

from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.bits import widened

#: Accesses stay within rows, so bounds checks are off. Explicit 16-byte stores: nvcc splits plain stores of converted
#: values.
ROW_PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True}

#: Threads that own a token, or a block's part of it: whole warps, up to 256 threads.
ROW_THREADS = tuple(range(WARP, 257, WARP))

#: Blocks of a cluster on the GPUs that kernels with clusters are for; these also have 227 KB of shared memory.
LARGE_CLUSTER = 16

# Launch shapes ------------------------------------------------------------------------------


def row_threads_for(num_vectors: int, vectors: int, possible: Iterable[int] = ROW_THREADS) -> int:
    """Threads of a token: the fewest idle ones, then about `vectors` vectors for each."""
    return min(possible, key=lambda n: (-(-num_vectors // n) * n, abs(num_vectors / n - vectors)))


def part_threads_for(num_vectors: int) -> int:
    """Threads of a block where each thread has one vector: the fewest idle ones, then the most.

    Blocks that run at the same time then access large, contiguous ranges.
    """
    return min(ROW_THREADS, key=lambda n: (-(-num_vectors // n) * n, -n))


def rows_for(row_threads: int) -> int:
    """Tokens of a block of about 128 threads."""
    return max(1, 128 // row_threads)


# Rows ---------------------------------------------------------------------------------------


@macro
def load_vector(x, token, stream, index, x_local, slot):
    """Load vector `index` of a row into `x_local[slot]`; x has streams, or one row for each token."""
    width = x_local.shape[1]
    for e in T.vectorized(width):
        if len(x.shape) == 2:
            x_local[slot, e] = x[token, index * width + e]
        else:
            x_local[slot, e] = x[token, stream, index * width + e]


@macro
def store_vector(y_local, slot, y, token, stream, index):
    """Store `y_local[slot]` as vector `index` of a row; y has streams, or one row for each token."""
    width = y_local.shape[1]
    for e in T.vectorized(width):
        if len(y.shape) == 2:
            y[token, index * width + e] = y_local[slot, e]
        else:
            y[token, stream, index * width + e] = y_local[slot, e]


@macro
def load_streams(x, token, index, x_local, slot):
    """Load vector `index` of every stream c of a token into `x_local[slot + c]`."""
    for c in T.unroll(x.shape[1]):
        load_vector(x, token, c, index, x_local, slot + c)


@macro
def store_streams(y_local, y, token, index):
    """Store vector `index` of every stream of a token."""
    for c in T.unroll(y.shape[1]):
        store_vector(y_local, c, y, token, c, index)


@macro
def load_mix(mix, token, mix_local, width):
    """Load the coefficients of a token (num_streams, 1 or num_streams), `width` in an access."""
    last = mix.shape[2]
    for v in T.unroll(mix_local.shape[0] // width):
        for e in T.vectorized(width):
            mix_local[v * width + e] = mix[token, (v * width + e) // last, (v * width + e) % last]


def pairs_of(x_local):
    """Vectors of bfloat16 as words of two elements, unless a vector has only one."""
    slots, width = x_local.shape
    return x_local if width == 1 else T.view(x_local, (slots, width // 2), T.uint32)


@macro
def apply_to_vector(x_local, slot, mix_local, y_local):
    """`y_local[0] = sum_c mix[c] x_local[slot + c]`, summed in float32 from 0, c ascending, rounded once."""
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
        for half in T.vectorized(pair):  # one instruction rounds two elements
            y_local[0, first * pair + half] = T.cast(total_local[half], y_local.dtype)


@macro
def post_to_vector(x_local, x_slot, residual_local, slot, post_local, comb_local, y_local):
    """`y[o] = post[o] x_local[x_slot] + sum_i comb[i, o] residual_local[slot + i]`, i ascending, rounded once."""
    num_streams, width = post_local.shape[0], x_local.shape[1]
    pair = min(width, 2)  # two elements of all streams at a time take the fewest registers
    total_local = T.alloc_local((pair,), T.float32)
    x_pairs, residual_pairs = pairs_of(x_local), pairs_of(residual_local)
    for first in T.unroll(width // pair):
        for o in T.unroll(num_streams):
            for half in (0, 1)[:pair]:
                total_local[half] = post_local[o] * widened(x_pairs[x_slot, first], half)
                for i in T.unroll(num_streams):
                    value = widened(residual_pairs[slot + i, first], half)
                    total_local[half] = T.ieee_fmaf(comb_local[i * num_streams + o], value, total_local[half])
            for half in T.vectorized(pair):  # rounds two elements, at four times the rate of one
                y_local[o, first * pair + half] = T.cast(total_local[half], y_local.dtype)


@macro
def sum_scattered(value_local, count):
    """Sum `count` values (a power of two, up to 32) over the lanes of a warp.

    Lane l ends with the sum of value l // (32 / count) in `value_local[0]`. Each step halves the values a lane keeps,
    so all sums together take about `count` shuffles.
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


# Projections --------------------------------------------------------------------------------


def padded(num_mixes: int) -> int:
    """The number of mixes rounded up to a multiple of eight, as tensor cores need it."""
    return -(-num_mixes // 8) * 8


@macro
def round_to_tf32(value):
    """The nearest number of 11 significant bits, halves away from zero."""
    return T.reinterpret(rounded_bits(value) & T.uint32(0xFFFFE000), T.float32)


def rounded_bits(value):
    """Bits of a float32 whose first 11 significant bits are rounded to TF32; a NaN stays a NaN."""
    bits = T.reinterpret(value, T.uint32)
    return bits + T.Select((bits & T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000), T.uint32(0), T.uint32(0x1000))


@macro
def high_of(value):
    """The first 8 significant bits: the high bfloat16 part."""
    return T.reinterpret(T.reinterpret(value, T.uint32) & T.uint32(0xFFFF0000), T.float32)


@macro
def rstd_from(square_sum, inverse, eps):
    """`rsqrt(sum of squares * inverse + eps)`, rounded after each step, so every kernel gets the same bits."""
    return T.rsqrt(T.ieee_add(T.ieee_mul(square_sum, inverse), eps))


@macro
def sum_parts(part, count, in_flight):
    """The sum of `part(0)`, `part(1)`, ... in ascending order, with `in_flight` loads in flight.

    If fewer are left, the last round loads the last part several times: a branch for each part would serialize loads.
    """
    part_local = T.alloc_local((in_flight,), T.float32)
    total = T.alloc_var(T.float32)
    total = 0.0
    for first in T.serial(T.ceildiv(count, in_flight)):
        for s in T.unroll(in_flight):
            part_local[s] = part(T.min(first * in_flight + s, count - 1))
        for s in T.unroll(in_flight):
            total = total + T.if_then_else(first * in_flight + s < count, part_local[s], 0.0)
    return total


@macro
def affine(value, scale, base):
    """`value scale + base`, rounded once."""
    return T.ieee_fmaf(value, scale, base)


@macro
def sigmoid(z):
    """1 / (1 + exp(-z)), each step rounded separately."""
    return T.ieee_fdiv(T.float32(1.0), T.ieee_add(T.float32(1.0), T.exp(-z)))
