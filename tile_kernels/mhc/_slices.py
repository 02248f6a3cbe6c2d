"""Slices: blocks that share the channels of a token, and keep their share of fn in registers for many tokens.

Block `rank` of a token has a slice of the channels of every stream; a warp of it has 32 channels of every stream, and
with them all products of 8 tokens at a time on the tensor cores (m16n8k16). Fn comes first in such a product, its rows
in two parts (`norm_fn_device`: high and low), and never leaves the registers. A thread holds 8 neighbouring channels of
both operands and names them in its own order: a sum over channels may take them in any, if both operands agree. So
tokens come from shared memory as they lie there, 16 bytes at a time.

Wide slices, of more than 320 channels, leave no registers for the low part. It has three bits, and they are coded: as a
number with the exponent of the high part, times 1/128, whose sign and mantissa fit into a byte. A number of 11
significant bits is such a sum if the high part may lie on either side of it (`high_and_rest`). Four bytes are a word of
shared memory, and one instruction makes the operand of a product from it and the high part.

The sums of a slice are those of its warps in ascending order, whatever the number of tokens: the same bits wherever
they are computed.
"""

import math
from dataclasses import dataclass

from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.bits import pick_bytes, widened
from tile_kernels.mhc.norm_fn_kernels import high_of, padded, round_to_tf32, rounded_bits

#: Channels of a warp, and of a lane of it; tokens of a product.
WARP_CHANNELS, WIDTH, TOKENS = 32, 8, 8

#: Warps of a block that multiply: eight, or ten if slices can be shared by them, or up to 16 of wide slices. Registers
#: of a thread for fn, at most.
WARPS, MANY_WARPS, WIDE_WARPS, MAX_REGISTERS = 8, 10, 16, 96

#: Signs and mantissas of two bfloat16 of one word, exponents of another. In this form because half of it, the exponents
#: of a high part, would else be found before a loop and kept in registers there are not.
WITH_EXPONENTS = """
static __device__ __forceinline__ unsigned with_exponents(unsigned word, unsigned other) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, 0x7f807f80, 0xe4;" : "=r"(result) : "r"(other), "r"(word));
  return result;
}
"""

#: Clusters that run at a time on an H200, by the blocks of one.
ACTIVE_CLUSTERS = {16: 7, 8: 15, 4: 30, 2: 66}

#: Threads wait for each other where the code says so; what blocks of a cluster write into each other is not reused.
SLICE_PASS_CONFIGS = {
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_ENABLE_LOWER_LDGSTG': True,
}


@dataclass(frozen=True)
class Slices:
    """How the streams of a token are cut: `count` slices of `channels` of each stream."""

    hidden: int
    num_streams: int
    num_mixes: int

    @property
    def count(self) -> int:
        """Slices of a token, blocks of a cluster: as few as fit into registers, or as many as there may be."""
        possible = [n for n in (2, 4, 8, 16) if self.hidden // WARP_CHANNELS % n == 0]
        return next((n for n in possible if self.hidden <= n * WARPS * WARP_CHANNELS), possible[-1])

    @property
    def channels(self) -> int:
        """Channels of a stream in a slice."""
        return self.hidden // self.count

    @property
    def shares(self) -> int:
        """Warps that share the channels of a slice."""
        return self.channels // WARP_CHANNELS

    @property
    def wide(self) -> bool:
        """Whether the low part of fn is coded, in shared memory."""
        return self.shares > MANY_WARPS

    @property
    def warps(self) -> int:
        """Warps of a block that multiply, if it has others as well: an even number, some may be idle."""
        if self.wide:
            return -(-self.shares // 2) * 2
        return MANY_WARPS if self.shares in (5, 9, 10) else WARPS

    @property
    def teams(self) -> int:
        """Warps that share the tokens of a tile: a power of two."""
        return self.teams_of(self.warps)

    def teams_of(self, warps: int) -> int:
        """The same if so many warps multiply."""
        return 1 << int(math.log2(max(1, warps / self.shares)))

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return self.shares * self.teams * WARP

    @property
    def columns(self) -> int:
        """Products of a token, with those of rows that fill up the tiles of fn."""
        return padded(self.num_mixes)

    @property
    def sums(self) -> int:
        """Room for the products of a token and its sum of squares; tokens lie in different banks."""
        return self.columns + 4

    @property
    def octets(self) -> int:
        """Rows of fn by eights."""
        return self.columns // 8

    @property
    def operands(self) -> int:
        """Elements of fn of a thread, high and low."""
        return self.num_streams * WIDTH * 2 * self.octets

    @property
    def low_shape(self) -> tuple[int, ...]:
        """Room for the coded low part: of every warp, stream and eight rows, two words of each lane."""
        return (self.shares, self.num_streams, self.octets, WARP, 2)

    @property
    def low_bytes(self) -> int:
        """Size of it, if there is one."""
        return 4 * math.prod(self.low_shape) if self.wide else 0

    @property
    def fits(self) -> bool:
        """Whether a slice fits into a block, and the sums of a token into a warp."""
        return self.shares <= WIDE_WARPS and self.operands <= 2 * MAX_REGISTERS and self.columns < WARP

    @property
    def fits_registers(self) -> bool:
        """Whether it does so without the help of shared memory."""
        return self.fits and not self.wide

    @property
    def groups(self) -> int:
        """Clusters of `count` blocks that run at a time, a block on an SM."""
        return ACTIVE_CLUSTERS[self.count]

    def pitch(self, rows: int) -> int:
        """Elements between tokens in shared memory, `rows` slices each; two of them lie in different banks."""
        return rows * self.channels + (0 if rows * self.shares % 2 else 32)


def tile_for(slices: Slices, teams: int, token_bytes: int, most_bytes: int, num_tokens: int) -> int:
    """Tokens of a tile: about `most_bytes`, fewer if there are not enough of them for all blocks."""
    tile = TOKENS * teams
    while tile < 32 and 2 * tile * token_bytes <= most_bytes and num_tokens > tile * slices.groups:
        tile *= 2
    return tile


@macro
def read_fn(fn, slices, first_row, first_channel, share, lane, value_local):
    """The part of a slice of fn a thread needs, of a stream: `value_local[octet, channel]`."""
    channel = first_channel + share * WARP_CHANNELS + lane % 4 * WIDTH
    for o in T.unroll(slices.octets):
        row = first_row + T.min(o * 8 + lane // 4, slices.num_mixes - 1)
        for v in T.unroll(2):
            for e in T.vectorized(4):
                value_local[o, v * 4 + e] = fn[row, channel + v * 4 + e]


def piece_of(channel, piece, count):
    """Which of one or two pieces a channel is in, without a division, which would take registers."""
    return T.cast(channel >= piece, T.int32) if count == 2 else 0


@macro
def read_copied_fn(fn_shared, slices, first_row, pieces, share, lane, value_local):
    """The same from shared memory, where fn lies in pieces with all its rows each."""
    piece = fn_shared.shape[1]
    channel = share * WARP_CHANNELS + lane % 4 * WIDTH
    part = piece_of(channel, piece, pieces)
    for o in T.unroll(slices.octets):
        row = first_row + part * slices.columns + T.min(o * 8 + lane // 4, slices.num_mixes - 1)
        for v in T.unroll(2):
            for e in T.vectorized(4):
                value_local[o, v * 4 + e] = fn_shared[row, channel - part * piece + v * 4 + e]


@macro
def keep_fn(slices, stream, lane, value_local, fn_local):
    """What `read_fn` gave as first operands of products, as many as there are eighths of rows."""
    octets = slices.octets
    high_local = T.alloc_local((2,), T.float32)
    low_local = T.alloc_local((2,), T.float32)
    for o in T.unroll(octets):
        for pair in T.unroll(WIDTH // 2):
            for half in T.unroll(2):
                value = round_to_tf32(value_local[o, pair * 2 + half])
                if slices.num_mixes % 8 != 0:
                    value = T.if_then_else(o * 8 + lane // 4 < slices.num_mixes, value, T.float32(0.0))
                high_local[half] = high_of(value)
                low_local[half] = value - high_of(value)
            for half in T.vectorized(2):  # one instruction rounds two
                fn_local[operand(slices, stream, pair, o) + half] = T.cast(high_local[half], T.bfloat16)
            for half in T.vectorized(2):
                fn_local[operand(slices, stream, pair, octets + o) + half] = T.cast(low_local[half], T.bfloat16)


def high_and_rest(value):
    """The high part of a float32 as TF32 takes it, in the upper half of a word; sign and mantissa of the low part.

    These are bit 31 of another word, and its bits 13 to 15. With m and k the upper 7 and lower 3 of the 10 bits of the
    mantissa, 1 + m/128 + k/1024 is 1 + (m - 1)/128 + (1 + k/8)/128 in the upper half of a binade. In the lower half it
    is 1 + (m + 2)/128 - (1 + (8 - k)/8)/128, or 1 + (m + 1)/128 - 1/128 if k is 0. Both parts have the exponent of the
    number, and what has none is 0. Bits of the words that are not mentioned may be anything.
    """
    bits = rounded_bits(value)
    upper = (bits & T.uint32(1 << 22)) != 0
    step = T.Select(upper, T.uint32(0xFFFF0000), T.uint32(15 << 13))
    rest = T.Select(upper, bits, T.uint32(0x1FFF) - bits)  # which is the complement of bits - 0x2000
    return bits + T.Select(T.abs(value) < T.float32(2.0**-126), T.uint32(0), step), rest


@macro
def keep_wide_fn(slices, stream, share, lane, value_local, fn_local, low_shared):
    """The high part of what `read_fn` gave, two channels in a word, and the low part in shared memory.

    There a word has four channels: sign and mantissa of the first two where a word of operands has them, those of the
    other two 8 bits further to the left, around the end of the word.
    """
    high_local = T.alloc_local((4,), T.uint32)
    rest_local = T.alloc_local((4,), T.uint32)
    word_local = T.alloc_local((2,), T.uint32)
    for o in T.unroll(slices.octets):
        for half in T.unroll(2):
            for e in T.unroll(4):
                value = value_local[o, half * 4 + e]
                if slices.num_mixes % 8 != 0:
                    value = T.if_then_else(o * 8 + lane // 4 < slices.num_mixes, value, T.float32(0.0))
                high, rest = high_and_rest(value)
                high_local[e] = high
                rest_local[e] = rest
            for pair in T.unroll(2):
                word = pick_bytes(high_local[pair * 2], high_local[pair * 2 + 1], 2, 3, 6, 7)
                fn_local[wide_operand(slices, stream, half, o, pair)] = word
            r0, r1, r2, r3 = (rest_local[e] for e in range(4))
            eighths = pick_bytes(pick_bytes(r0, r2, 1, 5, 1, 5), pick_bytes(r1, r3, 1, 5, 1, 5), 0, 1, 4, 5)
            signs = pick_bytes(pick_bytes(r3, r0, 3, 7, 3, 7), pick_bytes(r2, r1, 3, 7, 3, 7), 0, 1, 4, 5)
            word_local[half] = ((eighths >> 1) & T.uint32(0x70707070)) | (signs & T.uint32(0x80808080))
        for half in T.vectorized(2):
            low_shared[share, stream, o, lane, half] = word_local[half]


def wide_operand(slices, stream, half, octet, pair):
    """Where the word of two channels lies: `pair` of the four of a step, `half` of a stream."""
    return ((stream * 2 + half) * slices.octets + octet) * 2 + pair


def operand(slices, stream, pair, octet):
    """Where a pair of channels of a lane lies, for a stream and eight rows.

    The registers of an operand go row, row + 8, then the next channels; it has four of the eight channels.
    """
    step = stream * 2 + pair // 2
    return (step * slices.octets + octet // 2) * 8 + (octet % 2 + pair % 2 * 2) * 2


@macro
def add_product(a_local, a, b_local, b, c_local, part, c):
    """`c += a b` of a warp, from the given elements of its operands on, of c in a part of it."""
    T.ptx_mma(
        'float32',
        'm16n8k16',
        'row',
        'col',
        'bf16',
        'bf16',
        'fp32',
        T.access_ptr(a_local[a], 'r', 8 if a_local.dtype == 'bfloat16' else 4),
        0,
        T.access_ptr(b_local[b], 'r', 4),
        0,
        T.access_ptr(c_local[part, c], 'rw', 4),
        0,
        T.bool(False),
    )


@macro
def multiply(slices, stream, x_local, fn_local, sum_local, part):
    """Add the products of a stream of 8 tokens with fn, and in a last tile those of the tokens with each other.

    `part` of the sums is that of these tokens.
    """
    tiles = slices.octets
    tokens_local = T.alloc_local((8,), T.bfloat16)
    T.clear(tokens_local)
    for half in T.unroll(2):
        for m in T.unroll(tiles):
            add_product(fn_local, ((stream * 2 + half) * tiles + m) * 8, x_local, half * 4, sum_local, part, m * 4)
        for e in T.unroll(4):
            tokens_local[e // 2 * 4 + e % 2] = x_local[half * 4 + e]  # rows behind the 8 tokens are 0
        add_product(tokens_local, 0, x_local, half * 4, sum_local, part, tiles * 4)


@macro
def multiply_wide(slices, stream, x_local, fn_local, low_shared, share, lane, sum_local, part):
    """The same with what `keep_wide_fn` gave: the sums of low parts are 128 times as large."""
    octets = slices.octets
    rows_local = T.alloc_local((4,), T.uint32)
    code_local = T.alloc_local((octets, 2), T.uint32)
    for o in T.unroll(octets):
        for half in T.vectorized(2):
            code_local[o, half] = low_shared[share, stream, o, lane, half]
    for half in T.unroll(2):
        for m in T.unroll(octets):
            for r in T.unroll(4):
                octet, pair = m * 2 + r % 2, r // 2
                high = fn_local[wide_operand(slices, stream, half, octet % octets, pair)]
                code = code_local[octet % octets, half]
                own = T.if_then_else(pair == 0, code, (code >> 8) | (code << 24))
                low = T.call_extern(T.uint32, 'with_exponents', own, high)
                rows_local[r] = T.if_then_else(octet < octets, high, low)
            add_product(rows_local, 0, x_local, half * 4, sum_local, part, m * 4)
    x_pairs = T.view(x_local, (WIDTH // 2,), T.uint32)
    for pair in T.unroll(WIDTH // 2):  # squares without tensor cores, which have enough to do, as has a lane
        for half in (0, 1):
            value = widened(x_pairs[pair], half)
            sum_local[part, octets * 4] = T.ieee_fmaf(value, value, sum_local[part, octets * 4])


@macro
def keep_sums(slices, sum_local, part, sum_shared, turn, share, first, lane):
    """The sums of a warp over its channels, of the 8 tokens from `first` on, to where those of a block meet."""
    octets, low_unit = slices.octets, 1 / 128 if slices.wide else 1.0
    token = lane // 4
    for o in T.unroll(octets):
        for c in T.unroll(2):
            high, low = o * 2 + c, (octets + o) * 2 + c  # a tile has two octets of rows, two tokens each
            total = sum_local[part, high] + sum_local[part, low] * low_unit
            sum_shared[turn, share, first + lane % 4 * 2 + c, o * 8 + token] = total
    square = octets * 4
    if slices.wide:
        for distance in (1, 2):
            sum_local[part, square] = sum_local[part, square] + T.shfl_xor(sum_local[part, square], distance)
        if lane % 4 == 0:
            sum_shared[turn, share, first + token, slices.columns] = sum_local[part, square]
    elif lane % 4 == token // 2:  # the product of a token with itself
        total = T.if_then_else(token % 2 == 0, sum_local[part, square], sum_local[part, square + 1])
        sum_shared[turn, share, first + token, slices.columns] = total


@macro
def sum_shares(slices, sum_shared, turn, token, first, total_local):
    """Four sums of a token over the channels of a slice, its warps in ascending order."""
    part_local = T.alloc_local((4,), T.float32)
    for e in T.vectorized(4):
        total_local[e] = sum_shared[turn, 0, token, first + e]
    if slices.shares > 1:
        for w in T.unroll(slices.shares - 1):
            for e in T.vectorized(4):
                part_local[e] = sum_shared[turn, w + 1, token, first + e]
            for e in T.unroll(4):
                total_local[e] = total_local[e] + part_local[e]


@macro
def clear_spare(slices, sum_shared, thread, num_threads):
    """Zeros for the sums nobody writes."""
    turns, shares, tile, _ = sum_shared.shape
    for r in T.serial(T.ceildiv(turns * shares * tile, num_threads)):
        index = r * num_threads + thread
        if index < turns * shares * tile:
            for e in T.unroll(slices.sums - slices.columns):
                sum_shared[index // tile // shares, index // tile % shares, index % tile, slices.columns + e] = 0.0
