"""Device code of the per-channel casts: rows of a lane, maxima and codes of channels, the turned tile."""

from typing import Any

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.lang import T, macro
from tile_kernels.quant._blocks import ROW_LANES, TILE_COLS, bytes_of_words, sf_value
from tile_kernels.quant._macros import LANE, float_of, lane_pairs, load_lane, sf_bytes

#: A transposed tile is square: 256 threads of 8 rows by 8 channels. Its rows are written in pieces of 16 bytes.
TURNING_ROWS, TURNING_THREADS = 8, 256
VECTOR_BYTES = 16
VECTORS = TILE_COLS // VECTOR_BYTES


@macro
def load_rows(x, x_sf, pos_to_token, first, source, slot, piece, hidden, x_local, factor):
    """The channels of a lane of the rows from `first` on, with the rows' factors if `source` is a format.

    With a map the rows are those it names. Rows that do not exist are 0.
    """
    rows = x_local.shape[0]
    T.clear(x_local)
    T.clear(factor)
    tokens = T.alloc_local((rows,), T.int32)
    if pos_to_token is not None:
        for i in T.unroll(rows):
            tokens[i] = -1
            if first + i < pos_to_token.shape[0]:
                tokens[i] = pos_to_token[first + i]
    for i in T.unroll(rows):
        token = first + i if pos_to_token is None else tokens[i]
        if T.cast(token, T.uint32) < T.cast(x.shape[0], T.uint32):  # a negative number is a large one
            load_lane(x, x_local, i, token, slot, piece, hidden)
            if isinstance(source, QuantFormat) and slot * LANE < hidden:
                factor[i] = sf_value(x_sf, source, token, slot // (source.sf_block[1] // LANE))


@macro
def _row_numbers(x_local, i, factor, v_local):
    """The numbers of a row of a lane in float32; codes are worth `factor[i]` times what they say."""
    if x_local.dtype == 'bfloat16':
        pairs = lane_pairs(x_local)
        for j in T.unroll(LANE // 2):
            v_local[2 * j] = float_of(pairs[i, j] << T.uint32(16))
            v_local[2 * j + 1] = float_of(pairs[i, j] & T.uint32(0xFFFF0000))
    else:
        for e in T.vectorized(LANE):
            v_local[e] = T.cast(x_local[i, e], T.float32)
    if factor is not None:
        for e in T.unroll(LANE):
            v_local[e] = v_local[e] * factor[i]


@macro
def _row_magnitudes(x_local, i, factor, v_local):
    """Their magnitudes. The sign leaves fp8 codes before they are decoded, so that the compiler sees other numbers.

    Kept from here until the result is computed, the numbers would take the registers of threads that could load.
    """
    if factor is not None:
        words = T.view(x_local, (x_local.shape[0], LANE // 4), T.uint32)
        unsigned = T.alloc_local((1, LANE // 4), T.uint32)
        for w in T.unroll(LANE // 4):
            unsigned[0, w] = words[i, w] & T.uint32(0x7F7F7F7F)
        codes = T.view(unsigned, (1, LANE), x_local.dtype)
        for e in T.vectorized(LANE):
            v_local[e] = T.cast(codes[0, e], T.float32)
        for e in T.unroll(LANE):
            v_local[e] = v_local[e] * factor[i]
    else:
        for e in T.vectorized(LANE):
            v_local[e] = T.abs(T.cast(x_local[i, e], T.float32))


@macro
def channel_amax(x_local, amax, factor=None):
    """`amax[e]` = largest magnitude of channel e over the rows of both row groups of the warp."""
    rows = x_local.shape[0]
    if x_local.dtype == 'bfloat16':
        pairs = lane_pairs(x_local)
        both = T.alloc_local((LANE // 2,), T.uint32)
        T.clear(both)
        for i in T.unroll(rows):
            for j in T.unroll(LANE // 2):
                both[j] = _max_pair(both[j], T.abs2(T.reinterpret(pairs[i, j], 'bfloat16x2')))
        for j in T.unroll(LANE // 2):
            both[j] = _max_pair(both[j], T.reinterpret(T.shfl_xor(both[j], ROW_LANES), 'bfloat16x2'))
            amax[2 * j] = float_of(both[j] << T.uint32(16))
            amax[2 * j + 1] = float_of(both[j] & T.uint32(0xFFFF0000))
    else:
        v_local = T.alloc_local((LANE,), T.float32)
        T.clear(amax)
        for i in T.unroll(rows):
            _row_magnitudes(x_local, i, factor, v_local)
            for e in T.unroll(LANE):
                amax[e] = T.max(amax[e], v_local[e])
        for e in T.unroll(LANE):
            amax[e] = T.max(amax[e], T.shfl_xor(amax[e], ROW_LANES))


def _max_pair(word: Any, pair: Any) -> Any:
    """Larger of two pairs of bf16, one by one, as a word."""
    return T.reinterpret(T.max2(T.reinterpret(word, 'bfloat16x2'), pair), T.uint32)


@macro
def encode_row(x_local, i, sf_inv, y_local, factor=None):
    """fp8 codes of a row of a lane, each channel with its own multiplier."""
    v_local = T.alloc_local((LANE,), T.float32)
    _row_numbers(x_local, i, factor, v_local)
    for e in T.unroll(LANE):
        v_local[e] = v_local[e] * sf_inv[e]
    for e in T.vectorized(LANE):
        y_local[e] = T.cast(v_local[e], y_local.dtype)


@macro
def store_channel_sf(y_sf, fmt, num_groups, group, channel, value):
    """Write the scale factor of a group of one channel; the last group also clears the bytes of missing groups."""
    if fmt.sf == 'ue8m0x4':
        packed = sf_bytes(y_sf)
        packed[group // 4, channel, group % 4] = value
        for b in T.unroll(3):
            if group == num_groups - 1 and group % 4 + 1 + b < 4:
                packed[group // 4, channel, group % 4 + 1 + b] = T.uint8(0)
    else:
        y_sf[group, channel] = value


def _turn(words: Any, row: Any, col: Any) -> tuple:
    """Four words of one byte of each channel `4 * col + j`, from four rows of four channels."""
    low, high = T.uint32(0x00FF00FF), T.uint32(0xFF00FF00)
    first, second, third, fourth = (words[4 * row + i, col] for i in range(4))
    even_low = first & T.uint32(0xFFFF) | third << T.uint32(16)
    even_high = first >> T.uint32(16) | third & T.uint32(0xFFFF0000)
    odd_low = second & T.uint32(0xFFFF) | fourth << T.uint32(16)
    odd_high = second >> T.uint32(16) | fourth & T.uint32(0xFFFF0000)
    return (
        even_low & low | (odd_low & low) << T.uint32(8),
        (even_low & high) >> T.uint32(8) | odd_low & high,
        even_high & low | (odd_high & low) << T.uint32(8),
        (even_high & high) >> T.uint32(8) | odd_high & high,
    )


@macro
def turn_and_store(y, codes, group, lane, tile_shared, pid_m, pid_n, store_bytes):
    """Write the 8 x 8 codes of each of the 256 threads of a square tile to the transposed `y`.

    Eight rows of a channel are one unit of 8 bytes; a row of the turned tile has 16 units. Unit u of the channels of
    lane l lies at place u ^ l: threads that write at a time have the same u and different l, hence different banks.
    """
    words = T.view(codes, (8, 2), T.uint32)
    turned = T.alloc_local((LANE, 2), T.uint32)
    for half in T.unroll(2):
        for quarter in T.unroll(2):
            column = _turn(words, half, quarter)
            turned[4 * quarter, half] = column[0]
            turned[4 * quarter + 1, half] = column[1]
            turned[4 * quarter + 2, half] = column[2]
            turned[4 * quarter + 3, half] = column[3]
    for e in T.unroll(LANE):
        for w in T.vectorized(2):
            tile_shared[lane * LANE + e, group ^ lane, w] = turned[e, w]
    T.sync_threads()

    if store_bytes == VECTOR_BYTES:
        _store_vectors(y, tile_shared, pid_m, pid_n)
    else:
        _store_shifted(y, tile_shared, pid_m, pid_n)


def _vector_of_tile(k: int) -> tuple:
    """Channel and place of the k-th vector of a thread; shared memory is read 16 threads, i.e. 2 channels, at a time.

    The two are channels of neighbouring lanes, so that their units lie in different banks.
    """
    index = k * TURNING_THREADS + T.get_thread_binding()
    vector, pair, second = index % VECTORS, index // (2 * VECTORS), index // VECTORS % 2
    return pair // LANE * 2 * LANE + second * LANE + pair % LANE, vector


@macro
def _store_vectors(y, tile_shared, pid_m, pid_n):
    """Write a turned tile to rows that begin at multiples of 16 bytes."""
    out_words = T.alloc_local((VECTOR_BYTES // 4,), T.uint32)
    out = T.view(out_words, (VECTOR_BYTES,), y.dtype)
    for k in T.unroll(TILE_COLS * VECTORS // TURNING_THREADS):
        channel, vector = _vector_of_tile(k)
        if pid_n * TILE_COLS + channel < y.shape[0] and pid_m * TILE_COLS + vector * VECTOR_BYTES < y.shape[1]:
            for half in T.unroll(2):
                for w in T.vectorized(2):
                    out_words[2 * half + w] = tile_shared[channel, (2 * vector + half) ^ (channel // LANE), w]
            for e in T.vectorized(VECTOR_BYTES):
                # written out: through a variable its divisibility, hence the vector store, would be lost
                y[pid_n * TILE_COLS + channel, pid_m * TILE_COLS + vector * VECTOR_BYTES + e] = out[e]


@macro
def _store_shifted(y, tile_shared, pid_m, pid_n):
    """Write a turned tile to rows that begin at any byte, as the aligned vectors of the rows.

    The tile's part of a row begins `shift` bytes after a multiple of 16. Taken as a ring of 128 bytes, it has eight
    vectors that are aligned in memory; the last of them holds the first and last bytes of the part, which lie in the
    two vectors of memory that this tile shares with its neighbours.
    """
    size = y.shape[0] * y.shape[1]
    y_vectors = T.Tensor((T.ceildiv(size, VECTOR_BYTES), VECTOR_BYTES), T.uint8, y.data)
    y_bytes = T.Tensor((size,), T.uint8, y.data)
    tile_bytes = T.view(tile_shared, (TILE_COLS, 16, 8), T.uint8)
    start = T.alloc_var(T.int64)
    shift = T.alloc_var(T.int32)
    first = T.alloc_var(T.int32)  # byte of the part at which a vector begins
    rows_left = T.alloc_var(T.int32)
    out_words = T.alloc_local((VECTOR_BYTES // 4,), T.uint32)
    out = T.view(out_words, (VECTOR_BYTES,), T.uint8)
    rows_left = T.min(T.cast(y.shape[1] - pid_m * TILE_COLS, T.int32), TILE_COLS)
    for k in T.unroll(TILE_COLS * VECTORS // TURNING_THREADS):
        channel, vector = _vector_of_tile(k)
        start = T.cast(pid_n * TILE_COLS + channel, T.int64) * y.shape[1] + pid_m * TILE_COLS
        first = (vector + 1) * VECTOR_BYTES - T.cast(start % VECTOR_BYTES, T.int32)
        if pid_n * TILE_COLS + channel < y.shape[0] and first + VECTOR_BYTES <= rows_left:
            _load_vector(tile_shared, channel, first, out_words)
            for e in T.vectorized(VECTOR_BYTES):
                y_vectors[start // VECTOR_BYTES + vector + 1, e] = out[e]

    thread = T.get_thread_binding()
    lane = thread % ROW_LANES
    channel = lane * LANE + thread // ROW_LANES  # 16 threads, 16 lanes: no two in the same banks
    if thread < TILE_COLS and pid_n * TILE_COLS + channel < y.shape[0]:
        start = T.cast(pid_n * TILE_COLS + channel, T.int64) * y.shape[1] + pid_m * TILE_COLS
        shift = T.cast(start % VECTOR_BYTES, T.int32)
        if rows_left == TILE_COLS:
            _load_vector(tile_shared, channel, TILE_COLS - shift, out_words)
            _store_ends(y, out_words, start // VECTOR_BYTES, shift)
        else:
            for row in T.serial(rows_left):
                first = (row + shift) // VECTOR_BYTES * VECTOR_BYTES - shift  # of the vector that holds the row
                if first <= 0 or first + VECTOR_BYTES > rows_left:  # not written above
                    y_bytes[start + row] = tile_bytes[channel, row // 8 ^ lane, row % 8]


@macro
def _load_vector(tile_shared, channel, first, out_words):
    """16 bytes of the ring of a channel, from byte `first` on: three units, moved to where the vector begins."""
    units = T.alloc_local((3, 2), T.uint32)
    words = T.view(units, (6,), T.uint32)
    for u in T.unroll(3):
        for w in T.vectorized(2):
            units[u, w] = tile_shared[channel, (first // 8 + u) % 16 ^ (channel // LANE), w]
    for w in T.unroll(5):
        words[w] = T.if_then_else(first & 4 != 0, words[w + 1], words[w])
    selector = T.uint32(0x3210) + T.uint32(0x1111) * T.cast(first & 3, T.uint32)
    for w in T.unroll(4):
        out_words[w] = bytes_of_words(words[w], words[w + 1], selector)


@macro
def _store_ends(y, words, before, shift):
    """Write the last vector of the ring: its first `shift` bytes end the part of the row, the others begin it.

    `before` is the vector of memory in which the part begins. Cut into halves, one half of the vector lies wholly on
    one side of `shift`; what remains is cut again, so that stores of 8, 4, 2, 1 and 1 bytes write all of it.
    """
    size = y.shape[0] * y.shape[1]
    y_pairs = T.Tensor((T.ceildiv(size, 8), 2), T.uint32, y.data)
    y_words = T.Tensor((T.ceildiv(size, 4),), T.uint32, y.data)
    y_halves = T.Tensor((T.ceildiv(size, 2),), T.uint16, y.data)
    y_bytes = T.Tensor((size,), T.uint8, y.data)
    pair = T.alloc_local((2,), T.uint32)
    rest = T.alloc_local((2,), T.uint32)
    for w in T.unroll(2):
        pair[w] = T.if_then_else(shift & 8 != 0, words[w], words[2 + w])
        rest[w] = T.if_then_else(shift & 8 != 0, words[2 + w], words[w])
    for w in T.vectorized(2):
        y_pairs[_place(before, shift, 8), w] = pair[w]
    y_words[_place(before, shift, 4)] = T.if_then_else(shift & 4 != 0, rest[0], rest[1])
    rest[0] = T.if_then_else(shift & 4 != 0, rest[1], rest[0])
    y_halves[_place(before, shift, 2)] = T.cast(_half(rest[0], shift & 2 == 0, 16), T.uint16)
    rest[0] = _half(rest[0], shift & 2 != 0, 16)
    y_bytes[_place(before, shift, 1)] = T.cast(_half(rest[0], shift & 1 == 0, 8), T.uint8)
    y_bytes[before * VECTOR_BYTES + shift] = T.cast(_half(rest[0], shift & 1 != 0, 8), T.uint8)


def _place(before: Any, shift: Any, size: int) -> Any:
    """Where the half of `size` bytes goes that `shift` does not cut, counted in such halves."""
    lower_half_ends_part = shift & size != 0
    place = T.if_then_else(lower_half_ends_part, TILE_COLS // size, 1) + (shift & -2 * size) // size
    return before * (VECTOR_BYTES // size) + place


def _half(word: Any, upper: Any, bits: int) -> Any:
    """A word whose low bits are its own, or those above them."""
    return T.if_then_else(upper, word >> T.uint32(bits), word)
