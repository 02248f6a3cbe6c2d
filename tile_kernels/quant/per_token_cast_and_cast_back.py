"""Per-token cast and back, in place: what quantization does to a matrix, without keeping the codes.

    x[t, h] <- round(x[t, h] * sf_inv[t, h // G]) * sf[t, h // G]       G = fmt.sf_block[1]

Codes and scale factors are those of `per_token_cast`; the product is taken in float32 and rounded to the dtype of x.
A group is G / 8 neighbouring lanes, so nothing leaves a warp. Memory bound: the floor is reading and writing x once.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.device.codes import code_registers, decode, encode_e2m1
from tile_kernels.device.reduce import lane_amax, shuffle_steps
from tile_kernels.device.scales import amax_to_sf, clamp_amax, sf_register_dtype
from tile_kernels.device.vectors import LANE, load_lane, scale_lane, store_lane
from tile_kernels.quant._checks import GROUPS, check_matrix

# Config -------------------------------------------------------------------------------------


def choose(
    hidden: int, fmt: QuantFormat, x_dtype: torch.dtype, vector_bytes: int, in_place: bool, num_tokens: int
) -> dict:
    """Four rows for each lane, so that many loads are in flight, unless that would leave the GPU half empty."""
    lanes = num_tokens * -(-hidden // LANE)
    rows = 4 if lanes >= 4 << 17 else 2 if lanes >= 2 << 17 else 1
    return dict(rows=rows, num_threads=256 if rows > 1 else 128)


# Kernel -------------------------------------------------------------------------------------


@macro
def round_lane(x_local, i, fmt, sf_inv, y_local, v_local):
    """The numbers of the codes of a row of a lane, in float32."""
    if fmt.data.name == 'e2m1':
        encode_e2m1(x_local, i, sf_inv, fmt.power_of_two, v_local, y_local)
        decode(T.view(y_local, (1, LANE // 2), T.int8), 0, 'e2m1', v_local)
    else:
        scale_lane(x_local, i, sf_inv, v_local)
        for e in T.vectorized(LANE):
            y_local[e] = T.cast(v_local[e], T.dtype(fmt.data.torch))
        for e in T.vectorized(LANE):
            v_local[e] = T.cast(y_local[e], T.float32)


@kernel(
    choose=choose,
    space=dict(rows=(1, 2, 4, 8), num_threads=(128, 256, 512)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def per_token_cast_and_cast_back_kernel(
    hidden: int,
    fmt: QuantFormat,
    x_dtype: torch.dtype,
    vector_bytes: int,
    in_place: bool,
    *,
    rows: int,
    num_threads: int,
):
    """`rows` rows for each lane; a row has whole groups of lanes. The result goes to `y`, or to where `x` was."""
    lanes = fmt.sf_block[1] // LANE
    row_lanes = -(-hidden // fmt.sf_block[1]) * lanes
    piece = math.gcd(LANE, vector_bytes // x_dtype.itemsize, hidden)
    num_tokens, x_pitch = T.dynamic('num_tokens'), T.dynamic('x_pitch')

    @T.prim_func
    def per_token_cast_and_cast_back(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), T.dtype(x_dtype)),
        y: T.Tensor((num_tokens, hidden), T.dtype(x_dtype)),
        amax_floor: T.float32,
    ):
        with T.Kernel(T.ceildiv(T.ceildiv(num_tokens, rows) * row_lanes, num_threads), threads=num_threads) as pid:
            T.assume(x_pitch % piece == 0)
            row = T.alloc_var(T.int32)
            slot = T.alloc_var(T.int32)
            x_local = T.alloc_local((rows, LANE), T.dtype(x_dtype))
            amax = T.alloc_local((rows,), T.float32)
            sf = T.alloc_local((rows,), sf_register_dtype(fmt))
            sf_inv = T.alloc_local((rows,), T.float32)
            v_local = T.alloc_local((LANE,), T.float32)
            y_local = T.alloc_local(*code_registers(fmt))
            back_local = T.alloc_local((LANE,), T.dtype(x_dtype))
            index = pid * num_threads + T.get_thread_binding()
            row = index // row_lanes * rows
            slot = index % row_lanes

            T.clear(x_local)
            for i in T.unroll(rows):
                if row + i < num_tokens:
                    load_lane(x, x_local, i, row + i, slot, piece, hidden)

            T.clear(amax)
            for i in T.unroll(rows):
                lane_amax(x_local, i, amax)
            for step in T.unroll(shuffle_steps(lanes)):
                for i in T.unroll(rows):
                    amax[i] = T.max(amax[i], T.shfl_xor(amax[i], 1 << step))

            for i in T.unroll(rows):
                amax_to_sf(clamp_amax(amax[i], amax_floor), fmt, sf, sf_inv, i)
                round_lane(x_local, i, fmt, sf_inv[i], y_local, v_local)
                for e in T.unroll(LANE):
                    v_local[e] = v_local[e] * T.cast(sf[i], T.float32)
                for e in T.vectorized(LANE):
                    back_local[e] = T.cast(v_local[e], T.dtype(x_dtype))
                if row + i < num_tokens:
                    store_lane(x if in_place else y, back_local, row + i, slot, piece, hidden, LANE)

    return per_token_cast_and_cast_back


# Op -----------------------------------------------------------------------------------------


def check_there_and_back(x: Tensor, fmt: QuantFormat) -> None:
    """`x` and `fmt` must be what the kernel can cast there and back."""
    check.one_of(fmt.data.name, ('e4m3', 'e5m2', 'e2m1'), 'fmt.data')
    check.equal(fmt.sf_block[0], 1, 'fmt.sf_block[0]')
    check.one_of(fmt.sf_block[1], GROUPS, 'fmt.sf_block[1]')
    check.one_of(fmt.sf, ('f32', 'f32p2', 'e4m3'), 'fmt.sf')
    check_matrix(x, fmt.data.pack)


@op()
def _per_token_cast_and_cast_back(x: Mut, fmt: QuantFormat) -> None:
    """Replace every number of `x` as the public function does; the layout of the scale factors does not matter."""
    check_there_and_back(x, fmt)
    static = (x.shape[1], fmt, x.dtype, check.vector_bytes(x), True)
    launch(per_token_cast_and_cast_back_kernel, static, x, None, fmt.amax_floor)


@_per_token_cast_and_cast_back.public
def per_token_cast_and_cast_back(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> None:
    """Replace every number of `x` by what quantizing it per token and dequantizing it again gives.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense; overwritten.
        fmt: 'e4m3', 'e5m2' or 'e2m1'.
        num_per_channels: channels that share a scale factor: 16, 32, 64 or 128.
        round_sf: scale factors are rounded up to powers of two.
        use_e4m3_sf: e4m3 scale factors; excludes `round_sf`.
    """
    check.one_of(fmt, ('e4m3', 'e5m2', 'e2m1'), 'fmt')
    check.one_of(num_per_channels, GROUPS, 'num_per_channels')
    layout = QuantFormat.from_flags(fmt, (1, num_per_channels), False, round_sf, use_e4m3_sf=use_e4m3_sf)
    per_token_cast_and_cast_back.call(x, layout)


# Cases --------------------------------------------------------------------------------------


def make_case(num_tokens: int, hidden: int, dtype: torch.dtype, fmt: str, pitch: int | None = None) -> dict:
    """Arguments of a case."""
    x = (
        torch.randn(num_tokens, pitch or hidden, dtype=dtype)
        * torch.exp2(torch.arange(num_tokens) % 9).to(dtype)[:, None]
    )
    return dict(x=x.narrow(1, 0, hidden), fmt=QuantFormat.parse(fmt))


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 5], hidden=[128], dtype=BF16, fmt=['e4m3_1x128_f32'])
    + grid(num_tokens=[5], hidden=[104], dtype=F32, fmt=['e2m1_1x32_f32p2', 'e2m1_1x16_e4m3', 'e5m2_1x64_f32'])
    + grid(num_tokens=[3], hidden=[102], dtype=F16, fmt=['e4m3_1x32_f32p2', 'e2m1_1x32_f32'], pitch=[105])
)
FULL = grid(
    num_tokens=[4001],
    hidden=[7168, 1090],
    dtype=BF16 + F16 + F32,
    fmt=[f'{d}_1x{g}_{sf}' for d in ('e4m3', 'e2m1') for g in GROUPS for sf in ('f32', 'f32p2', 'e4m3')],
)
BENCH = grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32']) + grid(
    num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e2m1_1x32_f32p2', 'e2m1_1x16_e4m3']
)
per_token_cast_and_cast_back.cases(make=make_case, match='bitwise', smoke=SMOKE, full=FULL, bench=BENCH)
