"""Slices: blocks that share the channels of a token, and keep their share of fn in registers for many tokens.

Block `rank` of a token has a slice of the channels of every stream; a warp of it has 32 channels of every stream, and
with them all products of 8 tokens at a time on the tensor cores (m16n8k16). Fn comes first in such a product, its rows
in two parts (`norm_fn_device`: high and low), and never leaves the registers. A thread holds 8 neighbouring channels of
both operands and names them in its own order: a sum over channels may take them in any, if both operands agree. So
tokens come from shared memory as they lie there, 16 bytes at a time.

The sums of a slice are those of its warps in ascending order, whatever the number of tokens: the same bits wherever
they are computed.
"""

import math
from dataclasses import dataclass

from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.mhc.norm_fn_device import high_of, padded, round_to_tf32

#: Channels of a warp, and of a lane of it; tokens of a product.
WARP_CHANNELS, WIDTH, TOKENS = 32, 8, 8

#: Warps of a block that multiply, and registers of a thread for fn, at most.
MAX_WARPS, MAX_REGISTERS = 8, 96

#: Clusters that run at a time on an H200, by the blocks of one.
ACTIVE_CLUSTERS = {16: 7, 8: 15, 4: 30, 2: 66, 1: 132}

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
        """Slices of a token: as many as a cluster may have blocks, if the channels can be divided."""
        return next(n for n in (16, 8, 4, 2, 1) if self.hidden // WARP_CHANNELS % n == 0)

    @property
    def channels(self) -> int:
        """Channels of a stream in a slice."""
        return self.hidden // self.count

    @property
    def shares(self) -> int:
        """Warps that share the channels of a slice."""
        return self.channels // WARP_CHANNELS

    @property
    def teams(self) -> int:
        """Warps that share the tokens of a tile: a power of two."""
        return 1 << int(math.log2(max(1, MAX_WARPS / self.shares)))

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
    def operands(self) -> int:
        """Elements of fn a thread holds."""
        return self.num_streams * WIDTH * 2 * (self.columns // 8)

    @property
    def fits(self) -> bool:
        """Whether a slice fits into the registers of a block, and the sums of a token into a warp."""
        return self.shares <= MAX_WARPS and self.operands <= 2 * MAX_REGISTERS and self.columns < WARP

    @property
    def groups(self) -> int:
        """Clusters of `count` blocks that run at a time, a block on an SM."""
        return ACTIVE_CLUSTERS[self.count]

    def pitch(self, rows: int) -> int:
        """Elements between tokens in shared memory, `rows` slices each; two of them lie in different banks."""
        return rows * self.channels + (0 if rows * self.shares % 2 else 32)


def tile_for(slices: Slices, token_bytes: int, most_bytes: int, num_tokens: int) -> int:
    """Tokens of a tile: about `most_bytes`, fewer if there are not enough of them for all blocks."""
    tile = TOKENS * slices.teams
    while tile < 32 and 2 * tile * token_bytes <= most_bytes and num_tokens > tile * slices.groups:
        tile *= 2
    return tile


@macro
def load_fn(fn, slices, rank, share, lane, fn_local):
    """The part of fn a thread needs: as many products as there are eighths of rows, first operands of all of them."""
    octets = slices.columns // 8
    value_local = T.alloc_local((slices.num_streams * octets, WIDTH), T.float32)
    for s in T.unroll(slices.num_streams):  # all on their way before the first is used
        first = s * slices.hidden + rank * slices.channels + share * WARP_CHANNELS + lane % 4 * WIDTH
        for o in T.unroll(octets):
            row = T.min(o * 8 + lane // 4, slices.num_mixes - 1)
            for v in T.unroll(2):
                for e in T.vectorized(4):
                    value_local[s * octets + o, v * 4 + e] = fn[row, first + v * 4 + e]
    high_local = T.alloc_local((2,), T.float32)
    low_local = T.alloc_local((2,), T.float32)
    for s in T.unroll(slices.num_streams):
        for o in T.unroll(octets):
            for pair in T.unroll(WIDTH // 2):
                for half in T.unroll(2):
                    value = round_to_tf32(value_local[s * octets + o, pair * 2 + half])
                    if slices.num_mixes % 8 != 0:
                        value = T.if_then_else(o * 8 + lane // 4 < slices.num_mixes, value, T.float32(0.0))
                    high_local[half] = high_of(value)
                    low_local[half] = value - high_of(value)
                for half in T.vectorized(2):  # one instruction rounds two
                    fn_local[operand(slices, s, pair, o) + half] = T.cast(high_local[half], T.bfloat16)
                for half in T.vectorized(2):
                    fn_local[operand(slices, s, pair, octets + o) + half] = T.cast(low_local[half], T.bfloat16)


def operand(slices, stream, pair, octet):
    """Where a pair of channels of a lane lies, for a stream and eight rows.

    The registers of an operand go row, row + 8, then the next channels; it has four of the eight channels.
    """
    step = stream * 2 + pair // 2
    return (step * (slices.columns // 8) + octet // 2) * 8 + (octet % 2 + pair % 2 * 2) * 2


@macro
def add_product(a_local, a, b_local, b, c_local, c):
    """`c += a b` of a warp, from the given elements of its operands on."""
    T.ptx_mma(
        'float32',
        'm16n8k16',
        'row',
        'col',
        'bf16',
        'bf16',
        'fp32',
        T.access_ptr(a_local[a], 'r', 8),
        0,
        T.access_ptr(b_local[b], 'r', 4),
        0,
        T.access_ptr(c_local[c], 'rw', 4),
        0,
        T.bool(False),
    )


@macro
def multiply(slices, stream, x_local, fn_local, sum_local):
    """Add the products of a stream of 8 tokens with fn, and in a last tile those of the tokens with each other."""
    tiles = slices.columns // 8
    tokens_local = T.alloc_local((8,), T.bfloat16)
    T.clear(tokens_local)
    for half in T.unroll(2):
        for m in T.unroll(tiles):
            add_product(fn_local, ((stream * 2 + half) * tiles + m) * 8, x_local, half * 4, sum_local, m * 4)
        for e in T.unroll(4):
            tokens_local[e // 2 * 4 + e % 2] = x_local[half * 4 + e]  # rows behind the 8 tokens are 0
        add_product(tokens_local, 0, x_local, half * 4, sum_local, tiles * 4)


@macro
def keep_sums(slices, sum_local, sum_shared, turn, share, first, lane):
    """The sums of a warp over its channels, of the 8 tokens from `first` on, to where those of a block meet."""
    octets = slices.columns // 8
    token = lane // 4
    for o in T.unroll(octets):
        for c in T.unroll(2):
            high, low = o * 2 + c, (octets + o) * 2 + c  # a tile has two octets of rows, two tokens each
            sum_shared[turn, share, first + lane % 4 * 2 + c, o * 8 + token] = sum_local[high] + sum_local[low]
    if lane % 4 == token // 2:  # the product of a token with itself
        square = T.if_then_else(token % 2 == 0, sum_local[octets * 4], sum_local[octets * 4 + 1])
        sum_shared[turn, share, first + token, slices.columns] = square


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
