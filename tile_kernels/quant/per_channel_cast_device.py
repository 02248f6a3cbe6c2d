"""Device code of the per-channel casts: rows of a lane, maxima and codes of channels, the turned tile."""

from typing import Any

from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.lang import T, macro
from tile_kernels.quant._blocks import ROW_LANES, TILE_COLS, sf_value
from tile_kernels.quant._macros import LANE, float_of, lane_pairs, load_lane, sf_bytes

#: A transposed tile is square: 256 threads of 8 rows by 8 channels. Its rows are written in pieces of 16 bytes.
TURNING_ROWS, TURNING_THREADS = 8, 256
VECTOR_BYTES = 16


@macro
def load_rows(x, x_sf, tokens, source, slot, piece, hidden, codes, x_local):
    """The channels of a lane of every row that `tokens` names, dequantised if `source` is a format; others are 0."""
    rows = tokens.shape[0]
    T.clear(x_local)
    if isinstance(source, QuantFormat):
        factor = T.alloc_local((rows,), T.float32)
        T.clear(codes)
        T.clear(factor)
        for i in T.unroll(rows):
            if tokens[i] >= 0 and tokens[i] < x.shape[0]:
                load_lane(x, codes, i, tokens[i], slot, piece, hidden)
                if slot * LANE < hidden:
                    factor[i] = sf_value(x_sf, source, tokens[i], slot // (source.sf_block[1] // LANE))
        for i in T.unroll(rows):
            for e in T.vectorized(LANE):
                x_local[i, e] = T.cast(codes[i, e], T.float32)
            for e in T.unroll(LANE):
                x_local[i, e] = x_local[i, e] * factor[i]
    else:
        for i in T.unroll(rows):
            if tokens[i] >= 0 and tokens[i] < x.shape[0]:
                load_lane(x, x_local, i, tokens[i], slot, piece, hidden)


@macro
def channel_amax(x_local, amax):
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
        T.clear(amax)
        for i in T.unroll(rows):
            for e in T.unroll(LANE):
                amax[e] = T.max(amax[e], T.abs(T.cast(x_local[i, e], T.float32)))
        for e in T.unroll(LANE):
            amax[e] = T.max(amax[e], T.shfl_xor(amax[e], ROW_LANES))


def _max_pair(word: Any, pair: Any) -> Any:
    """Larger of two pairs of bf16, one by one, as a word."""
    return T.reinterpret(T.max2(T.reinterpret(word, 'bfloat16x2'), pair), T.uint32)


@macro
def encode_row(x_local, i, sf_inv, y_local):
    """fp8 codes of a row of a lane, each channel with its own multiplier."""
    v_local = T.alloc_local((LANE,), T.float32)
    if x_local.dtype == 'bfloat16':
        pairs = lane_pairs(x_local)
        for j in T.unroll(LANE // 2):
            v_local[2 * j] = float_of(pairs[i, j] << T.uint32(16)) * sf_inv[2 * j]
            v_local[2 * j + 1] = float_of(pairs[i, j] & T.uint32(0xFFFF0000)) * sf_inv[2 * j + 1]
    else:
        for e in T.unroll(LANE):
            v_local[e] = T.cast(x_local[i, e], T.float32) * sf_inv[e]
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

    hidden, num_rows = y.shape
    vectors = TILE_COLS // VECTOR_BYTES
    out_words = T.alloc_local((VECTOR_BYTES // 4,), T.uint32)
    for k in T.unroll(TILE_COLS * vectors // TURNING_THREADS):
        index = k * TURNING_THREADS + T.get_thread_binding()
        channel, vector = index // vectors, index % vectors
        for half in T.unroll(2):
            for w in T.vectorized(2):
                out_words[2 * half + w] = tile_shared[channel, (2 * vector + half) ^ (channel // LANE), w]
        out = T.view(out_words, (VECTOR_BYTES,), y.dtype)
        if pid_n * TILE_COLS + channel < hidden:
            for p in T.unroll(VECTOR_BYTES // store_bytes):
                if pid_m * TILE_COLS + vector * VECTOR_BYTES + p * store_bytes < num_rows:
                    for e in T.vectorized(store_bytes):
                        # written out: through a variable its divisibility, hence the vector store, would be lost
                        y[
                            pid_n * TILE_COLS + channel, pid_m * TILE_COLS + vector * VECTOR_BYTES + p * store_bytes + e
                        ] = out[p * store_bytes + e]
