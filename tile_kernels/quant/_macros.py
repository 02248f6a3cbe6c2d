"""Device code of casts whose scale blocks span rows: the tile of a thread block, its maxima, and transposed tiles.

A thread block owns a tile of `TILE_COLS` channels. 16 adjacent lanes cover a row of the tile, so a warp has two groups
of `rows` consecutive rows. A lane holds 8 channels of each row of its group. A scale block that spans rows is at least
as high as the two groups of a warp. Its maximum is found by shuffles, then over warps in shared memory.
"""

from typing import Any

from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.bits import float_of, pick_bytes
from tile_kernels.device.reduce import shuffle_steps
from tile_kernels.device.scales import amax_to_sf, clamp_amax, sf_bytes, sf_register_dtype, sf_value
from tile_kernels.device.vectors import LANE, lane_pairs, load_lane, widen_lane

TILE_COLS = 128
ROW_LANES = TILE_COLS // LANE

#: Heights of scale blocks that span rows.
HEIGHTS = (32, 128)

#: Rows of a transposed result that begin at multiples of so many bytes are written in such pieces.
VECTOR_BYTES = 16

#: Units of 8 bytes that shared memory moves at a time, to or from as many threads.
BANK_UNITS = 16

# Tiles --------------------------------------------------------------------------------------


def tile_rows(rows: int, num_threads: int, height: int, row_lanes: int = ROW_LANES) -> int:
    """Height of the tile of a thread block whose lanes hold `rows` rows, if it is made of whole scale blocks."""
    total = num_threads // row_lanes * rows
    if total % height:
        raise ArgumentError(f'a tile of {total} rows cannot hold scale blocks of {height}')
    return total


@macro
def reduce_block(value, height, lanes, rows, lane, warp, shared):
    """`value[0]` = its maximum over the scale block of the thread: `height` rows (at least 32) and `lanes` lanes."""
    for step in T.unroll(shuffle_steps(lanes)):
        value[0] = T.max(value[0], T.shfl_xor(value[0], 1 << step))
    value[0] = T.max(value[0], T.shfl_xor(value[0], ROW_LANES))
    if T.get_thread_binding() % WARP < ROW_LANES and lane % lanes == 0:
        shared[warp, lane // lanes] = value[0]
    T.sync_threads()
    warps = height // (2 * rows)
    for w in T.unroll(warps):
        value[0] = T.max(value[0], shared[warp // warps * warps + w, lane // lanes])


@macro
def load_rows(x, x_sf, pos_to_token, first, source, slot, piece, hidden, x_local, factor):
    """The channels of a lane of the rows from `first` on, with the rows' factors if `source` is a format.

    With a map the rows are those it names, and rows that do not exist are 0. Without one the last row or lane is read
    again past the edges, which changes no maximum and costs no branch.
    """
    rows, lane = (int(extent) for extent in x_local.shape)
    last_slot = -(-hidden // lane) - 1
    read_slot = T.min(slot, last_slot)
    T.assume(read_slot <= last_slot)
    if pos_to_token is not None:
        T.clear(factor)
        tokens = T.alloc_local((rows,), T.int32)
        for i in T.unroll(rows):
            tokens[i] = -1
            if first + i < pos_to_token.shape[0]:
                tokens[i] = pos_to_token[first + i]
    if hidden % lane > 0 if pos_to_token is None else True:
        T.clear(x_local)
    for i in T.unroll(rows):
        if pos_to_token is not None:
            if T.cast(tokens[i], T.uint32) < T.cast(x.shape[0], T.uint32):  # a negative number is a large one
                _load_row(x, x_sf, i, tokens[i], source, read_slot, piece, hidden, x_local, factor)
        else:
            _load_row(x, x_sf, i, T.min(first + i, x.shape[0] - 1), source, read_slot, piece, hidden, x_local, factor)


@macro
def _load_row(x, x_sf, i, token, source, slot, piece, hidden, x_local, factor):
    load_lane(x, x_local, i, token, slot, piece, hidden)
    if isinstance(source, QuantFormat):
        factor[i] = sf_value(x_sf, source, token, slot // (source.sf_block[1] // x_local.shape[1]))


# Channels -----------------------------------------------------------------------------------


@macro
def _row_magnitudes(x_local, i, factor, v_local):
    """The magnitudes of a row of a lane, codes times `factor[i]`.

    The sign leaves fp8 codes before they are decoded, so that the compiler sees other numbers.
    Kept from here until the result is computed, the numbers would take the registers of threads that could load.
    """
    lane = x_local.shape[1]
    if factor is not None:
        words = T.view(x_local, (x_local.shape[0], lane // 4), T.uint32)
        unsigned = T.alloc_local((1, lane // 4), T.uint32)
        for w in T.unroll(lane // 4):
            unsigned[0, w] = words[i, w] & T.uint32(0x7F7F7F7F)
        codes = T.view(unsigned, (1, lane), x_local.dtype)
        for e in T.vectorized(lane):
            v_local[e] = T.cast(codes[0, e], T.float32)
        for e in T.unroll(lane):
            v_local[e] = v_local[e] * factor[i]
    else:
        for e in T.vectorized(lane):
            v_local[e] = T.abs(T.cast(x_local[i, e], T.float32))


@macro
def channel_amax(x_local, amax, factor=None, row_lanes=ROW_LANES):
    """`amax[e]` = largest magnitude of channel e over the rows of the warp, of which `row_lanes` lanes share each."""
    rows, lane = x_local.shape
    if x_local.dtype == 'bfloat16':
        pairs = lane_pairs(x_local)
        both = T.alloc_local((lane // 2,), T.uint32)
        T.clear(both)
        for i in T.unroll(rows):
            for j in T.unroll(lane // 2):
                both[j] = _max_pair(both[j], T.abs2(T.reinterpret(pairs[i, j], 'bfloat16x2')))
        for j in T.unroll(lane // 2):
            for step in T.unroll(shuffle_steps(WARP // row_lanes)):
                both[j] = _max_pair(both[j], T.reinterpret(T.shfl_xor(both[j], row_lanes << step), 'bfloat16x2'))
            amax[2 * j] = float_of(both[j] << T.uint32(16))
            amax[2 * j + 1] = float_of(both[j] & T.uint32(0xFFFF0000))
    else:
        v_local = T.alloc_local((lane,), T.float32)
        T.clear(amax)
        for i in T.unroll(rows):
            _row_magnitudes(x_local, i, factor, v_local)
            for e in T.unroll(lane):
                amax[e] = T.max(amax[e], v_local[e])
        for e in T.unroll(lane):
            for step in T.unroll(shuffle_steps(WARP // row_lanes)):
                amax[e] = T.max(amax[e], T.shfl_xor(amax[e], row_lanes << step))


def _max_pair(word: Any, pair: Any) -> Any:
    """Larger of two pairs of bf16, one by one, as a word."""
    return T.reinterpret(T.max2(T.reinterpret(word, 'bfloat16x2'), pair), T.uint32)


@macro
def encode_row(x_local, i, sf_inv, y_local, factor=None):
    """fp8 codes of a row of a lane, each channel with its own multiplier."""
    lane = x_local.shape[1]
    v_local = T.alloc_local((lane,), T.float32)
    widen_lane(x_local, i, v_local, factor)
    for e in T.unroll(lane):
        v_local[e] = v_local[e] * sf_inv[e]
    for e in T.vectorized(lane):
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


def _factors_of_thread(fmt: QuantFormat, groups: int) -> int:
    """Groups of a channel whose scale factors one thread finds: those of a word if a tile holds them all."""
    return 4 if fmt.sf == 'ue8m0x4' and groups % 4 == 0 else 1


@macro
def channel_factors(amax_shared, warps, parts, num_parts, y_sf, fmt, height, num_rows, row, col, amax_floor):
    """Scale factors of the channels of a tile, whose first row and channel are `row` and `col`.

    `amax_shared` has a row for each warp, `warps` neighbouring ones for each group. The multipliers of a group replace
    the maxima of its first warp, which only the thread that computes them reads. If there are `parts`, they hold the
    maxima of one group of all rows.
    """
    num_warps, tile_n = (int(extent) for extent in amax_shared.shape)
    thread, num_threads, groups = T.get_thread_binding(), num_warps * WARP, num_warps // warps
    group_amax = T.alloc_var(T.float32)
    word = T.alloc_var(T.uint32)
    sf = T.alloc_local((1,), sf_register_dtype(fmt))
    own_inv = T.alloc_local((1,), T.float32)
    owned = _factors_of_thread(fmt, groups)
    for k in T.unroll(-(-groups // owned * tile_n // num_threads)):
        index = k * num_threads + thread
        group, channel = index // tile_n * owned, index % tile_n
        if index < groups // owned * tile_n:
            word = T.uint32(0)
            for b in T.unroll(owned):
                group_amax = T.float32(0.0)
                if parts is not None:
                    if col + channel < y_sf.shape[1]:
                        for part in T.unroll(num_parts, unroll_factor=8):
                            group_amax = T.max(group_amax, parts[part, col + channel])
                else:
                    for w in T.unroll(warps):
                        group_amax = T.max(group_amax, amax_shared[(group + b) * warps + w, channel])
                amax_to_sf(clamp_amax(group_amax, amax_floor), fmt, sf, own_inv, 0)
                amax_shared[(group + b) * warps, channel] = own_inv[0]
                if owned > 1 and row + (group + b) * height < num_rows:
                    word = word | T.cast(sf[0], T.uint32) << T.cast(8 * b, T.uint32)
            if col + channel < y_sf.shape[1] and row + group * height < num_rows:
                if owned > 1:
                    y_sf[row // (4 * height) + group // 4, col + channel] = T.reinterpret(word, T.int32)
                else:
                    num_groups = T.ceildiv(num_rows, height)
                    store_channel_sf(y_sf, fmt, num_groups, row // height + group, col + channel, sf[0])


@macro
def scale_channels(x_local, amax, amax_shared, sf_inv, y_sf, fmt, num_rows, row, col, amax_floor, row_lanes):
    """Store the scale factors of the tile at (`row`, `col`); `sf_inv[e]` = multiplier of channel e for a thread's rows.

    `x_local` are those rows; `row_lanes` threads share a row of the tile, whose maxima meet in `amax_shared`.
    """
    thread, rows, height = T.get_thread_binding(), int(x_local.shape[0]), fmt.sf_block[0]
    warps = height * row_lanes // (rows * WARP)
    lane, team, warp = thread % row_lanes, thread // row_lanes, thread // WARP
    channel_amax(x_local, amax, None, row_lanes)
    if thread % WARP < row_lanes:
        for e in T.vectorized(LANE):
            amax_shared[warp, lane * LANE + e] = amax[e]
    T.sync_threads()
    channel_factors(amax_shared, warps, None, 0, y_sf, fmt, height, num_rows, row, col, amax_floor)
    T.sync_threads()
    for e in T.vectorized(LANE):
        sf_inv[e] = amax_shared[team * rows // height * warps, lane * LANE + e]


# Transposed tiles ---------------------------------------------------------------------------


def _turn(words: Any, row: Any, col: Any) -> tuple:
    """Four words of one byte of each channel `4 * col + j`, from four rows of four channels."""
    first, second, third, fourth = (words[4 * row + i, col] for i in range(4))
    upper = [pick_bytes(first, second, *pairs) for pairs in ((0, 4, 1, 5), (2, 6, 3, 7))]
    lower = [pick_bytes(third, fourth, *pairs) for pairs in ((0, 4, 1, 5), (2, 6, 3, 7))]
    return tuple(pick_bytes(upper[j // 2], lower[j // 2], *((2, 3, 6, 7) if j % 2 else (0, 1, 4, 5))) for j in range(4))


@macro
def turn(words, turned):
    """Eight codes of each of 8 channels, two words each, from eight rows of 8 channels."""
    for half in T.unroll(2):
        for quarter in T.unroll(2):
            column = _turn(words, half, quarter)
            turned[4 * quarter, half] = column[0]
            turned[4 * quarter + 1, half] = column[1]
            turned[4 * quarter + 2, half] = column[2]
            turned[4 * quarter + 3, half] = column[3]


def spread(tile_shared: Any, channel: Any, unit: Any) -> Any:
    """Where a unit of a channel lies in its row of shared memory.

    The threads of one write are some or all lanes of a row group. Their offsets differ by the lane index within the row
    group.
    """
    lanes = tile_shared.shape[0] // LANE
    return unit ^ channel // LANE * (BANK_UNITS // lanes)


@macro
def turn_to_shared(codes, turned, tile_shared, lane, unit):
    """Codes of eight rows and 8 channels of a thread, turned, as unit `unit` of the channels of `lane`."""
    turn(T.view(codes, (8, 2), T.uint32), turned)
    for e in T.unroll(LANE):
        for w in T.vectorized(2):
            place = spread(tile_shared, lane * LANE + e, unit)
            tile_shared[lane * LANE + e, place, w] = turned[e, w]


def _vector_of_tile(tile_shared: Any, k: int) -> tuple:
    """Channel and number of the k-th vector of a thread.

    If two channels are read at a time, they are channels of neighbouring lanes, whose units lie in different banks.
    """
    vectors = tile_shared.shape[1] // 2
    index = k * _turning_threads(tile_shared) + T.get_thread_binding()
    channel = index // vectors
    if 2 * vectors == BANK_UNITS:
        channel = channel // (2 * LANE) * 2 * LANE + channel % 2 * LANE + channel // 2 % LANE
    return channel, index % vectors


def _turning_threads(tile_shared: Any) -> int:
    """Threads of a tile, each with a unit of each of 8 channels."""
    return tile_shared.shape[0] // LANE * tile_shared.shape[1]


@macro
def store_vectors(y, tile_shared, pid_m, pid_n):
    """Write a turned tile to rows that begin at multiples of 16 bytes."""
    channels, units, _ = tile_shared.shape
    out_words = T.alloc_local((VECTOR_BYTES // 4,), T.uint32)
    out = T.view(out_words, (VECTOR_BYTES,), y.dtype)
    for k in T.unroll(channels * units // 2 // _turning_threads(tile_shared)):
        channel, vector = _vector_of_tile(tile_shared, k)
        if pid_n * channels + channel < y.shape[0] and pid_m * units * 8 + vector * VECTOR_BYTES < y.shape[1]:
            for half in T.unroll(2):
                for w in T.vectorized(2):
                    unit = spread(tile_shared, channel, 2 * vector + half)
                    out_words[2 * half + w] = tile_shared[channel, unit, w]
            for e in T.vectorized(VECTOR_BYTES):
                # written out: through a variable its divisibility, hence the vector store, would be lost
                y[pid_n * channels + channel, pid_m * units * 8 + vector * VECTOR_BYTES + e] = out[e]
