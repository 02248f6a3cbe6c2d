"""Expand and quantize in one pass: every token is read and quantized once, and written to each of its positions.

    (q, sf)[t] = per-token cast of x[t]                     in groups of fmt.sf_block[1] channels
    y[p], y_sf[p] = q[t], sf[t]                             p = token_topk_to_pos[t, k] >= 0
    y[p], y_sf[p] = 0                                       where pos_to_expert[p] < 0

`row_threads` threads own a part of a token. A lane owns 8 neighboring channels, and shuffles find the amax of a group.
Codes stay in registers while they are written num_topk times. Scale factors go to shared memory, which is written out
in rows. Column-major ones of many rows go to scratch instead, and a second launch gathers them, as in
`expand_to_fused_with_sf_kernels`. All blocks clear padding, as in `expand_to_fused`.
Memory bound: the floor is reading x and writing y and y_sf.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import EARLY, WARP, T, begin_early, is_short, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.device.codes import encode_e2m1
from tile_kernels.device.reduce import lane_amax, shuffle_steps
from tile_kernels.device.scales import amax_to_sf, clamp_amax, sf_register_dtype
from tile_kernels.device.vectors import LANE, load_lane, scale_lane
from tile_kernels.moe._checks import BITS, check_places
from tile_kernels.moe._samples import random_places
from tile_kernels.moe.expand_to_fused_kernels import (
    CONVERTED_ROW_PASS_CONFIGS,
    MAX_SHARE,
    ROW_SPACE,
    RowSplit,
    choose_rows,
    clear_places,
    find_padding,
    load_places,
    num_shares,
    place_of,
)
from tile_kernels.moe.expand_to_fused_with_sf_kernels import (
    FEW_PLACES,
    TILE_PLACES,
    gather_sf_columns,
    note_token,
    sf_type,
    tile_shape,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DATA = ('e4m3', 'e5m2', 'e2m1')
GROUPS = (16, 32, 64, 128)

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, fmt: QuantFormat, x_dtype: torch.dtype, piece: int, num_topk: int, num_expanded: int) -> dict:
    """Many rows: read all of a row before quantizing it. Few rows: many small blocks."""
    gather = fmt.col and num_expanded > FEW_PLACES
    early = not gather and is_short(num_expanded * hidden)
    return choose_rows(hidden // LANE, num_expanded, num_threads=256) | dict(gather=gather, early=early)


def sf_size_of(fmt: QuantFormat, num_groups: int) -> int:
    """Bytes per access to scale factors: one factor, or a word of several neighbors."""
    size = fmt.sf_dtype.itemsize
    return size if fmt.col or size == 4 else math.gcd(num_groups, 4)


# Kernel -------------------------------------------------------------------------------------


@macro
def quantise_lanes(x_local, fmt, amax_floor, amax, sf, sf_inv, v_local, y_local, code_local):
    """Codes and scale factors of the lanes of a thread; the lanes of a group exchange their amax."""
    vectors, width = code_local.shape
    T.clear(amax)
    for v in T.unroll(vectors):
        lane_amax(x_local, v, amax)
    for step in T.unroll(shuffle_steps(fmt.sf_block[1] // LANE)):
        for v in T.unroll(vectors):
            amax[v] = T.max(amax[v], T.shfl_xor(amax[v], 1 << step))
    for v in T.unroll(vectors):
        amax_to_sf(clamp_amax(amax[v], amax_floor), fmt, sf, sf_inv, v)
        if fmt.data.name == 'e2m1':
            encode_e2m1(x_local, v, sf_inv[v], fmt.power_of_two, v_local, y_local)
        else:
            scale_lane(x_local, v, sf_inv[v], v_local)
            for e in T.vectorized(LANE):
                y_local[e] = T.cast(v_local[e], T.dtype(fmt.data.torch))
        codes = T.view(y_local, (width,), T.uint8)
        for e in T.vectorized(width):
            code_local[v, e] = codes[e]


@macro
def store_codes(code_local, y, row, first, row_threads):
    """Write the codes of the lanes first, first + row_threads, ... of a row, in accesses that divide its length."""
    vectors, width = code_local.shape
    piece = math.gcd(int(width), int(y.shape[1]))
    for v in T.unroll(vectors):
        for p in T.unroll(width // piece):
            if (first + v * row_threads) * width + p * piece < y.shape[1]:
                for e in T.vectorized(piece):
                    y[row, (first + v * row_threads) * width + p * piece + e] = code_local[v, p * piece + e]


@macro
def clear_codes(which, share, num_tokens, y, first, row_threads, zero_local):
    """Write zeros as codes of the positions whose bit is set."""
    T.clear(zero_local)
    if which != T.uint32(0):
        for i in T.serial(MAX_SHARE):
            if (which >> T.cast(i, T.uint32)) & T.uint32(1) != T.uint32(0):
                store_codes(zero_local, y, place_of(share, i, num_tokens, y.shape[0]), first, row_threads)


@kernel(
    choose=choose,
    space=dict(**ROW_SPACE, gather=(False, True), early=EARLY),
    pass_configs=CONVERTED_ROW_PASS_CONFIGS,
    fixed='gather',
)
def expand_and_per_token_cast_kernel(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    piece: int,
    num_topk: int,
    *,
    row_threads: int,
    vectors: int,
    num_threads: int,
    gather: bool,
    early: bool = False,
):
    """Rows of `hidden` channels read `piece` at a time.

    With `gather`, tiles of column-major scale factors are gathered; `sf_rows` and `pos_to_token` are scratch.
    """
    stored, width = fmt.data.stored(hidden), fmt.data.stored(LANE)
    group_lanes = fmt.sf_block[1] // LANE
    num_groups = -(-hidden // fmt.sf_block[1])
    split = RowSplit.of(num_groups * group_lanes, row_threads, vectors, num_threads)
    if split.parts > 1:  # a part must have whole words of scale factors
        row_threads = max(row_threads, 4 * group_lanes)
        split = RowSplit.of(num_groups * group_lanes, row_threads, vectors, num_threads)
    vectors = split.vectors
    part_groups = vectors * row_threads // group_lanes
    part_slots = -(-part_groups // 4) * 4
    sf_size = sf_size_of(fmt, num_groups)
    slots_per_word = sf_size * fmt.sf_pack // fmt.sf_dtype.itemsize
    sf_words = -(-num_groups // slots_per_word)
    part_words = part_slots // slots_per_word
    sf_dtype = T.dtype(BITS[sf_size])
    code_registers = ((1,), T.uint32) if fmt.data.name == 'e2m1' else ((LANE,), T.dtype(fmt.data.torch))
    num_tokens, num_expanded, x_pitch = (T.dynamic(name) for name in ('num_tokens', 'num_expanded', 'x_pitch'))

    @T.prim_func
    def expand_and_per_token_cast(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), T.dtype(x_dtype)),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
        pos_to_expert: T.Tensor((num_expanded,), T.int32),
        pos_to_token: T.Tensor((num_expanded,), T.int32),
        sf_rows: T.Tensor((num_tokens, sf_words), sf_dtype),
        y: T.Tensor((num_expanded, stored), T.uint8),
        y_sf: sf_type(num_expanded, sf_words, sf_dtype, fmt.col),
        amax_floor: T.float32,
    ):
        blocks = T.ceildiv(num_shares(num_tokens, num_expanded), split.rows)
        with T.Kernel(blocks * split.parts, threads=split.num_threads) as pid:
            if early and not gather:
                begin_early()
            T.assume(x_pitch % piece == 0)
            x_local = T.alloc_local((vectors, LANE), T.dtype(x_dtype))
            amax = T.alloc_local((vectors,), T.float32)
            sf = T.alloc_local((vectors,), sf_register_dtype(fmt))
            sf_inv = T.alloc_local((vectors,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*code_registers)
            code_local = T.alloc_local((vectors, width), T.uint8)
            zero_local = T.alloc_local((vectors, width), T.uint8)
            place_local = T.alloc_local((T.ceildiv(num_topk, WARP),), T.int32)
            sf_shared = T.alloc_shared((split.rows, part_slots), sf_register_dtype(fmt))
            sf_words_shared = T.view(sf_shared, (split.rows, part_words), sf_dtype)
            tx = T.get_thread_binding()
            part, row, thread = pid % split.parts, tx // row_threads, tx % row_threads
            first = part * (vectors * row_threads) + thread
            token = pid // split.parts * split.rows + row

            if gather:
                T.pdl_trigger()
            T.clear(x_local)
            if token < num_tokens:
                for v in T.unroll(vectors):
                    load_lane(x, x_local, v, token, first + v * row_threads, piece, hidden)
                load_places(token_topk_to_pos, token, place_local)
            padding = find_padding(pos_to_expert, token, num_tokens)
            clear_codes(padding, token, num_tokens, y, first, row_threads, zero_local)
            if not gather:
                clear_places(
                    padding,
                    token,
                    num_tokens,
                    y_sf,
                    T.ceildiv(part_words, row_threads),
                    1,
                    part * part_words + thread,
                    row_threads,
                )
            if token < num_tokens:
                quantise_lanes(x_local, fmt, amax_floor, amax, sf, sf_inv, v_local, y_local, code_local)
                for v in T.unroll(vectors):
                    if thread % group_lanes == 0:
                        exists = (first + v * row_threads) // group_lanes < num_groups
                        sf_shared[row, (thread + v * row_threads) // group_lanes] = T.if_then_else(
                            exists, sf[v], T.cast(0, sf_shared.dtype)
                        )
                if thread < part_slots - part_groups:
                    sf_shared[row, part_groups + thread] = T.cast(0, sf_shared.dtype)
                for c in T.unroll(T.ceildiv(num_topk, WARP)):
                    for k in T.unroll(T.min(num_topk - c * WARP, WARP), unroll_factor=16):
                        pos = T.shfl_sync(place_local[c], k)
                        if pos >= 0 and pos < num_expanded:
                            store_codes(code_local, y, pos, first, row_threads)
            T.sync_threads()
            if token < num_tokens:
                if gather:
                    for i in T.unroll(T.ceildiv(part_words, row_threads)):
                        word = i * row_threads + thread
                        if word < part_words and part * part_words + word < sf_words:
                            sf_rows[token, part * part_words + word] = sf_words_shared[row, word]
                    if part == 0:
                        note_token(token, place_local, row_threads, pos_to_token)
                else:
                    for c in T.unroll(T.ceildiv(num_topk, WARP)):
                        for k in T.unroll(T.min(num_topk - c * WARP, WARP), unroll_factor=16):
                            pos = T.shfl_sync(place_local[c], k)
                            if pos >= 0 and pos < num_expanded:
                                for i in T.unroll(T.ceildiv(part_words, row_threads)):
                                    word = i * row_threads + thread
                                    if word < part_words and part * part_words + word < sf_words:
                                        y_sf[pos, part * part_words + word] = sf_words_shared[row, word]

        if gather:
            with T.Kernel(T.ceildiv(num_expanded, TILE_PLACES), threads=256) as pid:
                token_shared = T.alloc_shared((TILE_PLACES,), T.int32)
                tile_shared = T.alloc_shared(tile_shape(sf_words), sf_dtype)
                gather_sf_columns(
                    sf_rows, pos_to_token, pos_to_expert, y_sf, pid * TILE_PLACES, 256, token_shared, tile_shared
                )

    return expand_and_per_token_cast


# Op -----------------------------------------------------------------------------------------


@op(outputs='y y_sf')
def expand_and_per_token_cast(
    x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor, fmt: QuantFormat
) -> QuantTensor:
    """Quantize every token once and copy its codes and scale factors to each of its positions in expert order.

    Same bits as `quant.per_token_cast` followed by `expand_to_fused_with_sf`, without the intermediate tensor.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32; rows may be strided.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no position.
        pos_to_expert: (num_expanded,) int32; negative means padding.
        fmt: e4m3, e5m2 or e2m1 with scale blocks of one token and 16, 32, 64 or 128 channels, in any storage.

    Returns:
        The quantized (num_expanded, hidden) tensor; codes and scale factors are 0 where pos_to_expert is negative.
    """
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden', dtype=DTYPES)
    num_topk, num_expanded = check_places(token_topk_to_pos, pos_to_expert, num_tokens)
    check.at_least(hidden, 1, 'hidden')
    check.unit_stride(x, 'x')
    check.same_device(x=x, token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert)
    check.one_of(fmt.data.name, DATA, 'data of fmt')
    check.one_of(fmt.sf_block, [(1, group) for group in GROUPS], 'scale block of fmt')
    y = fmt.empty(num_expanded, hidden, x.device)
    piece = math.gcd(LANE, check.vector_bytes(x) // x.element_size(), hidden)
    static = (hidden, fmt, x.dtype, piece, num_topk)
    pos_to_token = sf_rows = None
    if fmt.col:
        pos_to_token = torch.empty_like(pos_to_expert)
        sf_rows = torch.empty((num_tokens, y.sf.shape[1]), dtype=BITS[y.sf.element_size()], device=x.device)
    maps = (token_topk_to_pos, pos_to_expert, pos_to_token)
    results = (y.data.view(torch.uint8), y.sf.view(BITS[sf_size_of(fmt, fmt.blocks(1, hidden)[1])]))
    launch(expand_and_per_token_cast_kernel, static, x, *maps, sf_rows, *results, fmt.amax_floor, size=num_expanded)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    num_topk: int,
    hidden: int,
    dtype: torch.dtype,
    fmt: str,
    pitch: int = 0,
    num_experts: int = 8,
    padding: int = 3,
    unrouted: float = 0.2,
) -> dict:
    token_topk_to_pos, pos_to_expert = random_places(num_tokens, num_topk, num_experts, unrouted, padding)
    x = torch.randn(num_tokens, hidden + pitch, dtype=dtype)[:, pitch:]
    return dict(x=x, token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert, fmt=QuantFormat.parse(fmt))


FORMATS = [
    'e4m3_1x128_f32',
    'e4m3_1x32_f32p2_col',
    'e4m3_1x128_ue8m0x4',
    'e4m3_1x128_ue8m0x4_col',
    'e2m1_1x32_ue8m0x4_col',
    'e2m1_1x16_e4m3',
    'e5m2_1x64_f32_col',
]

expand_and_per_token_cast.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 21], num_topk=[6], hidden=[256], dtype=[torch.bfloat16], fmt=FORMATS[:2])
    + grid(num_tokens=[9], num_topk=[3], hidden=[336], dtype=[torch.bfloat16, torch.float32], fmt=FORMATS)  # tails
    + grid(num_tokens=[5], num_topk=[9], hidden=[66], dtype=[torch.float16], fmt=FORMATS[3:6], pitch=[1])
    + grid(num_tokens=[3], num_topk=[2], hidden=[17408], dtype=[torch.bfloat16], fmt=FORMATS[2:4])  # several parts
    + grid(  # enough positions for the gather of tiles
        num_tokens=[37], num_topk=[6], hidden=[144], dtype=[torch.bfloat16], fmt=[FORMATS[1], FORMATS[3]], padding=[240]
    ),
    full=grid(num_tokens=[4001], num_topk=[2, 8], hidden=[576, 2048, 7168], dtype=[torch.bfloat16], fmt=FORMATS)
    + grid(  # more than 2^31 codes
        num_tokens=[100003], num_topk=[3], hidden=[7168], dtype=[torch.bfloat16], fmt=[FORMATS[0], FORMATS[3]]
    ),
    bench=grid(num_tokens=[4096], num_topk=[8], hidden=[7168], dtype=[torch.bfloat16], fmt=FORMATS, padding=[0])
    + grid(num_tokens=[64], num_topk=[8], hidden=[7168], dtype=[torch.bfloat16], fmt=FORMATS[:1], padding=[0])
    + grid(num_tokens=[4001], num_topk=[6], hidden=[576, 2048], dtype=[torch.bfloat16], fmt=FORMATS[:1], padding=[0]),
)
