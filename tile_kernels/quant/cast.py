"""Cast: numbers of one dtype to another, rounded to nearest even or stochastically.

    y[i] = round(x[i])                                      fp8 saturates, as in all casts

`device/stochastic.py` says how random bits round. A lane owns 16 bytes of the wider side. Memory bound: the floor is
reading x and writing y once.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import ELEMENTS
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.device.codes import decode
from tile_kernels.device.stochastic import four_codes, round_four_to_bf16, top_bytes

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
STOCHASTIC = (
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.bfloat16, torch.float8_e4m3fn),
)


# Config -------------------------------------------------------------------------------------


def choose(source: str | torch.dtype, target: torch.dtype, vector_bytes: int, stochastic: bool, size: int) -> dict:
    """Two vectors for each thread, so that many loads are in flight, unless that would leave the GPU half empty.

    With more of them the writes of a page of memory lie further apart.
    """
    return dict(vectors=2 if size >= 1 << 23 else 1, num_threads=256)


# Kernel -------------------------------------------------------------------------------------


@kernel(
    choose=choose,
    space=dict(vectors=(1, 2, 4, 8), num_threads=(128, 256, 512)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def convert_kernel(
    source: str | torch.dtype,
    target: torch.dtype,
    vector_bytes: int,
    stochastic: bool,
    *,
    vectors: int,
    num_threads: int,
):
    """A flat tensor of `source`, a dtype or 'e2m1' for bytes of two, to one of `target`."""
    packed = source == 'e2m1'
    x_dtype = torch.uint8 if packed else source
    pack = 2 if packed else 1
    lane = 16 // max(target.itemsize, x_dtype.itemsize)
    width = lane // pack
    piece = math.gcd(width, vector_bytes // x_dtype.itemsize)
    count = T.dynamic('count', 'int64')

    @T.prim_func
    def convert(x: T.Tensor((count,), T.dtype(x_dtype)), y: T.Tensor((count * pack,), T.dtype(target))):
        blocks = T.cast(T.ceildiv(count, width * vectors * num_threads), 'int32')
        with T.Kernel(blocks, threads=num_threads) as pid:
            slot = T.alloc_var(T.int64)
            codes = T.alloc_local((vectors, width), T.dtype(x_dtype))
            v_local = T.alloc_local((lane,), T.float32)
            y_local = T.alloc_local((lane,), T.dtype(target))
            slot = T.cast(pid, 'int64') * (vectors * num_threads) + T.get_thread_binding()

            T.clear(codes)
            for k in T.unroll(vectors):
                if (slot + k * num_threads) * width + width <= count:
                    for p in T.unroll(width // piece):
                        for e in T.vectorized(piece):
                            codes[k, p * piece + e] = x[(slot + k * num_threads) * width + p * piece + e]
                else:
                    for e in T.unroll(width):
                        if (slot + k * num_threads) * width + e < count:
                            codes[k, e] = x[(slot + k * num_threads) * width + e]

            for k in T.unroll(vectors):
                decode(codes, k, source if packed else '', v_local)
                if stochastic:
                    for q in T.unroll(lane // 4):
                        place = T.cast((slot + k * num_threads) * (lane // 4) + q, T.uint32)
                        if target is torch.bfloat16:
                            round_four_to_bf16(v_local, 4 * q, place)
                        else:
                            words = T.view(y_local, (lane // 4,), T.uint32)
                            four_codes(v_local, 4 * q, place, top_bytes(v_local, 4 * q), ELEMENTS['e4m3'], words, q)
                if not stochastic or target is torch.bfloat16:
                    for e in T.vectorized(lane):
                        y_local[e] = T.cast(v_local[e], T.dtype(target))
                if (slot + k * num_threads) * width + width <= count:
                    for e in T.vectorized(lane):
                        y[(slot + k * num_threads) * lane + e] = y_local[e]
                else:
                    for e in T.unroll(lane):
                        if (slot + k * num_threads) * lane + e < count * pack:
                            y[(slot + k * num_threads) * lane + e] = y_local[e]

    return convert


# Op -----------------------------------------------------------------------------------------


@op(outputs='y', twin='convert', backward='identity')
def cast(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool = False) -> Tensor:
    """Convert every number of `x` to another dtype.

    Args:
        x: contiguous, any shape: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        dtype: one of these; fp8 saturates, others overflow to infinity.
        stochastic_rounding: round up or down at random, unbiased and reproducible: float32 to bfloat16 or
            float8_e4m3fn, bfloat16 to float8_e4m3fn; on every GPU.

    Returns:
        A contiguous tensor of the shape of `x`. Its gradient is that of `x.to(dtype)`: rounding counts as the identity.
    """
    check.dtype(x, 'x', DTYPES)
    check.one_of(dtype, DTYPES, 'dtype')
    check.contiguous(x, 'x')
    if stochastic_rounding and (x.dtype, dtype) not in STOCHASTIC:
        check.fail('stochastic_rounding', 'must be False for this pair of dtypes', f'{x.dtype} to {dtype}')
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    flat = x.view(-1)
    launch(convert_kernel, (x.dtype, dtype, check.vector_bytes(flat), stochastic_rounding), flat, y.view(-1))
    return y


# Cases --------------------------------------------------------------------------------------


def _numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes, some beyond what the targets hold."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-24, 16, shape))
    return x.to(dtype) if dtype.itemsize > 1 else x.clamp(-400, 400).to(dtype)


def _make(shape: tuple[int, ...], source: torch.dtype, target: torch.dtype, stochastic: bool = False) -> dict:
    return dict(x=_numbers(shape, source), dtype=target, stochastic_rounding=stochastic)


BF16, F16, F32, E4M3, E5M2 = DTYPES
PAIRS = [(a, b) for a in DTYPES for b in DTYPES]
cast.cases(
    make=_make,
    match='bitwise',
    smoke=[dict(shape=(3, 67), source=a, target=b) for a, b in PAIRS[1::3]]
    + [dict(shape=(5, 29), source=a, target=b, stochastic=True) for a, b in STOCHASTIC]
    + grid(shape=[(0, 4), ()], source=[F32], target=[BF16]),
    full=[dict(shape=(4001, 1091), source=a, target=b) for a, b in PAIRS]
    + [dict(shape=(4001, 7168), source=a, target=b, stochastic=True) for a, b in STOCHASTIC]
    + grid(shape=[(300001, 7168)], source=[BF16], target=[E4M3]),  # past 2^31 elements
    bench=grid(shape=[(4096, 7168), (16384, 7168)], source=[F32], target=[BF16, E4M3], stochastic=[False, True])
    + grid(shape=[(4096, 7168)], source=[BF16], target=[E4M3], stochastic=[False, True])
    + grid(shape=[(4096, 7168)], source=[E4M3], target=[BF16, F32]),
)
