"""Kernels of the product with packed weights; `packed_weight` has the layout, `gemm_dequant` the formula.

Three kernels multiply, and one writes the matrix to memory for the gradient:

    dequant_rows        up to 16 rows: mma on registers, the sum over k split over warps and blocks; memory bound
    dequant_wgmma       more rows, Hopper: a warpgroup converts tiles to shared memory, two multiply by wgmma
    portable_dequant    more rows, other GPUs: the same in one role with mma

Kernels for few rows multiply exact codes and scale the sum of a group in float32. The others round a weight to half
precision once.
"""

from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.cost import count_product
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, macro
from tile_kernels.gemm._macros import (
    DENSE,
    FALLBACK,
    LOADING_REGISTERS,
    MMA_M,
    MMA_N,
    MMA_THREADS,
    MULTIPLYING_REGISTERS,
    WARPGROUP,
    WARPGROUP_ROLES,
    WARPGROUP_ROWS,
    Tiles,
    count_turns,
    find_tile,
    free_last,
    locate_tile,
    make_ring,
    most_tiles,
    next_free,
    next_full,
    swizzled,
)
from tile_kernels.gemm.gemm_kernels import (
    ROW_WARPS,
    ROWS_PASS_CONFIGS,
    STRIP,
    TURN_BITS,
    best_splits,
    choose_rows,
    find_group,
)
from tile_kernels.gemm.packed_weight import BLOCK, FORMATS, ROWS, ZERO, WeightFormat

STEP = 16  # channels of one mma
SLICE = 2048  # channels of a block of `dequant_rows`, at most
SM_BYTES = 227 << 10  # shared memory of a block of Hopper
BLOCK_BYTES = 113 << 10  # shared memory of a block if two run on an SM of Hopper
TILE_K = 64  # channels of a step of the other kernels


def view(tensor: Any, shape: tuple[int, ...], elem: Any) -> Any:
    """A tensor of the same memory; `T.view` counts its bits in int32, which is too little for many experts."""
    return T.Tensor(shape, elem, tensor.data)


# Conversion ---------------------------------------------------------------------------------


def half_bits(dtype: torch.dtype, value: float) -> int:
    """The bits of a number in half precision, in both halves of a word."""
    bits = int(torch.tensor(value, dtype=dtype).view(torch.int16).item()) & 0xFFFF
    return bits * 0x00010001


def pairwise(function: Any, dtype: torch.dtype, x: Any, y: Any) -> Any:
    """A packed instruction on words of two numbers."""
    pair = 'bfloat16x2' if dtype is torch.bfloat16 else 'float16x2'
    return T.reinterpret(function(T.reinterpret(x, pair), T.reinterpret(y, pair)), T.uint32)


def shifted(word: Any, left: int) -> Any:
    """A shift by any number of bits, to the right if negative."""
    if left == 0:
        return word
    return word << T.uint32(left) if left > 0 else word >> T.uint32(-left)


def masked(word: Any, left: int, mask: int) -> Any:
    """Bits of both halves of a shifted word."""
    return shifted(word, left) & T.uint32(mask * 0x00010001)


def magic_bits(dtype: torch.dtype) -> int:
    """Two numbers of which the mantissa of a code is the low part: 128, or 1024 for float16."""
    return half_bits(dtype, 128.0 if dtype is torch.bfloat16 else 1024.0)


def magic_word(dtype: torch.dtype, stride: Any) -> Any:
    """`magic_bits` in a register: with a constant, and-or is two instructions.

    The compiler does not know that no stride is negative.
    """
    return T.cast(magic_bits(dtype) + T.min(stride, 0), T.uint32)


def decode_pair(
    form: WeightFormat, dtype: torch.dtype, words: Any, step: int, pair: int, zero: Any, magic: Any = None
) -> Any:
    """Two exact codes of a lane in half precision: `pair` of a step; `zero` are the bits of a zero point of u4.

    `magic` is `magic_word` if the caller has it in a register. Codes of u4 with `zero` None stay larger by that number.
    """
    bf16 = dtype is torch.bfloat16
    if form.element == 'u4':
        word = T.uint32(magic_bits(dtype)) if magic is None else magic
        biased = masked(words[step], -4 * pair, 0xF) | word
        return biased if zero is None else pairwise(T.sub2, dtype, biased, zero)
    if form.element == 'e2m1':
        word = words[step]
        bits = masked(word, 3 * pair, 0x81C0) if pair < 3 else None
        if bits is None:
            bits = masked(word, 1, 0x8000) | masked(word, -3, 0x0180) | masked(word, -7, 0x0040)
        if not bf16:
            bits = bits & T.uint32(0x80008000) | masked(bits, 3, 0x0E00)
        return pairwise(T.mul2, dtype, bits, T.uint32(half_bits(dtype, 2.0**126 if bf16 else 2.0**14)))
    word, upper = words[step * 2 + pair // 2], pair % 2
    if form.element == 's8':
        if not bf16:
            biased = masked(word, -8 * upper, 0xFF) ^ T.uint32(half_bits(dtype, 1024.0 + 128.0))
            return pairwise(T.sub2, dtype, biased, T.uint32(half_bits(dtype, 1024.0 + 128.0)))
        magic = T.uint32(half_bits(dtype, 128.0))
        low, sign = masked(word, -8 * upper, 0x7F) | magic, masked(word, -8 * upper, 0x80) | magic
        return pairwise(T.sub2, dtype, low, sign)
    left = (0 if upper else 8) - (4 if bf16 else 1)
    bits = masked(word, 0 if upper else 8, 0x8000) | masked(word, left, 0x07F0 if bf16 else 0x3F80)
    return pairwise(T.mul2, dtype, bits, T.uint32(half_bits(dtype, 2.0**120 if bf16 else 2.0**8)))


def number_of(form: WeightFormat, stored: Any) -> Any:
    """A stored factor as float32."""
    if form.factor == 'ue8m0':
        bits = T.max(T.cast(stored, T.uint32) << T.uint32(23), T.uint32(1 << 22))
        return T.reinterpret(bits, T.float32)
    if form.factor == 'e4m3':
        bits = T.cast(stored, T.uint32)
        wide = (bits & T.uint32(0x7F)) << T.uint32(20) | (bits & T.uint32(0x80)) << T.uint32(24)
        return T.reinterpret(wide, T.float32) * T.float32(2.0**120)
    return T.cast(stored, T.float32)


def zero_bits(dtype: torch.dtype, zero: Any) -> Any:
    """The word that `decode_pair` subtracts for a zero point: two numbers of 128 (1024 for float16) plus the point."""
    magic = magic_bits(dtype)
    if zero is None:
        return T.uint32(magic + ZERO * 0x00010001)
    return T.cast(zero, T.uint32) * T.uint32(0x00010001) + T.uint32(magic)


@dataclass(frozen=True)
class Packed:
    """What a kernel knows about packed weights; their tensors have a leading dimension of matrices."""

    form: WeightFormat
    dtype: torch.dtype
    scale_dtype: torch.dtype
    n: int
    k: int
    has_zero: bool

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles of rows and of channels."""
        return self.form.tiles(self.n, self.k)

    @property
    def scale_elem(self) -> Any:
        """Element of stored factors."""
        return T.uint8 if self.form.factor in ('ue8m0', 'e4m3') else T.dtype(self.scale_dtype)

    @property
    def exact(self) -> bool:
        """Whether a code times its factor in half precision is rounded once at most."""
        if self.form.factor in ('ue8m0', 'e4m3'):
            return self.form.factor == 'e4m3' or self.dtype is torch.bfloat16
        return self.scale_dtype is self.dtype

    def tile_group(self, tile: Any) -> Any:
        """The stored group of a tile of channels."""
        if self.form.group == 0:
            return 0
        return tile // (self.form.group // self.form.depth) if self.form.group > self.form.depth else tile

    def arrays(self, num_matrices: int) -> tuple[tuple[int, ...], ...]:
        """Shapes of codes, factors and zero points."""
        rows, cols = self.tiles
        scale = self.form.scale_shape(self.n, self.k)
        return (num_matrices, rows, cols, WARP, 4), (num_matrices, *scale), (num_matrices, *scale)


def describe(fmt: str, dtype: torch.dtype, scale_dtype: torch.dtype, n: int, k: int, has_zero: bool) -> Packed:
    """What a kernel knows about its weights."""
    return Packed(FORMATS[fmt], dtype, scale_dtype, n, k, has_zero)


@macro
def load_lane(packed, weights, matrix, row, col, lane, lane_local, i):
    """Load what a lane needs of tile (row, col) to slot `i` of its registers."""
    form = packed.form
    codes, scale, zero = weights
    words_local, factor_local, point_local = lane_local
    for e in T.vectorized(4):
        words_local[i, e] = codes[matrix, row, col, lane, e]
    group = packed.tile_group(col)
    if form.blocks:
        factor_local[i, 0] = scale[matrix, row // (BLOCK // ROWS), group]
    else:
        for e in T.vectorized(2 * form.per_tile):
            factor_local[i, e] = scale[matrix, row, group, lane // 4, e]
    if packed.has_zero:
        for e in T.vectorized(2 * form.per_tile):
            point_local[i, e] = zero[matrix, row, group, lane // 4, e]


@macro
def convert_lane(packed, lane_local, i, pairs_local):
    """Weights of slot `i` in half precision, rounded once: `pairs_local[4 * step + pair]`."""
    form, dtype = packed.form, packed.dtype
    words_local, factor_local, point_local = lane_local
    words = T.view(words_local, words_local.shape, T.uint32)
    halves = T.view(pairs_local, (2 * form.depth // 4,), T.dtype(dtype))
    for step in tuple(range(form.depth // STEP)):
        inner = step * STEP // form.group if form.per_tile > 1 else 0
        for pair in (0, 1, 2, 3):
            place = inner * 2 + pair % 2
            point = zero_bits(dtype, point_local[i, place] if packed.has_zero else None)
            factor = number_of(form, factor_local[i, 0 if form.blocks else place])
            codes_pair = decode_pair(form, dtype, [words[i, e] for e in range(4)], step, pair, point)
            if packed.exact:
                half = T.reinterpret(T.cast(factor, T.dtype(dtype)), T.uint16)
                both = T.cast(half, T.uint32) * T.uint32(0x00010001)
                pairs_local[step * 4 + pair] = pairwise(T.mul2, dtype, codes_pair, both)
            else:
                pairs_local[step * 4 + pair] = codes_pair
                for e in (0, 1):
                    wide = T.cast(halves[(step * 4 + pair) * 2 + e], T.float32) * factor
                    halves[(step * 4 + pair) * 2 + e] = T.cast(wide, T.dtype(dtype))


@macro
def make_lane(packed, count: int):
    """Registers for `count` tiles: words, factors and zero points of a lane."""
    width = 2 * packed.form.per_tile
    words_local = T.alloc_local((count, 4), T.int32)
    factor_local = T.alloc_local((count, width), packed.scale_elem)
    point_local = T.alloc_local((count, width), T.int16)
    return words_local, factor_local, point_local


# Few rows -----------------------------------------------------------------------------------


def row_splits(n: int, k: int, form: WeightFormat) -> int:
    """Blocks that share the sum over k."""
    rows, cols = form.tiles(n, k)
    return best_splits(-(-rows // STRIP), cols, SLICE // form.depth)


@macro
def multiply(dtype, pairs, a_local, octet, quarter, half, sums, r):
    """Add a product of 16 channels to `sums[r, octet]`."""
    name = 'bf16' if dtype is torch.bfloat16 else 'fp16'
    T.ptx_mma(
        'float32',
        'm16n8k16',
        'row',
        'col',
        name,
        name,
        'fp32',
        T.access_ptr(pairs[0], 'r', 4),
        0,
        T.access_ptr(a_local[octet, quarter, half * 4], 'r', 4),
        0,
        T.access_ptr(sums[r, octet, 0], 'rw', 4),
        0,
        T.bool(False),
    )


@macro
def multiply_lane(packed, words, a_local, octets: int, steps, points, magic, sum_local, r):
    """Add the products of the steps of a group to `sum_local[r, octet]`."""
    pair_local = T.alloc_local((4,), T.uint32)
    for step in steps:
        for pair in (0, 1, 2, 3):
            pair_local[pair] = decode_pair(packed.form, packed.dtype, words, step, pair, points[pair % 2], magic)
        for octet in T.unroll(octets):
            multiply(packed.dtype, pair_local, a_local, octet, step // 2, step % 2, sum_local, r)


PAIR = 2  # tiles of rows that a warp multiplies at a time, so that products of one hide the latency of the other


@kernel(
    choose=choose_rows,
    space=dict(octets=(1, 2), early=EARLY),
    pass_configs=ROWS_PASS_CONFIGS | {'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
    flops=count_product,
    fixed='octets',
)
def dequant_rows_kernel(
    n: int,
    k: int,
    num_groups: int,
    fmt: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    has_zero: bool,
    bias_dtype: torch.dtype | None,
    *,
    octets: int,
    early: bool,
):
    """A block multiplies 128 rows of the weight and a slice of k; its warps take tiles of the slice in turn.

    Every thread copies the 16 bytes of its own lane by cp.async, a tile of channels (two for 8 rows) ahead. It reads no
    other bytes, so the loop needs no barrier. Partial sums of warps, then of blocks, are added in ascending order.

    In bfloat16, codes of u4 with groups enter a product as 128 + code. The sum of a group starts with
    -(128 + zero) * sum(a), so that no instruction subtracts from codes.
    """
    packed = describe(fmt, dtype, scale_dtype, n, k, has_zero)
    form, elem = packed.form, T.dtype(dtype)
    num_rows, stride = T.dynamic('num_rows'), T.dynamic('stride')
    rows, cols = packed.tiles
    strips, splits = -(-rows // STRIP), row_splits(n, k, form)
    slice_tiles, width = -(-cols // splits), 2 * form.per_tile
    slice_k, tokens, threads = slice_tiles * form.depth, octets * 8, ROW_WARPS * WARP
    apart = form.group > 0  # factors differ along k
    own_factors = apart and not form.blocks
    copied_bytes = 16 + (width * scale_dtype.itemsize if own_factors else 0) + (2 * width if has_zero else 0)
    ahead = 2 if tokens * (slice_k + 8) * 2 + 2 * STRIP * threads * copied_bytes <= BLOCK_BYTES else 1
    ring, batches = ahead * STRIP, STRIP // PAIR
    num_matrices = max(num_groups, 1)
    codes_shape, scale_shape, zero_shape = packed.arrays(num_matrices)
    biased = apart and form.element == 'u4' and dtype is torch.bfloat16
    groups = tuple(range(form.per_tile))
    steps = form.depth // STEP // form.per_tile
    scale_elem = packed.scale_elem
    bias_elem = T.dtype(bias_dtype or dtype)
    num_codes = num_matrices * rows * cols * WARP * 4
    stored = form.stored_groups(k) * 8 * width  # factors of a tile of rows
    num_factors = num_matrices * rows * stored if not form.blocks else num_matrices
    turn_factors = packed.tile_group(ROW_WARPS) * 8 * width
    place_elem = T.int64 if max(num_codes, num_factors) >= 1 << 30 else T.int32

    @macro
    def copy_batch(flat, at, strip, slot, batch, turns: int, more, stages):
        """Start to copy what this lane needs of `PAIR` tiles of rows, `turns` after `at`; one group of copies."""
        thread = T.get_thread_binding()
        flat_codes, flat_scale, flat_zero = flat
        code_at, factor_at = at
        codes_shared, scale_shared, zero_shared = stages
        if more:
            for p in tuple(range(PAIR)):
                own = batch * PAIR + p
                r = own if rows % STRIP == 0 else T.min(own, rows - 1 - strip * STRIP)
                line = slot * STRIP + own
                T.ptx_cp_async(
                    T.access_ptr(codes_shared[line, thread, 0], 'w', 4),
                    T.access_ptr(flat_codes[code_at + (r * cols + turns * ROW_WARPS) * (WARP * 4)], 'r', 4),
                    4,
                )
                factor = factor_at + (r * stored + turns * turn_factors)
                if own_factors:
                    T.ptx_cp_async(
                        T.access_ptr(scale_shared[line, thread, 0], 'w', width),
                        T.access_ptr(flat_scale[factor], 'r', width),
                        width,
                    )
                if has_zero:
                    T.ptx_cp_async(
                        T.access_ptr(zero_shared[line, thread, 0], 'w', width),
                        T.access_ptr(flat_zero[factor], 'r', width),
                        width,
                    )
        T.ptx_commit_group()

    @T.prim_func
    def dequant_rows(
        a: T.StridedTensor((num_rows, k), (stride, 1), elem),
        codes: T.Tensor(codes_shape, T.int32),
        scale: T.Tensor(scale_shape, scale_elem),
        zero: T.Tensor(zero_shape, T.int16),
        whole: T.Tensor((num_matrices,), T.float32),
        bias: T.Tensor((n,), bias_elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        d: T.Tensor((num_rows, n), elem),
        part: T.Tensor((splits, num_rows, n), T.float32),
    ):
        T.assume(stride % 8 == 0)
        with T.Kernel(strips, splits, num_rows if num_groups else 1, threads=threads) as (strip, split, first_row):
            if early:
                begin_early()
            T.annotate_min_blocks_per_sm(1 if form.blocks and octets == 2 else 2)  # block factors need registers, too
            thread = T.get_thread_binding()
            warp, lane = thread // WARP, thread % WARP
            a_shared = T.alloc_shared((tokens, slice_k + 8), elem)
            codes_shared = T.alloc_shared((ring, threads, 4), T.int32)
            scale_shared = T.alloc_shared((ring, threads, width), scale_elem)
            zero_shared = T.alloc_shared((ring, threads, width), T.int16)
            sum_shared = T.alloc_shared((ROW_WARPS, tokens, STRIP * ROWS + 4), T.float32)
            a_local = T.alloc_local((octets, form.depth // 32, 8), elem)
            words_local = T.alloc_local((PAIR, 4), T.int32)
            total_local = T.alloc_local((STRIP, octets, 4), T.float32)
            group_local = T.alloc_local((PAIR, octets, 4), T.float32)
            start_local = T.alloc_local((len(groups), octets, 4), T.float32)
            ones_local = T.alloc_local((4,), T.uint32)
            vector_local = T.alloc_local((8,), elem)
            block_local = T.alloc_local((2,), T.float32)
            words = T.view(words_local, (PAIR, 4), T.uint32)
            place = T.alloc_local((3,), T.int32)
            code_at, factor_at = T.alloc_var(place_elem), T.alloc_var(place_elem)
            flat_codes = view(codes, (num_codes,), T.int32)
            flat_scale = view(scale, (num_factors,), scale_elem) if own_factors else scale
            flat_zero = view(zero, (num_factors,), T.int16) if has_zero else zero
            flat, stages = (flat_codes, flat_scale, flat_zero), (codes_shared, scale_shared, zero_shared)
            find_group(group_end, first_row, num_rows, num_groups, place)
            start, end = 0 if num_groups == DENSE else place[1], num_rows if num_groups == DENSE else place[2]
            matrix = 0 if num_groups == DENSE else T.min(place[0], num_matrices - 1)
            first = split * slice_tiles
            stop = T.min(first + slice_tiles, cols)
            last = stop if num_groups == DENSE else T.if_then_else(place[0] < num_matrices, stop, first)
            row_tile = T.cast(matrix * rows + strip * STRIP, place_elem)
            if start == first_row or num_groups == DENSE:
                code_at = (row_tile * cols + first + warp) * (WARP * 4) + lane * 4
                factor_at = row_tile * stored + packed.tile_group(first + warp) * (8 * width) + lane // 4 * width
                for stage in tuple(range(ahead)):
                    for batch in T.unroll(batches):
                        more = first + warp + stage * ROW_WARPS < last
                        copy_batch(flat, (code_at, factor_at), strip, stage, batch, stage, more, stages)
                for i in T.unroll(T.ceildiv(tokens * slice_k // 8, threads), unroll_factor=4):
                    vector = i * threads + thread
                    token, channel = vector // (slice_k // 8), vector % (slice_k // 8) * 8
                    if token < tokens:
                        if start + token < end and first * form.depth + channel < k:
                            for e in T.vectorized(8):
                                vector_local[e] = a[start + token, first * form.depth + channel + e]
                        else:
                            T.clear(vector_local)
                        for e in T.vectorized(8):
                            a_shared[token, channel + e] = vector_local[e]
                T.clear(total_local)
                if form.blocks:
                    block_local[0] = scale[matrix, strip, packed.tile_group(T.min(first + warp, cols - 1))]
                magic = magic_word(dtype, stride) if form.element == 'u4' else None
                T.sync_threads()
                # A shift: TVM takes this ceildiv for 1 where some warps have no tile.
                for turn in T.serial(T.shift_right(T.max(last - first - warp, 0) + ROW_WARPS - 1, TURN_BITS)):
                    tile = first + warp + turn * ROW_WARPS
                    channel = (tile - first) * form.depth
                    if form.blocks:
                        block_local[1] = scale[matrix, strip, packed.tile_group(T.min(tile + ROW_WARPS, cols - 1))]
                    for octet in T.unroll(octets):
                        for quarter in T.unroll(form.depth // 32):
                            T.ptx_ldmatrix(
                                T.bool(False),
                                4,
                                T.access_ptr(
                                    a_shared[octet * 8 + lane % 8, channel + quarter * 32 + lane // 8 * 8], 'r', 8
                                ),
                                T.access_ptr(a_local[octet, quarter, 0], 'w', 8),
                            )
                    if biased:
                        T.clear(start_local)
                        for e in (0, 1, 2, 3):
                            ones_local[e] = T.uint32(half_bits(dtype, 1.0 if has_zero else -128.0 - ZERO))
                        for group in groups:
                            for step in tuple(range(group * steps, (group + 1) * steps)):
                                for octet in T.unroll(octets):
                                    multiply(dtype, ones_local, a_local, octet, step // 2, step % 2, start_local, group)
                    for batch in T.unroll(batches):
                        line = turn % ahead * STRIP + batch * PAIR
                        T.ptx_wait_group(ahead * batches - 1)
                        for p in tuple(range(PAIR)):
                            for e in T.vectorized(4):
                                words_local[p, e] = codes_shared[line + p, thread, e]
                        for group in groups:
                            own = tuple(range(group * steps, (group + 1) * steps))
                            for p in tuple(range(PAIR)):
                                r = batch * PAIR + p
                                given = [words[p, e] for e in range(4)]
                                points = []
                                for half in (0, 1):
                                    point = zero_shared[line + p, thread, group * 2 + half] if has_zero else None
                                    points.append(None if biased else zero_bits(dtype, point))
                                if apart:
                                    for octet in T.unroll(octets):
                                        for e in (0, 1, 2, 3):
                                            if biased and has_zero:
                                                point = zero_shared[line + p, thread, group * 2 + e // 2]
                                                below = T.cast(-128 - T.cast(point, T.int32), T.float32)
                                                group_local[p, octet, e] = start_local[group, octet, e] * below
                                            elif biased:
                                                group_local[p, octet, e] = start_local[group, octet, e]
                                            else:
                                                group_local[p, octet, e] = 0.0
                                    multiply_lane(packed, given, a_local, octets, own, points, magic, group_local, p)
                                    for octet in T.unroll(octets):
                                        for e in (0, 1, 2, 3):
                                            if form.blocks:
                                                factor = block_local[0]
                                            else:
                                                stored_factor = scale_shared[line + p, thread, group * 2 + e // 2]
                                                factor = number_of(form, stored_factor)
                                            total_local[r, octet, e] = T.ieee_fmaf(
                                                group_local[p, octet, e], factor, total_local[r, octet, e]
                                            )
                                else:
                                    multiply_lane(packed, given, a_local, octets, own, points, magic, total_local, r)
                        more = tile + ahead * ROW_WARPS < last
                        copy_batch(flat, (code_at, factor_at), strip, turn % ahead, batch, ahead, more, stages)
                    code_at = code_at + ROW_WARPS * WARP * 4
                    factor_at = factor_at + turn_factors
                    if form.blocks:
                        block_local[0] = block_local[1]
                T.ptx_wait_group(0)
                T.sync_threads()
                for r in T.unroll(STRIP):
                    for octet in T.unroll(octets):
                        for e in (0, 1, 2, 3):
                            sum_shared[warp, octet * 8 + lane % 4 * 2 + e % 2, r * ROWS + e // 2 * 8 + lane // 4] = (
                                total_local[r, octet, e]
                            )
                T.sync_threads()
                for i in T.unroll(tokens * STRIP * ROWS // threads):
                    token, column = i * (threads // (STRIP * ROWS)) + thread // (STRIP * ROWS), thread % (STRIP * ROWS)
                    row = strip * (STRIP * ROWS) + column
                    if start + token < end and row < n:
                        total = T.alloc_var(T.float32, init=0.0)
                        for w in T.unroll(ROW_WARPS):
                            total = total + sum_shared[w, token, column]
                        if not apart:
                            total = total * number_of(form, scale[matrix, row // ROWS, 0, row % 8, row % ROWS // 8])
                        if form.factor == 'e4m3':
                            total = total * whole[matrix]
                        if splits > 1:
                            part[split, start + token, row] = total
                        else:
                            if bias_dtype is not None:
                                total = total + T.cast(bias[row], T.float32)
                            d[start + token, row] = T.cast(total, elem)

    return dequant_rows


# Tiles --------------------------------------------------------------------------------------


def lane_tiles(packed: Packed, block_n: int, num_warps: int) -> int:
    """Tiles that a warp converts for one step of 64 channels."""
    return block_n // ROWS // num_warps * (TILE_K // packed.form.depth)


@macro
def load_lanes(packed, weights, matrix, first_row, depth, warp, num_warps: int, lane_local):
    """Load the tiles of a warp of rows `first_row` and on and channels `depth` and on; warps take turns."""
    rows, cols = packed.tiles
    chunks = TILE_K // packed.form.depth
    lane = T.get_thread_binding() % WARP
    for i in T.unroll(int(lane_local[0].shape[0])):
        row = T.min(first_row // ROWS + i // chunks * num_warps + warp, rows - 1)
        col = T.min(depth // packed.form.depth + i % chunks, cols - 1)
        load_lane(packed, weights, matrix, row, col, lane, lane_local, i)


@macro
def store_lanes(packed, lane_local, warp, num_warps: int, w_shared, slot):
    """Convert what was loaded to shared memory, (slot, row, channel)."""
    form = packed.form
    chunks = TILE_K // form.depth
    lane = T.get_thread_binding() % WARP
    pairs_local = T.alloc_local((form.depth // 4,), T.uint32)
    halves = T.view(pairs_local, (form.depth // 4, 2), T.dtype(packed.dtype))
    for i in T.unroll(int(lane_local[0].shape[0])):
        convert_lane(packed, lane_local, i, pairs_local)
        for step in tuple(range(form.depth // STEP)):
            for pair in (0, 1, 2, 3):
                line = (i // chunks * num_warps + warp) * ROWS + pair % 2 * 8 + lane // 4
                channel = i % chunks * form.depth + step * STEP + pair // 2 * 8 + lane % 4 * 2
                for e in T.vectorized(2):
                    w_shared[slot, line, channel + e] = halves[step * 4 + pair, e]


def convert_pair(packed: Packed, words: Any, step: int, pair: int, factor: Any, point: Any, magic: Any) -> Any:
    """A pair of weights in half precision, rounded once: the word of two numbers."""
    form, dtype = packed.form, packed.dtype
    codes_pair = decode_pair(form, dtype, words, step, pair, zero_bits(dtype, point), magic)
    if packed.exact:
        half = T.reinterpret(T.cast(factor, T.dtype(dtype)), T.uint16)
        return pairwise(T.mul2, dtype, codes_pair, T.cast(half, T.uint32) * T.uint32(0x00010001))
    rounded = []
    for place in (0, 16):
        bits = T.cast(codes_pair >> T.uint32(place) & T.uint32(0xFFFF), T.uint16)
        wide = T.cast(T.reinterpret(bits, T.dtype(dtype)), T.float32) * factor
        rounded.append(T.cast(T.reinterpret(T.cast(wide, T.dtype(dtype)), T.uint16), T.uint32))
    return rounded[0] | rounded[1] << T.uint32(16)


#: As `WARPGROUP_ROLES`; a row of d must be a multiple of 16 bytes for the TMA store.
CONVERTING_ROLES: dict[str, Any] = WARPGROUP_ROLES | dict(
    serves=lambda static, gpu: gpu.has_wgmma and static.n % 8 == 0
)
STRIP_ROWS = 2 * WARPGROUP_ROWS  # rows of the weight of a block
FEW_TOKENS = 64  # rows of a up to which blocks share the sum over k, and two blocks run on an SM
STAGED_TOKENS = 64


def choose_tokens(*given: Any) -> dict:
    """As few columns of products as the rows of a group need; otherwise many, which convert weights less often."""
    num_groups, num_rows = given[2], given[-1]
    each = num_rows / max(num_groups, 1)
    return dict(tokens=next((count for count in (16, 32, 64, 128) if each <= count), 256))


def strip_splits(n: int, k: int, num_rows: Any, num_groups: int) -> int:
    """Blocks that share the sum over k of a dense product with few rows."""
    if not isinstance(num_rows, int) or num_rows > FEW_TOKENS or num_groups != DENSE:
        return 1
    return best_splits(-(-n // STRIP_ROWS), -(-k // (2 * TILE_K)), 1 << 30)


@macro
def store_transposed(acc, d_shared, d, start, end, row, n: int, member: int):
    """Store sums (rows of the weight, rows of a) through `d_shared`, as `store_rows`."""
    staged = int(d_shared.shape[0])
    for piece in tuple(range(int(acc.shape[1]) // staged)):
        token = start + piece * staged
        T.tma_store_wait(0)
        T.sync_threads(8 + member, WARPGROUP)
        for i, j in T.Parallel(WARPGROUP_ROWS, staged):
            d_shared[j, i] = T.cast(acc[i, piece * staged + j], d_shared.dtype)
        T.fence_proxy_async()
        T.sync_threads(8 + member, WARPGROUP)
        if token + staged <= end:
            T.tma_copy(d_shared, d[token : token + staged, row : row + WARPGROUP_ROWS])
        else:
            for lines in T.unroll(staged // 16, unroll_factor=1):
                for i, j in T.Parallel(16, WARPGROUP_ROWS):
                    if token + lines * 16 + i < end and row + T.truncdiv(j, 8) * 8 < n:
                        d[token + lines * 16 + i, row + j] = d_shared[lines * 16 + i, j]


@kernel(choose=choose_tokens, space=dict(tokens=(16, 32, 64, 128, 256)), **CONVERTING_ROLES)
def dequant_wgmma_kernel(
    n: int,
    k: int,
    num_groups: int,
    fmt: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    has_zero: bool,
    bias_dtype: torch.dtype | None,
    splits: int,
    *,
    tokens: int,
):
    """A block multiplies 128 rows of the weight with `tokens` rows of a; its last warpgroup loads by TMA.

    A lane of the others converts its own words to registers, which are the first operand of wgmma. Rows of a are the
    second. So weights in half precision never pass through shared memory. Products of a step run while the words of the
    next one are converted. TMA returns zeros behind the end of k, so the number of steps is even.
    """
    packed = describe(fmt, dtype, scale_dtype, n, k, has_zero)
    form, elem = packed.form, T.dtype(dtype)
    num_rows, stride = T.dynamic('num_rows'), T.dynamic('stride')
    num_matrices = max(num_groups, 1)
    codes_shape, scale_shape, zero_shape = packed.arrays(num_matrices)
    rows, cols = packed.tiles
    scale_elem, bias_elem = packed.scale_elem, T.dtype(bias_dtype or dtype)
    per_sm = 2 if tokens <= FEW_TOKENS else 1
    # A thread starts with 80 registers if two blocks run on an SM, else with 168. The three warpgroups must not ask for
    # more than they start with, or the last one waits forever.
    multiplying = 104 if per_sm == 2 else MULTIPLYING_REGISTERS if tokens > 128 else 0
    width, strip_tiles = 8 * 2 * form.per_tile, STRIP_ROWS // ROWS
    chunk = TILE_K // form.depth * WARP * 4  # words of a tile of rows in a step
    tiles_n, members = -(-n // STRIP_ROWS), 2
    part_steps = -(-k // (2 * TILE_K * splits)) * 2
    staged = min(tokens, STAGED_TOKENS)
    stage_bytes = tokens * TILE_K * 2 + strip_tiles * (chunk * 4 + width * (scale_dtype.itemsize + 2 * has_zero))
    fixed_bytes = members * staged * WARPGROUP_ROWS * 2 * (splits == 1) + 4 * num_groups + 2048
    ring = min(8, ((BLOCK_BYTES if per_sm == 2 else SM_BYTES) - fixed_bytes) // stage_bytes)
    stored = form.stored_groups(k) * width

    @T.prim_func
    def dequant_wgmma(
        a: T.StridedTensor((num_rows, k), (stride, 1), elem),
        codes: T.Tensor(codes_shape, T.int32),
        scale: T.Tensor(scale_shape, scale_elem),
        zero: T.Tensor(zero_shape, T.int16),
        whole: T.Tensor((num_matrices,), T.float32),
        bias: T.Tensor((n,), bias_elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        d: T.Tensor((num_rows, n), elem),
        part: T.Tensor((splits, num_rows, n), T.float32),
        num_sms: T.int32,
    ):
        T.assume(stride % 8 == 0)
        with T.Kernel(num_sms * per_sm, threads=(members + 1) * WARPGROUP) as pid:
            T.annotate_min_blocks_per_sm(per_sm)
            num_blocks = num_sms * per_sm
            a_shared = T.alloc_shared((ring, tokens, TILE_K), elem)
            codes_shared = T.alloc_shared((ring, strip_tiles, chunk), T.int32)
            scale_shared = T.alloc_shared((ring, strip_tiles, width), scale_elem)
            zero_shared = T.alloc_shared((ring, strip_tiles, width), T.int16)
            d_shared = [T.alloc_shared((staged, WARPGROUP_ROWS), elem) for _ in range(members)]
            T.annotate_layout({buffer: swizzled(buffer) for buffer in d_shared})
            acc_frag = [T.alloc_fragment((WARPGROUP_ROWS, tokens), T.float32) for _ in range(members)]
            w_frag = [[T.alloc_fragment((WARPGROUP_ROWS, TILE_K), elem) for _ in (0, 1)] for _ in range(members)]
            first_shared = T.alloc_shared((num_groups + 1,), T.int32)
            buffers = make_ring(ring, members)
            tile = T.alloc_local((5,), T.int32)
            tiles = Tiles(group_end, first_shared, num_rows, num_groups, tokens, tiles_n)
            parts = Tiles(group_end, first_shared, num_rows, num_groups, tokens, tiles_n * splits)
            turns = count_turns(parts, num_blocks, (members + 1) * WARPGROUP)
            flat_codes = view(codes, (num_matrices * rows, cols * WARP * 4), T.int32)
            flat_scale = scale if form.blocks else view(scale, (num_matrices * rows, stored), scale_elem)
            flat_zero = view(zero, (num_matrices * rows, stored), T.int16) if has_zero else zero
            words = T.view(codes_shared, (ring, strip_tiles, chunk), T.uint32)
            magic = magic_word(dtype, stride) if form.element == 'u4' else None

            with T.ws(members):
                if multiplying:
                    T.dec_max_nreg(LOADING_REGISTERS)
                for turn in T.serial(turns):
                    index = turn * num_blocks + pid
                    locate_tile(tiles, T.truncdiv(index, splits), tile)
                    row, depth = tile[1], tile[3] * part_steps
                    first = T.truncmod(index, splits) * part_steps
                    top = T.min(tile[0], num_matrices - 1) * rows + tile[4] * strip_tiles
                    for step in T.serial(depth):
                        slot = next_free(buffers)
                        channel, column = (first + step) * TILE_K, (first + step) * chunk
                        at = packed.tile_group((first + step) * (TILE_K // form.depth)) * width
                        T.tma_copy(
                            a[row : row + tokens, channel : channel + TILE_K],
                            a_shared[slot, :, :],
                            barrier=buffers.full[slot],
                        )
                        T.tma_copy(
                            flat_codes[top : top + strip_tiles, column : column + chunk],
                            codes_shared[slot, :, :],
                            barrier=buffers.full[slot],
                        )
                        if not form.blocks:
                            T.tma_copy(
                                flat_scale[top : top + strip_tiles, at : at + width],
                                scale_shared[slot, :, :],
                                barrier=buffers.full[slot],
                            )
                            if has_zero:
                                T.tma_copy(
                                    flat_zero[top : top + strip_tiles, at : at + width],
                                    zero_shared[slot, :, :],
                                    barrier=buffers.full[slot],
                                )
                        T.barrier_arrive(buffers.full[slot])
                        buffers.used[0] += 1
            for member in (0, 1):
                with T.ws(member):
                    if multiplying:
                        T.inc_max_nreg(multiplying)
                    acc, base = acc_frag[member], member * (WARPGROUP_ROWS // ROWS)
                    block_local = T.alloc_local((1,), T.float32)
                    for turn in T.serial(turns):
                        index = turn * num_blocks + pid
                        locate_tile(tiles, T.truncdiv(index, splits), tile)
                        start, end, strip = tile[1], tile[2], tile[4]
                        split = T.truncmod(index, splits)
                        matrix = T.min(tile[0], num_matrices - 1)
                        row = strip * STRIP_ROWS + member * WARPGROUP_ROWS
                        if start < end:
                            if tile[3] == 0:
                                T.clear(acc)
                            for twice in T.serial(tile[3] * (part_steps // 2)):
                                for side in (0, 1):
                                    step = twice * 2 + side
                                    slot = next_full(buffers)
                                    if form.blocks and side == 0:
                                        group = T.min(split * (part_steps // 2) + twice, form.groups(k) - 1)
                                        block_local[0] = scale[matrix, strip, group]
                                    own = w_frag[member][side]
                                    for q in (0, 1, 2, 3):
                                        place, inner = q * STEP // form.depth, q * STEP % form.depth // STEP
                                        group = inner * STEP // form.group if form.per_tile > 1 else 0
                                        for half in (0, 1):
                                            for upper in (0, 1):
                                                for r, g, t, e in T.Parallel(4, 8, 4, 2):
                                                    lane = place * WARP + g * 4 + t
                                                    given = [words[slot, base + r, lane * 4 + i] for i in range(4)]
                                                    of = g * (2 * form.per_tile) + group * 2 + half
                                                    if form.blocks:
                                                        factor = block_local[0]
                                                    else:
                                                        factor = number_of(form, scale_shared[slot, base + r, of])
                                                    point = zero_shared[slot, base + r, of] if has_zero else None
                                                    pair = convert_pair(
                                                        packed, given, inner, half + 2 * upper, factor, point, magic
                                                    )
                                                    bits = T.cast(pair >> T.cast(16 * e, T.uint32), T.uint16)
                                                    line, channel = r * 16 + half * 8 + g, upper * 8 + t * 2 + e
                                                    own[line, q * STEP + channel] = T.reinterpret(bits, elem)
                                    T.wgmma_gemm(
                                        own, a_shared[slot, :, :], acc, transpose_B=True, clear_accum=step == 0
                                    )
                                    T.wait_wgmma(1)
                                    if step > 0:
                                        free_last(buffers)
                                    buffers.used[0] += 1
                            T.wait_wgmma(0)
                            if tile[3] > 0:
                                free_last(buffers)
                            if form.factor == 'e4m3':
                                for i, j in T.Parallel(WARPGROUP_ROWS, tokens):
                                    acc[i, j] = acc[i, j] * whole[matrix]
                            if bias_dtype is not None:
                                for i, j in T.Parallel(WARPGROUP_ROWS, tokens):
                                    acc[i, j] = acc[i, j] + T.cast(bias[T.min(row + i, n - 1)], T.float32)
                            if splits > 1:
                                for i, j in T.Parallel(WARPGROUP_ROWS, tokens):
                                    if row + i < n and start + j < end:
                                        part[split, start + j, row + i] = acc[i, j]
                            else:
                                store_transposed(acc, d_shared[member], d, start, end, row, n, member)
                    T.tma_store_wait(0)

    return dequant_wgmma


@kernel(**FALLBACK)
def portable_dequant_kernel(
    n: int,
    k: int,
    num_groups: int,
    fmt: str,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    has_zero: bool,
    bias_dtype: torch.dtype | None,
    splits: int,
):
    """A block owns a tile of d, or a part of its sum. It converts weights to shared memory for `T.gemm`."""
    packed = describe(fmt, dtype, scale_dtype, n, k, has_zero)
    elem = T.dtype(dtype)
    num_rows, stride = T.dynamic('num_rows'), T.dynamic('stride')
    num_matrices, tiles_n = max(num_groups, 1), -(-n // MMA_N)
    steps = -(-k // TILE_K)
    part_steps = -(-k // (2 * TILE_K * splits)) * 2
    codes_shape, scale_shape, zero_shape = packed.arrays(num_matrices)
    scale_elem = packed.scale_elem
    bias_elem = T.dtype(bias_dtype or dtype)
    scaled = packed.form.factor == 'e4m3'

    @T.prim_func
    def portable_dequant(
        a: T.StridedTensor((num_rows, k), (stride, 1), elem),
        codes: T.Tensor(codes_shape, T.int32),
        scale: T.Tensor(scale_shape, scale_elem),
        zero: T.Tensor(zero_shape, T.int16),
        whole: T.Tensor((num_matrices,), T.float32),
        bias: T.Tensor((n,), bias_elem),
        group_end: T.Tensor((num_matrices,), T.int32),
        d: T.Tensor((num_rows, n), elem),
        part: T.Tensor((splits, num_rows, n), T.float32),
        num_blocks: T.int32,  # used by the other variant only
    ):
        T.assume(stride % 8 == 0)
        with T.Kernel(most_tiles(num_rows, num_groups, tiles_n), splits, threads=MMA_THREADS) as (pid, split):
            a_shared = T.alloc_shared((MMA_M, TILE_K), elem)
            w_shared = T.alloc_shared((1, MMA_N, TILE_K), elem)
            lane_local = make_lane(packed, lane_tiles(packed, MMA_N, MMA_THREADS // WARP))
            acc_frag = T.alloc_fragment((MMA_M, MMA_N), T.float32)
            tile = T.alloc_local((5,), T.int32)
            find_tile(group_end, pid, num_rows, num_groups, tiles_n, tile)
            row, end, col = tile[1], tile[2], tile[4] * MMA_N
            matrix = T.min(tile[0], num_matrices - 1)
            warp = T.get_thread_binding() // WARP
            T.clear(acc_frag)
            if tile[3] > 0:
                for step in T.serial(T.min(part_steps, steps - split * part_steps)):
                    depth = (split * part_steps + step) * TILE_K
                    T.copy(a[row : row + MMA_M, depth : depth + TILE_K], a_shared)
                    weights = codes, scale, zero
                    load_lanes(packed, weights, matrix, col, depth, warp, MMA_THREADS // WARP, lane_local)
                    store_lanes(packed, lane_local, warp, MMA_THREADS // WARP, w_shared, 0)
                    T.gemm(a_shared, w_shared[0, :, :], acc_frag, transpose_B=True)
            if scaled:
                for i, j in T.Parallel(MMA_M, MMA_N):
                    acc_frag[i, j] = acc_frag[i, j] * whole[matrix]
            if bias_dtype is not None:
                for i, j in T.Parallel(MMA_M, MMA_N):
                    acc_frag[i, j] = acc_frag[i, j] + T.cast(bias[T.min(col + j, n - 1)], T.float32)
            for i, j in T.Parallel(MMA_M, MMA_N):
                if row + i < end and col + j < n:
                    if splits > 1:
                        part[split, row + i, col + j] = acc_frag[i, j]
                    else:
                        d[row + i, col + j] = acc_frag[i, j]

    return portable_dequant


# The matrix ---------------------------------------------------------------------------------

MATRIX_WARPS = 4


@kernel()
def dequant_matrix_kernel(
    n: int, k: int, num_matrices: int, fmt: str, dtype: torch.dtype, scale_dtype: torch.dtype, has_zero: bool
):
    """Write the weights in half precision, padded to whole tiles of rows; a warp converts a tile."""
    packed = describe(fmt, dtype, scale_dtype, n, k, has_zero)
    form = packed.form
    rows, cols = packed.tiles
    codes_shape, scale_shape, zero_shape = packed.arrays(num_matrices)
    scale_elem = packed.scale_elem
    scaled = form.factor == 'e4m3'

    @T.prim_func
    def dequant_matrix(
        codes: T.Tensor(codes_shape, T.int32),
        scale: T.Tensor(scale_shape, scale_elem),
        zero: T.Tensor(zero_shape, T.int16),
        whole: T.Tensor((num_matrices,), T.float32),
        w: T.Tensor((num_matrices, rows * ROWS, k), T.dtype(dtype)),
    ):
        with T.Kernel(T.ceildiv(cols, MATRIX_WARPS), rows, num_matrices, threads=MATRIX_WARPS * WARP) as (
            bx,
            row,
            matrix,
        ):
            thread = T.get_thread_binding()
            lane, col = thread % WARP, bx * MATRIX_WARPS + thread // WARP
            lane_local = make_lane(packed, 1)
            pairs_local = T.alloc_local((form.depth // 4,), T.uint32)
            halves = T.view(pairs_local, (form.depth // 4, 2), T.dtype(dtype))
            if col < cols:
                load_lane(packed, (codes, scale, zero), matrix, row, col, lane, lane_local, 0)
                convert_lane(packed, lane_local, 0, pairs_local)
                for step in tuple(range(form.depth // STEP)):
                    for pair in (0, 1, 2, 3):
                        line = row * ROWS + pair % 2 * 8 + lane // 4
                        channel = col * form.depth + step * STEP + pair // 2 * 8 + lane % 4 * 2
                        if channel < k:
                            for e in (0, 1):
                                value = halves[step * 4 + pair, e]
                                if scaled:
                                    value = T.cast(T.cast(value, T.float32) * whole[matrix], T.dtype(dtype))
                                w[matrix, line, channel + e] = value

    return dequant_matrix


TILES = dequant_wgmma_kernel, portable_dequant_kernel
