"""Device code of casts whose scale blocks span rows: the tile of a thread block, maxima over blocks, decoding.

A thread block owns a tile of `TILE_COLS` channels. 16 neighbouring lanes cover a row of the tile, so a warp has two
groups of `rows` consecutive rows, and a lane holds 8 channels of each row of its group. A scale block that spans rows
is at least as high as the two groups of a warp: its maximum is found by shuffles, then over warps in shared memory.
"""

from typing import Any

from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.quant._macros import LANE, bits_of, float_of, sf_bytes, shuffle_steps

TILE_COLS = 128
ROW_LANES = TILE_COLS // LANE

#: Heights of scale blocks that span rows.
HEIGHTS = (32, 128)


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


# Reading quantised tensors ------------------------------------------------------------------


def sf_value(sf: Any, fmt: QuantFormat, row: Any, group: Any) -> Any:
    """The scale factor of a block as float32; the exponent byte 0 stands for 2^-127."""
    if fmt.sf == 'ue8m0x4':
        bits = T.cast(_sf_byte(sf, fmt, row, group), T.uint32) << T.uint32(23)
        return float_of(T.max(bits, T.uint32(1 << 22)))
    return T.cast(sf[row, group], T.float32)


def sf_exponent(sf: Any, fmt: QuantFormat, row: Any, group: Any) -> Any:
    """The biased exponent of a power-of-two scale factor."""
    if fmt.sf == 'ue8m0x4':
        return T.cast(_sf_byte(sf, fmt, row, group), T.uint32)
    return (bits_of(sf[row, group]) >> T.uint32(23)) & T.uint32(0xFF)


def _sf_byte(sf: Any, fmt: QuantFormat, row: Any, group: Any) -> Any:
    if fmt.column_packed:
        return sf_bytes(sf)[row // 4, group, row % 4]
    return sf_bytes(sf)[row, group // 4, group % 4]


@macro
def decode(codes, i, element, v_local):
    """The numbers of a row of codes of the named element, in float32."""
    channels = v_local.shape[0]
    if element == 'e2m1':
        pairs = T.view(codes, codes.shape, T.uint8)
        for j in T.unroll(channels // 2):
            v_local[2 * j] = e2m1_value(T.cast(pairs[i, j], T.uint32))
            v_local[2 * j + 1] = e2m1_value(T.cast(pairs[i, j], T.uint32) >> T.uint32(4))
    elif element == 'e5m6':
        words = T.view(codes, (codes.shape[0], 3), T.uint32)
        v_local[0] = _e5m6_value(words[i, 0] >> T.uint32(20))
        v_local[1] = _e5m6_value(words[i, 0] >> T.uint32(8))
        v_local[2] = _e5m6_value(words[i, 0] << T.uint32(4) | words[i, 1] >> T.uint32(28))
        v_local[3] = _e5m6_value(words[i, 1] >> T.uint32(16))
        v_local[4] = _e5m6_value(words[i, 1] >> T.uint32(4))
        v_local[5] = _e5m6_value(words[i, 1] << T.uint32(8) | words[i, 2] >> T.uint32(24))
        v_local[6] = _e5m6_value(words[i, 2] >> T.uint32(12))
        v_local[7] = _e5m6_value(words[i, 2])
    else:
        for e in T.vectorized(channels):
            v_local[e] = T.cast(codes[i, e], T.float32)


def e2m1_value(code: Any) -> Any:
    """float32 of an fp4 code in the low bits: as the top of a subnormal float32 it is 2^126 times too small."""
    bits = (code & T.uint32(7)) << T.uint32(22) | (code & T.uint32(8)) << T.uint32(28)
    return float_of(bits) * T.float32(2.0**126)


def _e5m6_value(code: Any) -> Any:
    """float32 of a 12-bit code in the low bits: the upper bits of a float16."""
    half = T.reinterpret(T.cast((code & T.uint32(0xFFF)) << T.uint32(4), T.uint16), T.float16)
    return T.cast(half, T.float32)
