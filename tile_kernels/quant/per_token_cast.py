"""Per-token cast: quantise every row of a matrix in groups of neighbouring channels.

    amax[t, g] = max |x[t, gG : (g+1)G]|                    G = fmt.sf_block[1], the last group may be shorter
    a[t, g]    = min(max(amax[t, g], amax_floor), FLT_MAX)
    sf[t, g]   = a / max(fmt)                               rounded as the format stores it
    y[t, h]    = round(x[t, h] * sf_inv[t, h // G])         to nearest even, saturating

Of a quantised x = code * x_sf the amax is that of the products, and y = round(code * (x_sf * sf_inv)).

A lane owns several vectors of 8 channels, a group is G / 8 neighbouring lanes: the amax is found by shuffles, nothing
is staged and no thread waits for another warp. The lanes of a group share the rest of its work as well: each divides
for some of the vectors only and passes the multipliers on. The vectors of a lane lie along its row, a warp apart, as
far as rows divide so, and in neighbouring rows: a warp writes its scale factors as whole sectors. A whole-row group
wider than a warp is owned by a block, which keeps the row in registers (rows too long for that are read twice, the
second time from L2).
Memory bound: the floor is reading x and writing y and sf once.

Numbers that are not finite are defined: a NaN does not count in the amax and becomes the format's NaN (0x7F; e2m1 has
none and takes +-6 by the sign bit), an infinity counts as the largest finite float32 and saturates.
"""

import functools
import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant._blocks import load_codes, sf_value
from tile_kernels.quant._e5m6 import WORDS, encode_e5m6, store_e5m6
from tile_kernels.quant._macros import (
    FLOAT_MAX,
    LANE,
    amax_to_sf,
    clamp_amax,
    decode_halves,
    encode_e2m1,
    lane_max,
    load_lane,
    load_sf_inv,
    scale_lane,
    scatter_max,
    sf_register_dtype,
    sf_tensor,
    shuffle_steps,
    store_lane,
    store_sf,
)
from tile_kernels.quant._stochastic import MANTISSA, encode_at_random

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (16, 32, 64, 128, 0)
WARP = 32


# Config -------------------------------------------------------------------------------------


def _lanes(hidden: int) -> int:
    return -(-hidden // LANE)


def _group_lanes(hidden: int, fmt: QuantFormat) -> int:
    """Lanes that share a scale factor; a whole row counts as its next power of two."""
    group = fmt.sf_block[1]
    return group // LANE if group else 1 << (_lanes(hidden) - 1).bit_length()


def _storage(source: torch.dtype | QuantFormat, channels: int) -> tuple[torch.dtype, int]:
    """What holds so many channels of `x`, and how many of it."""
    return (source, channels) if isinstance(source, torch.dtype) else (source.data.torch, source.data.stored(channels))


def _piece(hidden: int, source: torch.dtype | QuantFormat, vector_bytes: int) -> int:
    """Elements of a lane that alignment lets it load at a time."""
    dtype, width = _storage(source, LANE)
    return math.gcd(width, vector_bytes // dtype.itemsize, _storage(source, hidden)[1])


def _along_row(hidden: int, fmt: QuantFormat, vectors: int) -> int:
    """How many of a lane's vectors lie along its row, a warp apart; the others are in neighbouring rows.

    As many as divide the row: then the scale factors of a warp are neighbours in memory, unless they are column-major.
    """
    lanes = _group_lanes(hidden, fmt)
    row_lanes = -(-_lanes(hidden) // lanes) * lanes
    return 1 if fmt.col or row_lanes % WARP else math.gcd(vectors, row_lanes // WARP)


def choose_grouped(
    hidden: int, fmt: QuantFormat, source: torch.dtype | QuantFormat, vector_bytes: int, task: str, num_tokens: int
) -> dict:
    """Many loads in flight where rows are many, as registers allow; casts to fp4 compute more than they load."""
    if num_tokens * _lanes(hidden) < 4 << 17:
        return dict(vectors=2, num_threads=128)
    if task == 'stochastic':
        return dict(vectors=4 if fmt.data.name == 'e2m1' else 8, num_threads=128)
    if fmt.data.name == 'e2m1' and not fmt.col and isinstance(source, torch.dtype):
        return dict(vectors=2, num_threads=128)
    whole = _piece(hidden, source, vector_bytes) == _storage(source, LANE)[1]
    small = isinstance(source, QuantFormat) or source is torch.bfloat16
    return dict(vectors=8, num_threads=128) if whole and small else dict(vectors=4, num_threads=256)


def choose_row(
    hidden: int, fmt: QuantFormat, source: torch.dtype | QuantFormat, vector_bytes: int, task: str, num_tokens: int
) -> dict:
    """Four vectors for each thread, half as many where rows are few, twice as many where a long row then fits."""
    lanes = _lanes(hidden)
    if num_tokens * lanes < 4 << 17 and lanes <= 2048:
        return dict(vectors=2)
    if isinstance(source, QuantFormat):  # small
        return dict(vectors=8)
    if source is torch.float32:
        return dict(vectors=4 if lanes <= 2048 else 2)
    return dict(vectors=4 if lanes <= 4096 else 8)


# Kernels ------------------------------------------------------------------------------------


def _x_sf_tensor(source: torch.dtype | QuantFormat, hidden: int):
    """Parameter type of the scale factors of `x`, of which a plain one has none."""
    if isinstance(source, torch.dtype):
        return T.Tensor((1, 1), T.float32)
    return sf_tensor(source, T.dynamic('x_sf_rows'), source.blocks(1, hidden)[1])


@macro
def load_vector(x, x_sf, source, x_local, x_codes, x_factor, i, row, slot, piece, hidden):
    """Read the channels of lane `slot` of a row, or their codes and the scale factor that they share."""
    if isinstance(source, QuantFormat):
        height, width = source.sf_block
        load_codes(x, x_codes, i, row, slot, piece)
        if slot * LANE < hidden:
            sf_row, sf_col = row // height if height else 0, slot * LANE // width if width else 0
            x_factor[i] = sf_value(x_sf, source, sf_row, sf_col)
    else:
        load_lane(x, x_local, i, row, slot, piece, hidden)


@macro
def vector_max(x_local, x_factor, source, amax, i):
    """`amax[i]` = largest magnitude of the channels of vector `i`."""
    amax[i] = lane_max(x_local, i) * x_factor[i] if isinstance(source, QuantFormat) else lane_max(x_local, i)


def multiplier(x_factor, source, i, sf_inv):
    """What the channels, or codes, of vector `i` are multiplied by; a block of zeros may have any scale factor."""
    if not isinstance(source, QuantFormat):
        return sf_inv
    product = T.ieee_mul(x_factor[i], sf_inv)
    return T.Select(product > T.float32(FLOAT_MAX), T.float32(FLOAT_MAX), product)


@macro
def encode_and_store(x_local, i, fmt, task, sf_inv, v_local, y_local, y, row, slot, hidden):
    """Quantise the channels of a lane with `sf_inv` and, if the row exists, write their codes."""
    width, stored = fmt.data.stored(LANE), fmt.data.stored(hidden)
    if task == 'stochastic':
        scale_lane(x_local, i, sf_inv, v_local)
        encode_at_random(x_local, i, v_local, slot, fmt.data, y_local)
    elif fmt.data.name == 'e2m1':
        # a caller's float32 factors may be any number, whatever the format says
        power_of_two = fmt.power_of_two and (task != 'data' or fmt.sf == 'ue8m0x4')
        encode_e2m1(x_local, i, sf_inv, power_of_two, v_local, y_local)
    elif fmt.data.name == 'e5m6':
        scale_lane(x_local, i, sf_inv, v_local)
        encode_e5m6(v_local, y_local)
        store_e5m6(y, y_local, row, slot, hidden)
    else:
        scale_lane(x_local, i, sf_inv, v_local)
        for e in T.vectorized(LANE):
            y_local[e] = T.cast(v_local[e], T.dtype(fmt.data.torch))
    if fmt.data.name != 'e5m6' and row < y.shape[0]:
        codes = T.view(y_local, (width,), T.int8) if fmt.data.name == 'e2m1' else y_local
        store_lane(y, codes, row, slot, math.gcd(width, stored), stored, width)


def _code_registers(fmt: QuantFormat) -> tuple:
    """Shape and type of the registers that hold the codes of a lane."""
    words = {'e2m1': 1, 'e5m6': WORDS}.get(fmt.data.name)
    return ((words,), T.uint32) if words else ((LANE,), T.dtype(fmt.data.torch))


@kernel(
    choose=choose_grouped,
    space=dict(vectors=(2, 4, 8), num_threads=(128, 256)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def per_token_cast_kernel(
    hidden: int,
    fmt: QuantFormat,
    source: torch.dtype | QuantFormat,
    vector_bytes: int,
    task: str,
    *,
    vectors: int,
    num_threads: int,
):
    """Groups of at most a warp.

    `source` is what x holds. `task`: 'cast', 'stochastic' (a cast rounded so), 'sf' (scale factors only) or 'data'
    (scale factors are given).
    """
    lanes = _group_lanes(hidden, fmt)
    num_groups = -(-_lanes(hidden) // lanes)
    row_lanes = num_groups * lanes
    owned = -(-vectors // lanes)
    quantised = isinstance(source, QuantFormat)
    piece, (x_dtype, width) = _piece(hidden, source, vector_bytes), _storage(source, LANE)
    along = _along_row(hidden, fmt, vectors)
    band_rows, band_lanes = vectors // along, row_lanes // along
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')

    @T.prim_func
    def per_token_cast(
        x: T.StridedTensor((num_tokens, _storage(source, hidden)[1]), (x_pitch, 1), T.dtype(x_dtype)),
        x_sf: _x_sf_tensor(source, hidden),
        y: T.Tensor((num_tokens, fmt.data.stored(hidden)), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, num_tokens, num_groups),
        amax_floor: T.float32,
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(num_tokens, band_rows) * band_lanes, num_threads), threads=num_threads
        ) as pid:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(1024 // num_threads)
            thread = T.get_thread_binding()
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            x_local = T.alloc_local((vectors, LANE), T.float16 if quantised else T.dtype(x_dtype))
            x_codes = T.alloc_local((vectors, width), T.dtype(x_dtype))
            x_factor = T.alloc_local((vectors,), T.float32)
            amax = T.alloc_local((vectors,), T.float32)
            sf = T.alloc_local((owned,), sf_register_dtype(fmt))
            own_inv = T.alloc_local((owned,), T.float32)
            sf_inv = T.alloc_local((vectors,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*_code_registers(fmt))
            index = pid * num_threads + thread
            lane = index % band_lanes
            row = index // band_lanes * band_rows
            slot = lane // WARP * (WARP * along) + lane % WARP if along > 1 else lane

            if hidden % (lanes * LANE) != 0:
                T.clear(x_codes if quantised else x_local)
                T.clear(x_factor)
            for i in T.unroll(vectors):  # rows past the end repeat the last one and are not stored
                at = slot + i % along * WARP
                T.assume(at < row_lanes)
                token = T.min(row + i // along, num_tokens - 1)
                load_vector(x, x_sf, source, x_local, x_codes, x_factor, i, token, at, piece, hidden)
            if quantised:
                decode_halves(x_codes, source.data.name, x_local)

            if task == 'data':
                for i in T.unroll(vectors):
                    group = (slot + i % along * WARP) // lanes
                    load_sf_inv(y_sf, fmt, T.min(row + i // along, num_tokens - 1), group, sf_inv, i)
            else:
                for i in T.unroll(vectors):
                    vector_max(x_local, x_factor, source, amax, i)
                scatter_max(amax, vectors, thread, 1, lanes)
                for k in T.unroll(owned):
                    own = k * lanes + thread % lanes
                    amax_to_sf(clamp_amax(amax[k], amax_floor), fmt, sf, own_inv, k)
                    if own < vectors and row + own // along < num_tokens:
                        group = (slot + own % along * WARP) // lanes
                        store_sf(y_sf, fmt, num_groups, row + own // along, group, sf[k])
                for i in T.unroll(vectors):
                    sf_inv[i] = T.shfl_sync(own_inv[i // lanes], i % lanes, width=lanes)

            if task != 'sf':
                for i in T.unroll(vectors):
                    at = slot + i % along * WARP
                    T.assume(at < row_lanes)
                    factor = multiplier(x_factor, source, i, sf_inv[i])
                    encode_and_store(x_local, i, fmt, task, factor, v_local, y_local, y, row + i // along, at, hidden)

    return per_token_cast


@kernel(choose=choose_row, space=dict(vectors=(1, 2, 4, 8)), pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def per_token_cast_row_kernel(
    hidden: int, fmt: QuantFormat, source: torch.dtype | QuantFormat, vector_bytes: int, task: str, *, vectors: int
):
    """Whole rows, one block each: `vectors` times 8 channels for every thread and pass; arguments as above."""
    num_threads = min(1024, -(-_lanes(hidden) // (vectors * WARP)) * WARP)
    num_passes = -(-_lanes(hidden) // (vectors * num_threads))
    num_warps = num_threads // WARP
    quantised = isinstance(source, QuantFormat)
    piece, (x_dtype, width) = _piece(hidden, source, vector_bytes), _storage(source, LANE)
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')

    @macro
    def load_row(x, x_sf, x_local, x_codes, x_factor, row, turn, thread):
        T.clear(x_codes if quantised else x_local)
        T.clear(x_factor)
        for i in T.unroll(vectors):
            slot = (turn * vectors + i) * num_threads + thread
            load_vector(x, x_sf, source, x_local, x_codes, x_factor, i, row, slot, piece, hidden)
        if quantised:
            decode_halves(x_codes, source.data.name, x_local)

    @T.prim_func
    def per_token_cast_row(
        x: T.StridedTensor((num_tokens, _storage(source, hidden)[1]), (x_pitch, 1), T.dtype(x_dtype)),
        x_sf: _x_sf_tensor(source, hidden),
        y: T.Tensor((num_tokens, fmt.data.stored(hidden)), T.dtype(fmt.data.torch)),
        y_sf: sf_tensor(fmt, num_tokens, 1),
        amax_floor: T.float32,
    ):
        with T.Kernel(num_tokens, threads=num_threads) as row:
            T.assume(x_pitch % piece == 0)
            T.annotate_min_blocks_per_sm(1024 // num_threads)
            thread = T.get_thread_binding()
            x_local = T.alloc_local((vectors, LANE), T.float16 if quantised else T.dtype(x_dtype))
            x_codes = T.alloc_local((vectors, width), T.dtype(x_dtype))
            x_factor = T.alloc_local((vectors,), T.float32)
            amax = T.alloc_local((vectors,), T.float32)
            row_amax = T.alloc_var(T.float32)
            warp_amax = T.alloc_shared((num_warps,), T.float32)
            sf = T.alloc_local((1,), sf_register_dtype(fmt))
            sf_inv = T.alloc_local((1,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*_code_registers(fmt))

            if task == 'data':
                load_sf_inv(y_sf, fmt, row, 0, sf_inv, 0)
                if num_passes == 1:
                    load_row(x, x_sf, x_local, x_codes, x_factor, row, 0, thread)
            else:
                row_amax = T.float32(0.0)
                for turn in T.serial(num_passes):
                    load_row(x, x_sf, x_local, x_codes, x_factor, row, turn, thread)
                    for i in T.unroll(vectors):
                        vector_max(x_local, x_factor, source, amax, i)
                        row_amax = T.max(row_amax, amax[i])
                for step in T.unroll(shuffle_steps(WARP)):
                    row_amax = T.max(row_amax, T.shfl_xor(row_amax, 1 << step))
                if num_warps > 1:
                    if thread % WARP == 0:
                        warp_amax[thread // WARP] = row_amax
                    T.sync_threads()
                    for warp in T.unroll(num_warps):
                        row_amax = T.max(row_amax, warp_amax[warp])
                amax_to_sf(clamp_amax(row_amax, amax_floor), fmt, sf, sf_inv, 0)
                if thread == 0:
                    store_sf(y_sf, fmt, 1, row, 0, sf[0])

            if task != 'sf':
                for turn in T.serial(num_passes):
                    if num_passes > 1:
                        load_row(x, x_sf, x_local, x_codes, x_factor, row, turn, thread)
                    for i in T.unroll(vectors):
                        slot = (turn * vectors + i) * num_threads + thread
                        factor = multiplier(x_factor, source, i, sf_inv[0])
                        encode_and_store(x_local, i, fmt, task, factor, v_local, y_local, y, row, slot, hidden)

    return per_token_cast_row


# Ops ----------------------------------------------------------------------------------------


def run(
    x: Tensor,
    x_sf: Tensor | None,
    source: torch.dtype | QuantFormat,
    hidden: int,
    y: Tensor | None,
    y_sf: Tensor,
    fmt: QuantFormat,
    amax_floor: float,
    task: str,
) -> None:
    """Launch the kernel that owns groups of this width."""
    wide = fmt.sf_block[1] == 0 and _lanes(hidden) > WARP
    static = (hidden, fmt, source, check.vector_bytes(x), task)
    launch(per_token_cast_row_kernel if wide else per_token_cast_kernel, static, x, x_sf, y, y_sf, amax_floor)


@functools.cache
def _check_format(fmt: QuantFormat) -> None:
    """`fmt` must be a per-token format; asked once for each."""
    check.one_of(fmt.data.name, ('e4m3', 'e5m2', 'e2m1', 'e5m6'), 'fmt.data')
    check.equal(fmt.sf_block[0], 1, 'fmt.sf_block[0]')
    check.one_of(fmt.sf_block[1], GROUPS, 'fmt.sf_block[1]')


def _check_input(x: Tensor, fmt: QuantFormat) -> tuple[int, int]:
    """Shape of `x`, once it is something the format can hold."""
    _check_format(fmt)
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden', dtype=DTYPES)
    check.unit_stride(x, 'x')
    check.at_least(hidden, 1, 'hidden')
    check.multiple(hidden, fmt.data.pack, 'hidden')
    return num_tokens, hidden


def _check_floor(amax_floor: float | None, fmt: QuantFormat) -> float:
    """The floor in force: the format's own unless given; no scale factor may become zero."""
    if amax_floor is None:
        return fmt.amax_floor
    check.at_least(amax_floor, fmt.data.max * (2.0**-9 if fmt.sf == 'e4m3' else 2.0**-126), 'amax_floor')
    return amax_floor


def _cast_task(fmt: QuantFormat, stochastic: bool) -> str:
    """The task of a cast that rounds this way."""
    if stochastic and fmt.data.name not in MANTISSA:
        check.fail('stochastic', f'must be False for {fmt.data.name}', 'True')
    return 'stochastic' if stochastic else 'cast'


@op(outputs='y y_sf')
def per_token_cast(
    x: Tensor, fmt: QuantFormat, amax_floor: float | None = None, stochastic: bool = False
) -> QuantTensor:
    """Quantise each row of `x` in groups of `fmt.sf_block[1]` channels (`all`: the row is one group).

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride; hidden even for e2m1,
            a multiple of 8 for e5m6.
        fmt: what to store, e.g. ``QuantFormat.parse('e4m3_1x128_f32')``: data e4m3, e5m2, e2m1 or e5m6, groups of 16,
            32, 64, 128 or ``all`` channels.
        amax_floor: smallest amax a group is scaled by; the format's own if None. Not a compile-time constant.
        stochastic: round codes up or down at random, so that nothing is lost on average; e4m3, e5m2 and e2m1. The
            random bits are a hash of four scaled numbers and their channel: equal rows round equally.

    Returns:
        ``QuantTensor``: data (num_tokens, hidden), e2m1 two to a byte with the even channel in the lower nibble, and
        sf (num_tokens, ceil(hidden / group)) in the layout of `fmt`; packed bytes without a group are 0.

    A last group shorter than the others uses its own channels only. Scale factors: `f32` and its inverse are two IEEE
    divisions, powers of two are rounded up, `e4m3` to nearest. Codes round to nearest even and saturate. A NaN does
    not count in the amax and becomes the format's NaN 0x7F (e2m1: the largest magnitude, with its sign); an infinity
    counts as the largest finite float32 and saturates. No rows give empty results.
    """
    num_tokens, hidden = _check_input(x, fmt)
    floor, task = _check_floor(amax_floor, fmt), _cast_task(fmt, stochastic)
    y = fmt.empty(num_tokens, hidden, x.device)
    run(x, None, x.dtype, hidden, y.data, y.sf, fmt, floor, task)
    return y


@op(outputs='y_sf')
def per_token_cast_with_sf_only(x: Tensor, fmt: QuantFormat, amax_floor: float | None = None) -> Tensor:
    """The scale factors `per_token_cast` would return, without writing data; arguments as there."""
    num_tokens, hidden = _check_input(x, fmt)
    floor = _check_floor(amax_floor, fmt)
    y_sf = fmt.empty_sf(num_tokens, hidden, x.device)
    run(x, None, x.dtype, hidden, None, y_sf, fmt, floor, 'sf')
    return y_sf


@op(outputs='y')
def per_token_cast_with_precomputed_sf(x: Tensor, sf: Tensor, fmt: QuantFormat) -> Tensor:
    """Quantise each row of `x` with given scale factors: round(x * (1 / sf)), one division for each group.

    Args:
        x: (num_tokens, hidden) as for `per_token_cast`.
        sf: scale factors in the shape and layout of `fmt`, e.g. from `per_token_cast_with_sf_only`.
        fmt: the format of the result and of `sf`.

    Returns:
        The data tensor of `fmt`.
    """
    num_tokens, hidden = _check_input(x, fmt)
    height, width = fmt.sf_shape(num_tokens, hidden)
    check.shape(sf, 'sf', 'num_tokens num_groups', dtype=fmt.sf_dtype, num_tokens=height, num_groups=width)
    check.same_device(x=x, sf=sf)
    if not fmt.col:
        check.contiguous(sf, 'sf')
    elif height > 1 and sf.stride(0) != 1:
        check.fail('sf', 'must be column-major (stride 1 between rows)', check.describe(sf))
    y = fmt.empty_data(num_tokens, hidden, x.device)
    run(x, None, x.dtype, hidden, y, sf, fmt, fmt.amax_floor, 'data')
    return y


# Cases --------------------------------------------------------------------------------------


def _rows(num_tokens: int, hidden: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random rows of many magnitudes that start with zeros; `pitch` makes them strided."""
    magnitude = torch.exp2(torch.randint(-12, 12, (num_tokens, 1))).to(dtype)
    filled = (torch.arange(pitch or hidden) >= min(128, hidden // 2)).to(dtype)
    x = torch.randn(num_tokens, pitch or hidden, dtype=dtype) * magnitude * filled
    return x.narrow(1, 0, hidden)


def _make(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, pitch: int | None = None, **options) -> dict:
    return dict(x=_rows(num_tokens, hidden, dtype, pitch), fmt=QuantFormat.parse(fmt), **options)


def _make_with_sf(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, pitch: int | None = None) -> dict:
    x, layout = _rows(num_tokens, hidden, dtype, pitch), QuantFormat.parse(fmt)
    return dict(x=x, sf=per_token_cast_with_sf_only(x, layout), fmt=layout)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 1, 5], hidden=[128], dtype=BF16, fmt=['e4m3_1x128_f32'])
    + grid(
        num_tokens=[5],
        hidden=[416],  # tail group
        dtype=BF16,
        fmt=['e4m3_1x128_f32_col', 'e5m2_1x64_f32p2', 'e4m3_1x128_ue8m0x4_col', 'e2m1_1x32_f32p2', 'e2m1_1x16_e4m3'],
    )
    + grid(num_tokens=[3], hidden=[102], dtype=F32, fmt=['e2m1_1x32_f32', 'e2m1_1x16_ue8m0x4', 'e4m3_1x16_e4m3_col'])
    + grid(num_tokens=[3], hidden=[99], dtype=F16, fmt=['e4m3_1x32_ue8m0x4'], pitch=[101])  # odd rows, odd stride
    + grid(num_tokens=[3], hidden=[100], dtype=F16, fmt=['e2m1_1xall_f32'])  # a row within a warp
    + grid(num_tokens=[3], hidden=[520], dtype=BF16, fmt=['e4m3_1xall_f32', 'e2m1_1xall_ue8m0x4_col'], pitch=[528])
    + grid(num_tokens=[3], hidden=[544], dtype=BF16, fmt=['e5m6_1xall_f32'])
    + grid(num_tokens=[3], hidden=[104], dtype=F32, fmt=['e5m6_1xall_ue8m0x4_col', 'e5m6_1x32_f32p2'])
)
FULL_FORMATS = [
    f'{data}_1x{group}_{sf}'
    for data in ('e4m3', 'e5m2', 'e2m1')
    for group in (16, 32, 64, 128, 'all')
    for sf in ('f32', 'f32_col', 'f32p2', 'f32p2_col', 'ue8m0x4', 'ue8m0x4_col', 'e4m3', 'e4m3_col')
]
FULL_ROWS = (
    dict(num_tokens=4001, hidden=7168, dtype=torch.bfloat16),
    dict(num_tokens=257, hidden=1344, dtype=torch.float32),
    dict(num_tokens=2049, hidden=1090, dtype=torch.float16, pitch=2180),
)
FULL = (
    [dict(FULL_ROWS[index % len(FULL_ROWS)], fmt=fmt) for index, fmt in enumerate(FULL_FORMATS)]
    + [dict(row, fmt=fmt) for row in FULL_ROWS[:2] for fmt in ('e5m6_1xall_f32', 'e5m6_1x128_ue8m0x4_col')]
    + grid(num_tokens=[3], hidden=[99999], dtype=BF16, fmt=['e4m3_1xall_f32', 'e4m3_1x128_ue8m0x4_col'])
    + grid(num_tokens=[300001], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32', 'e2m1_1x32_ue8m0x4_col'])  # > 2^31
)
BENCH = (
    grid(
        num_tokens=[64, 4096, 16384],
        hidden=[7168],
        dtype=BF16,
        fmt=['e4m3_1x128_f32', 'e4m3_1x128_ue8m0x4_col', 'e2m1_1x32_f32p2', 'e4m3_1xall_f32'],
    )
    + grid(num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32_col', 'e2m1_1x32_f32', 'e2m1_1x16_e4m3'])
    + grid(num_tokens=[4096, 16384], hidden=[7168], dtype=BF16, fmt=['e5m6_1xall_f32'])
    + grid(num_tokens=[32001], hidden=[1344, 576], dtype=BF16, fmt=['e4m3_1x128_f32', 'e2m1_1x32_f32p2'])
    + grid(num_tokens=[8001], hidden=[4096], dtype=F32, fmt=['e4m3_1x128_f32', 'e2m1_1x32_f32p2'])
)
STOCHASTIC_SMOKE = grid(
    num_tokens=[3],
    hidden=[198],
    dtype=BF16,
    fmt=['e4m3_1x64_f32', 'e5m2_1xall_f32p2', 'e2m1_1x32_f32'],
    stochastic=[True],
) + grid(num_tokens=[3], hidden=[520], dtype=F32, fmt=['e4m3_1xall_f32'], stochastic=[True])
STOCHASTIC_FULL = [
    dict(row, fmt=fmt, stochastic=True)
    for row in FULL_ROWS
    for fmt in ('e4m3_1x128_f32', 'e5m2_1x32_f32p2', 'e2m1_1x16_e4m3', 'e4m3_1xall_f32')
]
STOCHASTIC_BENCH = grid(
    num_tokens=[16384], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32', 'e2m1_1x32_f32p2'], stochastic=[True]
)
per_token_cast.cases(
    make=_make,
    match='bitwise',
    smoke=SMOKE + STOCHASTIC_SMOKE,
    full=FULL + STOCHASTIC_FULL,
    bench=BENCH + STOCHASTIC_BENCH,
)
per_token_cast_with_sf_only.cases(make=_make, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:4])
per_token_cast_with_precomputed_sf.cases(
    make=_make_with_sf, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:4]
)
