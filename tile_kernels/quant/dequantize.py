"""Dequantize: the numbers of a quantized matrix, in blocks of any extent and scale factors of any layout.

    y[t, h] = code[t, h] * sf[t // M, h // N]               M, N = x.fmt.sf_block; in float32, then rounded to `dtype`

A lane owns several vectors of 16 bytes of the result, in adjacent rows or a warp apart in its row. It reads the codes
and scale factors it needs; adjacent lanes find the same scale factors in the L1 cache. Memory bound: the floor is
reading x and writing y once.
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
from tile_kernels.device.codes import decode
from tile_kernels.device.scales import sf_value
from tile_kernels.device.vectors import load_lane, store_lane
from tile_kernels.quant._checks import DTYPES, check_quantized
from tile_kernels.quant._samples import random_quantized

# Config -------------------------------------------------------------------------------------


def _lane(fmt: QuantFormat, dtype: torch.dtype) -> int:
    """Channels of a lane: 16 bytes of the result, and whole groups of a packed format."""
    return max(16 // dtype.itemsize, fmt.data.pack)


def choose(hidden: int, fmt: QuantFormat, dtype: torch.dtype, vector_bytes: int, num_tokens: int) -> dict:
    """Two vectors for each lane, so that more loads are in flight, unless that would leave the GPU half empty.

    With more of them, or in other rows, the writes of a page of memory lie further apart.
    """
    lanes = num_tokens * -(-hidden // _lane(fmt, dtype))
    vectors = 2 if lanes >= 2 << 17 else 1
    num_bytes = num_tokens * (fmt.data.stored(hidden) + hidden * dtype.itemsize)
    early = is_short(num_bytes)
    num_threads = 256 if early and num_bytes > 1 << 22 else 128  # warps that wait need fewer blocks
    return dict(vectors=vectors, along=vectors, num_threads=num_threads, early=early)


# Kernel -------------------------------------------------------------------------------------


def _sf_tensor(fmt: QuantFormat, num_cols: int):
    """Parameter type of the scale factors, row-major or column-major."""
    shape = (T.dynamic('sf_rows'), num_cols)
    if fmt.col:
        return T.StridedTensor(shape, (1, T.dynamic('sf_pitch')), T.dtype(fmt.sf_dtype))
    return T.Tensor(shape, T.dtype(fmt.sf_dtype))


@macro
def load_factors(x_sf, fmt, i, row, col, hidden, factors):
    """The scale factors of a row of a lane: one if its channels share one, else one for each channel."""
    height, width = fmt.sf_block
    sf_row = row // height if height else 0
    channels = factors.shape[1]
    if channels == 1:
        if col < hidden:
            factors[i, 0] = sf_value(x_sf, fmt, sf_row, col // width if width else 0)
    elif width == 1 and fmt.sf_pack == 1 and not fmt.col and hidden % channels == 0:
        if col < hidden:
            for e in T.vectorized(channels):
                factors[i, e] = sf_value(x_sf, fmt, sf_row, col + e)
    else:
        for e in T.unroll(channels):
            if col + e < hidden:
                factors[i, e] = sf_value(x_sf, fmt, sf_row, (col + e) // width)


@kernel(
    choose=choose,
    space=dict(vectors=(1, 2, 4, 8), along=(1, 2, 4), num_threads=(64, 128, 256, 512, 1024), early=EARLY),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def dequantise_kernel(
    hidden: int,
    fmt: QuantFormat,
    dtype: torch.dtype,
    vector_bytes: int,
    *,
    vectors: int,
    along: int,
    num_threads: int,
    early: bool = False,
):
    """Of the vectors of a lane, `along` are in the same row if rows divide so; a scale factor of all is read once."""
    lane = _lane(fmt, dtype)
    row_lanes, stored, width = -(-hidden // lane), fmt.data.stored(hidden), fmt.data.stored(lane)
    sf_height, sf_width = fmt.sf_block
    along = math.gcd(vectors, along, row_lanes // WARP) if row_lanes % WARP == 0 else 1
    band_rows, band_lanes = vectors // along, row_lanes // along
    own_vectors = 1 if along == 1 and sf_height % vectors == 0 else vectors
    own_factors = 1 if sf_width % lane == 0 else lane
    piece = math.gcd(width, vector_bytes // fmt.data.torch.itemsize, stored)
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')

    @T.prim_func
    def dequantise(
        x: T.StridedTensor((num_tokens, stored), (x_pitch, 1), T.dtype(fmt.data.torch)),
        x_sf: _sf_tensor(fmt, fmt.sf_shape(1, hidden)[1]),
        y: T.Tensor((num_tokens, hidden), T.dtype(dtype)),
    ):
        with T.Kernel(
            T.ceildiv(T.ceildiv(num_tokens, band_rows) * band_lanes, num_threads), threads=num_threads
        ) as pid:
            if early:
                begin_early()
            T.assume(x_pitch % piece == 0)
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            codes = T.alloc_local((vectors, width), T.dtype(fmt.data.torch))
            factors = T.alloc_local((own_vectors, own_factors), T.float32)
            v_local = T.alloc_local((lane,), T.float32)
            y_local = T.alloc_local((lane,), T.dtype(dtype))
            index = pid * num_threads + T.get_thread_binding()
            row = index // band_lanes * band_rows
            slot = index % band_lanes if along == 1 else index % band_lanes // WARP * (WARP * along) + index % WARP

            T.clear(codes)
            T.clear(factors)
            for i in T.unroll(vectors):
                if row + i // along < num_tokens:
                    load_lane(x, codes, i, row + i // along, slot + i % along * WARP, piece, x.shape[1])
            for i in T.unroll(own_vectors):
                if row + i // along < num_tokens:
                    col = (slot + i % along * WARP) * lane
                    load_factors(x_sf, fmt, i, row + i // along, col, hidden, factors)

            for i in T.unroll(vectors):
                decode(codes, i, fmt.data.name, v_local)
                for e in T.unroll(lane):
                    v_local[e] = v_local[e] * factors[i % own_vectors, e % own_factors]
                for e in T.vectorized(lane):
                    y_local[e] = T.cast(v_local[e], T.dtype(dtype))
                if row + i // along < num_tokens:
                    at = slot + i % along * WARP
                    store_lane(y, y_local, row + i // along, at, math.gcd(lane, hidden), hidden, lane)

    return dequantise


# Op -----------------------------------------------------------------------------------------


@op(outputs='y')
def dequantize(x: QuantTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The numbers that a quantized matrix stands for: code * sf.

    Args:
        x: (num_tokens, hidden) of any format: data e4m3, e5m2, e2m1 or e5m6 with dense rows and any row stride. Each
            block of `x.fmt.sf_block` has one scale factor, in the layout of `x.fmt`.
        dtype: bfloat16, float16 or float32.

    Returns:
        (num_tokens, hidden), contiguous. The product is taken in float32 and rounded once, to nearest even. The
        exponent byte 0 of a packed scale factor stands for 2^-127.
    """
    check.one_of(dtype, DTYPES, 'dtype')
    num_tokens, hidden = check_quantized(x)
    check.multiple(hidden, x.fmt.data.pack, 'hidden')
    y = torch.empty((num_tokens, hidden), dtype=dtype, device=x.device)
    launch(dequantise_kernel, (hidden, x.fmt, dtype, check.vector_bytes(x.data)), x.data, x.sf, y)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, hidden: int, fmt: str, dtype: torch.dtype, pad: int = 0) -> dict:
    return dict(x=random_quantized(num_tokens, hidden, fmt, pad), dtype=dtype)


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
LAYOUTS = ('f32', 'f32_col', 'f32p2', 'ue8m0x4', 'ue8m0x4_col', 'e4m3', 'e4m3_col')
dequantize.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 5], hidden=[128], fmt=['e4m3_1x128_f32'], dtype=BF16)
    + grid(
        num_tokens=[37], hidden=[264], fmt=['e4m3_32x32_ue8m0x4_col', 'e2m1_1x16_e4m3', 'e5m6_1xall_f32'], dtype=BF16
    )
    + grid(num_tokens=[37], hidden=[102], fmt=['e2m1_32x128_ue8m0x4', 'e5m2_128x1_f32', 'e4m3_32x1_ue8m0x4'], dtype=F32)
    + grid(num_tokens=[9], hidden=[72], fmt=['e5m6_1x128_f32p2', 'e5m2_allx1_f32', 'e4m3_128x1_f32_col'], dtype=F32)
    + grid(num_tokens=[5], hidden=[100], fmt=['e4m3_1xall_f32_col', 'e2m1_1x6_f32'], dtype=F16, pad=[1]),
    full=grid(
        num_tokens=[4001],
        hidden=[7168, 1088],
        fmt=[f'{d}_{b}_{sf}' for d in ('e4m3', 'e5m2', 'e2m1') for b in ('1x32', '1x128', '128x128') for sf in LAYOUTS],
        dtype=BF16 + F32,
    )
    + grid(
        num_tokens=[4001], hidden=[1090], fmt=['e4m3_128x1_f32', 'e2m1_1x32_f32', 'e4m3_32x1_ue8m0x4'], dtype=BF16 + F32
    )
    + grid(num_tokens=[4001], hidden=[7168], fmt=['e5m6_1xall_f32', 'e4m3_1xall_f32'], dtype=BF16 + F32)
    + grid(num_tokens=[300001], hidden=[7168], fmt=['e4m3_1x128_f32'], dtype=BF16),  # past 2^31 elements
    bench=grid(num_tokens=[64, 4096, 16384], hidden=[7168], fmt=['e4m3_1x128_f32'], dtype=BF16 + F32)
    + grid(
        num_tokens=[4096],
        hidden=[7168],
        fmt=['e4m3_1x128_ue8m0x4_col', 'e2m1_1x32_f32', 'e4m3_128x128_f32', 'e4m3_128x1_f32', 'e5m6_1xall_f32'],
        dtype=BF16,
    )
    + grid(num_tokens=[32001], hidden=[1344, 576], fmt=['e4m3_1x128_f32'], dtype=BF16 + F32),
)
