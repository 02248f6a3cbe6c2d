"""The projection where each block owns a slice of the channels and keeps its part of fn in registers.

`count` blocks work on a token. Block `rank` has a slice of the channels of every stream; a warp has 32 channels of
every stream. A warp multiplies 8 tokens at a time by mma (m16n8k16). The A operand is fn, its rows split into a high
and a low bfloat16 part (`_macros.py`), and it stays in registers. The B operand is a tile of tokens in shared memory. A
thread holds 8 neighboring channels of both operands. The mma assigns them other channel numbers, the same ones in both
operands, so the sum over channels is the same. Thus tokens are loaded 16 bytes at a time.

Wide slices have more than 320 channels, too many for a low part in registers. The low part has three bits. It is stored
as a number with the exponent of the high part, times 1/128, whose sign and mantissa fit into a byte. Every number of 11
significant bits is such a sum if the high part may lie on either side of it (`high_and_rest`). A word of shared memory
holds four such bytes, and one instruction makes an operand from it and the high part.

The sums of a slice are the sums of its warps in ascending order. Tiles do not matter, so all kernels get the same bits.
"""

import math
from dataclasses import dataclass

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.device.bits import pick_bytes, widened
from tile_kernels.mhc._macros import high_of, padded, round_to_tf32, rounded_bits

#: Channels of a warp, and of a lane of it; tokens of an mma.
WARP_CHANNELS, WIDTH, TOKENS = 32, 8, 8

#: Warps of a block that multiply: eight; ten where these divide slices better; up to 16 of wide slices. Registers of a
#: thread for fn, at most.
WARPS, MANY_WARPS, WIDE_WARPS, MAX_REGISTERS = 8, 10, 16, 96

#: Signs and mantissas of two bfloat16 of one word, exponents of another. Inline assembly, because the compiler would
#: compute the masked exponents before the loop and keep them in registers.
WITH_EXPONENTS = """
static __device__ __forceinline__ unsigned with_exponents(unsigned word, unsigned other) {
  unsigned result;
  asm("lop3.b32 %0, %1, %2, 0x7f807f80, 0xe4;" : "=r"(result) : "r"(other), "r"(word));
  return result;
}
"""

#: Clusters that run at the same time on an H200, by the number of blocks in one.
ACTIVE_CLUSTERS = {16: 7, 8: 15, 4: 30, 2: 66}

#: The code has all barriers it needs. Buffers that other blocks of the cluster write to must not be reused.
SLICE_PASS_CONFIGS = {
    'TL_DISABLE_THREAD_STORAGE_SYNC': True,
    'TL_DISABLE_SHARED_MEMORY_REUSE': True,
    'TL_DISABLE_SAFE_MEMORY_ACCESS': True,
    'TL_ENABLE_LOWER_LDGSTG': True,
}

#: Blocks of `project_slices_kernel`, about one on each SM. Results do not depend on it.
BLOCKS = 128

#: Stages of a block for tiles, at most: a power of two.
MAX_STAGES = 8

SPACE = dict(tile=(8, 16, 32, 64), stages=tuple(range(2, MAX_STAGES + 1)))

# Config ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slices:
    """`count` slices of a token, with `channels` channels of each stream."""

    hidden: int
    num_streams: int
    num_mixes: int

    @property
    def count(self) -> int:
        """Slices of a token, and blocks of a cluster: the fewest that fit into registers, or else the most."""
        possible = [n for n in (2, 4, 8, 16) if self.hidden // WARP_CHANNELS % n == 0]
        return next((n for n in possible if self.hidden <= n * WARPS * WARP_CHANNELS), possible[-1])

    @property
    def channels(self) -> int:
        """Channels of a stream in a slice."""
        return self.hidden // self.count

    @property
    def slice_warps(self) -> int:
        """Warps with different channels of a slice."""
        return self.channels // WARP_CHANNELS

    @property
    def wide(self) -> bool:
        """Whether the low part of fn is encoded in shared memory."""
        return self.slice_warps > MANY_WARPS

    @property
    def warps(self) -> int:
        """Multiplying warps of a block that has other warps too: an even number, some may be idle."""
        if self.wide:
            return -(-self.slice_warps // 2) * 2
        return MANY_WARPS if self.slice_warps in (5, 9, 10) else WARPS

    @property
    def token_groups(self) -> int:
        """Warps with the same channels and different tokens of a tile: a power of two."""
        return self.token_groups_of(self.warps)

    def token_groups_of(self, warps: int) -> int:
        """`token_groups` if `warps` warps multiply."""
        return 1 << int(math.log2(max(1, warps / self.slice_warps)))

    @property
    def num_threads(self) -> int:
        """Threads of a block."""
        return self.slice_warps * self.token_groups * WARP

    @property
    def columns(self) -> int:
        """Products of a token, including padding rows of fn."""
        return padded(self.num_mixes)

    @property
    def sums(self) -> int:
        """Floats for the products and the sum of squares of a token, padded to avoid bank conflicts."""
        return self.columns + 4

    @property
    def octets(self) -> int:
        """Groups of eight rows of fn."""
        return self.columns // 8

    @property
    def operands(self) -> int:
        """Elements of fn in a thread, high and low."""
        return self.num_streams * WIDTH * 2 * self.octets

    @property
    def low_shape(self) -> tuple[int, ...]:
        """Shape of the encoded low part: two words for each warp, stream, octet and lane."""
        return (self.slice_warps, self.num_streams, self.octets, WARP, 2)

    @property
    def low_bytes(self) -> int:
        """Bytes of the encoded low part, 0 without one."""
        return 4 * math.prod(self.low_shape) if self.wide else 0

    @property
    def fits(self) -> bool:
        """Whether a slice fits into a block, and a warp has a lane for each sum of a token."""
        return self.slice_warps <= WIDE_WARPS and self.operands <= 2 * MAX_REGISTERS and self.columns < WARP

    @property
    def fits_registers(self) -> bool:
        """Whether a slice fits into a block, with both parts of fn in registers."""
        return self.fits and not self.wide

    @property
    def groups(self) -> int:
        """Clusters of `count` blocks that run at the same time, with one block on an SM."""
        return ACTIVE_CLUSTERS[self.count]

    def pitch(self, rows: int) -> int:
        """Elements between tokens of `rows` slices in shared memory, padded to avoid bank conflicts."""
        return rows * self.channels + (0 if rows * self.slice_warps % 2 else 32)


def tile_for(slices: Slices, token_groups: int, token_bytes: int, most_bytes: int, num_tokens: int) -> int:
    """Tokens of a tile: about `most_bytes`, or fewer if some blocks would get no tile."""
    tile = TOKENS * token_groups
    while tile < 32 and 2 * tile * token_bytes <= most_bytes and num_tokens > tile * slices.groups:
        tile *= 2
    return tile


def choose_project(hidden: int, num_streams: int, num_mixes: int, num_tokens: int) -> dict:
    """Small tiles: some GPUs that run this kernel have only 99 KB of shared memory."""
    slices = Slices(hidden, num_streams, num_mixes)
    token_bytes = 2 * slices.pitch(num_streams)
    tile = tile_for(slices, slices.token_groups, token_bytes, 20 << 10, num_tokens)
    return dict(tile=tile, stages=min(3, (90 << 10) // (tile * token_bytes)))


# fn ----------------------------------------------------------------------------------------


@macro
def read_fn(fn, slices, first_row, first_channel, slice_warp, lane, value_local):
    """Load the elements of fn of a thread for one stream: `value_local[octet, channel]`."""
    channel = first_channel + slice_warp * WARP_CHANNELS + lane % 4 * WIDTH
    for o in T.unroll(slices.octets):
        row = first_row + T.min(o * 8 + lane // 4, slices.num_mixes - 1)
        for v in T.unroll(2):
            for e in T.vectorized(4):
                value_local[o, v * 4 + e] = fn[row, channel + v * 4 + e]


def chunk_of(channel, chunk, count):
    """Index of the chunk of a channel, for one or two chunks; without a division, which would take registers."""
    return T.cast(channel >= chunk, T.int32) if count == 2 else 0


@macro
def read_copied_fn(fn_shared, slices, first_row, chunks, slice_warp, lane, value_local):
    """`read_fn` from shared memory, where fn is stored in chunks of channels with all rows."""
    chunk = fn_shared.shape[1]
    channel = slice_warp * WARP_CHANNELS + lane % 4 * WIDTH
    part = chunk_of(channel, chunk, chunks)
    for o in T.unroll(slices.octets):
        row = first_row + part * slices.columns + T.min(o * 8 + lane // 4, slices.num_mixes - 1)
        for v in T.unroll(2):
            for e in T.vectorized(4):
                value_local[o, v * 4 + e] = fn_shared[row, channel - part * chunk + v * 4 + e]


@macro
def keep_fn(slices, stream, lane, value_local, fn_local):
    """Convert the elements from `read_fn` to A operands, a high and a low one for each octet."""
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
            for half in T.vectorized(2):  # one instruction rounds two elements
                fn_local[operand(slices, stream, pair, o) + half] = T.cast(high_local[half], T.bfloat16)
            for half in T.vectorized(2):
                fn_local[operand(slices, stream, pair, octets + o) + half] = T.cast(low_local[half], T.bfloat16)


def high_and_rest(value):
    """Split a float32, rounded to TF32: a word with the high part, a word with sign and mantissa of the low part.

    The high part is the upper half of the first word. The low part has its sign in bit 31 of the second word, and its
    mantissa in bits 13 to 15. Other bits are undefined. Both parts have the exponent of the number.

    Let m be the upper 7 and k the lower 3 of the 10 mantissa bits. In the upper half of a binade
    1 + m/128 + k/1024 = 1 + (m - 1)/128 + (1 + k/8)/128. In the lower half it is 1 + (m + 2)/128 - (1 + (8 - k)/8)/128,
    or 1 + (m + 1)/128 - 1/128 if k is 0. Subnormal numbers become 0.
    """
    bits = rounded_bits(value)
    upper = (bits & T.uint32(1 << 22)) != 0
    step = T.Select(upper, T.uint32(0xFFFF0000), T.uint32(15 << 13))
    rest = T.Select(upper, bits, T.uint32(0x1FFF) - bits)  # the complement of bits - 0x2000
    return bits + T.Select(T.abs(value) < T.float32(2.0**-126), T.uint32(0), step), rest


@macro
def keep_wide_fn(slices, stream, slice_warp, lane, value_local, fn_local, low_shared):
    """Convert the elements from `read_fn`: high parts to registers, two in a word, low parts to shared memory.

    A word of low parts has four channels. Sign and mantissa of the first two are at their positions in an operand,
    those of the other two are rotated left by 8 bits.
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
            low_shared[slice_warp, stream, o, lane, half] = word_local[half]


def wide_operand(slices, stream, half, octet, pair):
    """Index in `fn_local` of a word with two channels: `pair` of a `half` of the lane's channels of a stream."""
    return ((stream * 2 + half) * slices.octets + octet) * 2 + pair


def operand(slices, stream, pair, octet):
    """Index in `fn_local` of a pair of channels of a lane, for a stream and an octet.

    The registers of an A operand are row, row + 8, then the next channels. It has four of the eight channels.
    """
    step = stream * 2 + pair // 2
    return (step * slices.octets + octet // 2) * 8 + (octet % 2 + pair % 2 * 2) * 2


# Products ----------------------------------------------------------------------------------


@macro
def add_product(a_local, a, b_local, b, c_local, part, c):
    """`c += a b` by mma; `a`, `b` and `part, c` are the first elements of the operands."""
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
    """Add the products of fn with a stream of 8 tokens to `sum_local[part]`.

    The last mma multiplies the tokens with each other: its diagonal has the squares.
    """
    tiles = slices.octets
    tokens_local = T.alloc_local((8,), T.bfloat16)
    T.clear(tokens_local)
    for half in T.unroll(2):
        for m in T.unroll(tiles):
            add_product(fn_local, ((stream * 2 + half) * tiles + m) * 8, x_local, half * 4, sum_local, part, m * 4)
        for e in T.unroll(4):
            tokens_local[e // 2 * 4 + e % 2] = x_local[half * 4 + e]  # the other 8 rows of the operand are 0
        add_product(tokens_local, 0, x_local, half * 4, sum_local, part, tiles * 4)


@macro
def multiply_wide(slices, stream, x_local, fn_local, low_shared, slice_warp, lane, sum_local, part):
    """`multiply` with the operands of `keep_wide_fn`: the sums of low parts are 128 times as large."""
    octets = slices.octets
    rows_local = T.alloc_local((4,), T.uint32)
    code_local = T.alloc_local((octets, 2), T.uint32)
    for o in T.unroll(octets):
        for half in T.vectorized(2):
            code_local[o, half] = low_shared[slice_warp, stream, o, lane, half]
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
    for pair in T.unroll(WIDTH // 2):  # squares by FMA, because tensor cores are busy enough
        for half in (0, 1):
            value = widened(x_pairs[pair], half)
            sum_local[part, octets * 4] = T.ieee_fmaf(value, value, sum_local[part, octets * 4])


@macro
def keep_sums(slices, sum_local, part, sum_shared, turn, slice_warp, first, lane):
    """Store the sums of a warp over its channels, of the 8 tokens from `first` on, to shared memory."""
    octets, low_unit = slices.octets, 1 / 128 if slices.wide else 1.0
    token = lane // 4
    for o in T.unroll(octets):
        for c in T.unroll(2):
            high, low = o * 2 + c, (octets + o) * 2 + c  # a thread has two tokens of each octet
            total = sum_local[part, high] + sum_local[part, low] * low_unit
            sum_shared[turn, slice_warp, first + lane % 4 * 2 + c, o * 8 + token] = total
    square = octets * 4
    if slices.wide:
        for distance in (1, 2):
            sum_local[part, square] = sum_local[part, square] + T.shfl_xor(sum_local[part, square], distance)
        if lane % 4 == 0:
            sum_shared[turn, slice_warp, first + token, slices.columns] = sum_local[part, square]
    elif lane % 4 == token // 2:  # the diagonal: the product of a token with itself
        total = T.if_then_else(token % 2 == 0, sum_local[part, square], sum_local[part, square + 1])
        sum_shared[turn, slice_warp, first + token, slices.columns] = total


@macro
def sum_warps(slices, sum_shared, turn, token, first, total_local):
    """Four sums of a token over the channels of a slice: the sums of its warps in ascending order."""
    part_local = T.alloc_local((4,), T.float32)
    for e in T.vectorized(4):
        total_local[e] = sum_shared[turn, 0, token, first + e]
    if slices.slice_warps > 1:
        for w in T.unroll(slices.slice_warps - 1):
            for e in T.vectorized(4):
                part_local[e] = sum_shared[turn, w + 1, token, first + e]
            for e in T.unroll(4):
                total_local[e] = total_local[e] + part_local[e]


@macro
def clear_spare(slices, sum_shared, thread, num_threads):
    """Write zeros to the padding of `sum_shared`."""
    turns, warps, tile, _ = sum_shared.shape
    for r in T.serial(T.ceildiv(turns * warps * tile, num_threads)):
        index = r * num_threads + thread
        if index < turns * warps * tile:
            for e in T.unroll(slices.sums - slices.columns):
                sum_shared[index // tile // warps, index // tile % warps, index % tile, slices.columns + e] = 0.0


# Kernel ------------------------------------------------------------------------------------


@kernel(choose=choose_project, space=SPACE, pass_configs=SLICE_PASS_CONFIGS)
def project_slices_kernel(hidden: int, num_streams: int, num_mixes: int, *, tile: int, stages: int):
    """Write the products and sums of squares of every slice; for GPUs without large clusters."""
    slices = Slices(hidden, num_streams, num_mixes)
    ahead, parts, quads = stages - 1, tile // TOKENS // slices.token_groups, slices.sums // 4
    num_tokens = T.dynamic('num_tokens')

    @macro
    def copy_tile(x, first, rank, tile_shared, slot):
        """Start to copy the slices of the tokens from `first` on; padding tokens are zeros."""
        vectors = slices.channels // WIDTH
        if first < x.shape[0]:
            for r in T.unroll(-(-tile * num_streams * vectors // slices.num_threads)):
                index = r * slices.num_threads + T.get_thread_binding()
                token, s, vector = index // vectors // num_streams, index // vectors % num_streams, index % vectors
                if token < tile:
                    T.ptx_cp_async(
                        T.access_ptr(tile_shared[slot, token, s * slices.channels + vector * WIDTH], 'w', WIDTH),
                        T.access_ptr(x[first + token, s, rank * slices.channels + vector * WIDTH], 'r', WIDTH),
                        WIDTH,
                        first + token < x.shape[0],
                    )
        T.ptx_commit_group()

    @T.prim_func
    def project_slices(
        x: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        fn: T.Tensor((num_mixes, num_streams * hidden), T.float32),
        mul_parts: T.Tensor((slices.count, num_tokens, slices.columns), T.float32),
        square_parts: T.Tensor((slices.count, num_tokens), T.float32),
    ):
        num_tiles = T.ceildiv(num_tokens, tile)
        groups = T.min(BLOCKS // slices.count, num_tiles)
        with T.Kernel(groups * slices.count, threads=slices.num_threads) as pid:
            tile_shared = T.alloc_shared((stages, tile, slices.pitch(num_streams)), T.bfloat16)
            sum_shared = T.alloc_shared((1, slices.slice_warps, tile, slices.sums), T.float32)
            fn_local = T.alloc_local((slices.operands,), T.bfloat16)
            value_local = T.alloc_local((slices.octets, WIDTH), T.float32)
            x_local = T.alloc_local((WIDTH,), T.bfloat16)
            sum_local = T.alloc_local((1, slices.octets * 4 + 4), T.float32)
            total_local = T.alloc_local((4,), T.float32)
            tx = T.get_thread_binding()
            rank, group, lane = pid % slices.count, pid // slices.count, tx % WARP
            slice_warp, token_group = tx // WARP % slices.slice_warps, tx // WARP // slices.slice_warps
            slot = T.alloc_var(T.int32, init=0)  # stage of tile i
            free = T.alloc_var(T.int32, init=ahead)  # stage of tile i - 1, which the next copy reuses

            for i in T.unroll(ahead):
                copy_tile(x, (group + i * groups) * tile, rank, tile_shared, i)
            clear_spare(slices, sum_shared, tx, slices.num_threads)
            for s in T.unroll(num_streams):
                read_fn(fn, slices, 0, s * hidden + rank * slices.channels, slice_warp, lane, value_local)
                keep_fn(slices, s, lane, value_local, fn_local)
            for i in T.serial(T.ceildiv(num_tiles - group, groups)):
                first = (group + i * groups) * tile
                T.ptx_wait_group(ahead - 1)
                T.sync_threads()
                copy_tile(x, (group + (i + ahead) * groups) * tile, rank, tile_shared, free)
                for p in T.unroll(parts):
                    start = (p * slices.token_groups + token_group) * TOKENS
                    channel = slice_warp * WARP_CHANNELS + lane % 4 * WIDTH
                    T.clear(sum_local)
                    for s in T.unroll(num_streams):
                        for e in T.vectorized(WIDTH):
                            x_local[e] = tile_shared[slot, start + lane // 4, s * slices.channels + channel + e]
                        multiply(slices, s, x_local, fn_local, sum_local, 0)
                    keep_sums(slices, sum_local, 0, sum_shared, 0, slice_warp, start, lane)
                T.sync_threads()
                for r in T.unroll(-(-tile * quads // slices.num_threads)):
                    index = r * slices.num_threads + tx
                    token, quad = index // quads, index % quads
                    if token < tile and first + token < num_tokens:
                        sum_warps(slices, sum_shared, 0, token, quad * 4, total_local)
                        if quad < quads - 1:
                            for e in T.vectorized(4):
                                mul_parts[rank, first + token, quad * 4 + e] = total_local[e]
                        else:
                            square_parts[rank, first + token] = total_local[0]
                free = slot
                slot = T.if_then_else(slot == stages - 1, 0, slot + 1)

    return project_slices
