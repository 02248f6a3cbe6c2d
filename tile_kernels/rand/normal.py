"""Normal random numbers from a counter: number i of a stream depends only on the seed and i, on every device.

    w[4]   = philox4x32_10(counter = offset + i // 4, key = seed)
    u      = float32(w[0] | 1) * 2^-32                      in (0, 1]
    phi    = float32(int32(w[1] << 2)) * pi / 2^33          in [-pi/4, pi/4], plus (w[1] >> 30) * pi/2
    y[i]   = sqrt(-2 ln u) * cos phi, y[i + 1] = sqrt(-2 ln u) * sin phi, and the same of w[2] and w[3]

Logarithm, sine and cosine are polynomials with every product and sum rounded to float32, and the root is correctly
rounded. So a CPU and a GPU give the same bits, unlike library functions. A thread computes eight adjacent numbers.
Compute and memory take about equally long; the floor is writing y.
"""

import math

import torch

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

#: Multipliers, key steps and rounds of Philox 4x32.
MULTIPLIERS, KEY_STEPS, ROUNDS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10

#: ln(1 + f) = f - f^2 / 2 + f^3 * LOG(f) for 1 + f from sqrt(1/2) to sqrt(2), within 2^-27; lowest power first.
LOG = (
    0.33333316445350647,
    -0.2500079572200775,
    0.20002281665802002,
    -0.16624966263771057,
    0.14181438088417053,
    -0.13125349581241608,
    0.12879090011119843,
    -0.07865164428949356,
)
#: sin x = x + x * (x^2 * SIN(x^2)) and cos x = 1 + x^2 * COS(x^2) for |x| <= pi/4, within 2^-26.
SIN = (-0.1666666716337204, 0.008333403617143631, -0.0001987083232961595, 3.0557675927411765e-06)
COS = (-0.5, 0.04166701063513756, -0.0013902996433898807, 2.6117166271433234e-05)

#: float32 bits of sqrt(1/2): a number is split into a power of two and a factor from sqrt(1/2) to sqrt(2).
ROOT_HALF = 0x3F3504F3
LN2 = 0.6931471824645996
STEP = math.pi / 2**33

#: Numbers per thread.
OWN = 8


# Kernel -------------------------------------------------------------------------------------


def _polynomial(coefficients: tuple, x):
    """Horner's rule with two roundings per step."""
    value = T.float32(coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        value = T.ieee_add(T.ieee_mul(value, x), T.float32(coefficient))
    return value


def _low(value):
    """The lower word of a 64-bit number."""
    return T.cast(value & T.uint64(0xFFFFFFFF), T.uint32)


def _high(value):
    """The upper word of a 64-bit number."""
    return T.cast(value >> T.uint64(32), T.uint32)


@macro
def philox(counter, seed, words):
    """Four random words for `counter` and for each of the following counters, `words[counters, 4]`, with one key."""
    key = T.alloc_local((2,), T.uint32)
    product = T.alloc_local((2,), T.uint64)
    for k in T.unroll(words.shape[0]):
        words[k, 0], words[k, 1] = _low(counter + T.uint64(k)), _high(counter + T.uint64(k))
        words[k, 2], words[k, 3] = T.uint32(0), T.uint32(0)
    key[0], key[1] = _low(seed), _high(seed)
    for _ in T.unroll(ROUNDS):
        for k in T.unroll(words.shape[0]):
            product[0] = T.cast(words[k, 0], T.uint64) * T.uint64(MULTIPLIERS[0])
            product[1] = T.cast(words[k, 2], T.uint64) * T.uint64(MULTIPLIERS[1])
            words[k, 0] = _high(product[1]) ^ words[k, 1] ^ key[0]
            words[k, 1] = _low(product[1])
            words[k, 2] = _high(product[0]) ^ words[k, 3] ^ key[1]
            words[k, 3] = _low(product[0])
        key[0] = key[0] + T.uint32(KEY_STEPS[0])
        key[1] = key[1] + T.uint32(KEY_STEPS[1])


@macro
def normal_pair(first, second, values, place):
    """Two independent normal numbers from two random words."""
    radius = T.alloc_var(T.float32)
    exponent = T.alloc_var(T.int32)
    f = T.alloc_var(T.float32)
    angle = T.alloc_var(T.float32)
    square = T.alloc_var(T.float32)
    cos = T.alloc_var(T.float32)
    sin = T.alloc_var(T.float32)
    bits = T.reinterpret(T.cast(first | T.uint32(1), T.float32), T.int32)
    exponent = (bits - ROOT_HALF) >> 23
    f = T.ieee_sub(T.reinterpret(bits - exponent * (1 << 23), T.float32), T.float32(1.0))
    square = T.ieee_mul(f, f)
    radius = T.ieee_mul(T.ieee_mul(square, f), _polynomial(LOG, f))
    radius = T.ieee_add(T.ieee_add(radius, T.ieee_mul(square, T.float32(-0.5))), f)
    radius = T.ieee_add(radius, T.ieee_mul(T.cast(exponent - 32, T.float32), T.float32(LN2)))
    radius = T.ieee_fsqrt(T.max(T.ieee_mul(radius, T.float32(-2.0)), T.float32(0.0)))

    angle = T.ieee_mul(T.cast(T.reinterpret(second << T.uint32(2), T.int32), T.float32), T.float32(STEP))
    square = T.ieee_mul(angle, angle)
    sin = T.ieee_add(angle, T.ieee_mul(angle, T.ieee_mul(square, _polynomial(SIN, square))))
    cos = T.ieee_add(T.float32(1.0), T.ieee_mul(square, _polynomial(COS, square)))
    odd = (second & T.uint32(1 << 30)) != T.uint32(0)  # rotates by pi/2; the upper bit by pi: a sign
    radius = T.reinterpret(T.reinterpret(radius, T.uint32) ^ (second & T.uint32(1 << 31)), T.float32)
    values[place] = T.ieee_mul(radius, T.if_then_else(odd, -sin, cos))
    values[place + 1] = T.ieee_mul(radius, T.if_then_else(odd, cos, sin))


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True, 'TL_ENABLE_LOWER_LDGSTG': True})
def normal_kernel(dtype: torch.dtype, width: int):
    """Accesses have `width` aligned numbers."""
    num_threads = 256
    count = T.dynamic('count')

    @T.prim_func
    def normal(out: T.Tensor((count,), T.dtype(dtype)), seed: T.int64, offset: T.int64):
        with T.Kernel(T.ceildiv(count, num_threads * OWN), threads=num_threads) as pid:
            words = T.alloc_local((OWN // 4, 4), T.uint32)
            values = T.alloc_local((OWN,), T.float32)
            rounded = T.alloc_local((OWN,), T.dtype(dtype))
            block = T.alloc_var(T.int64)
            block = T.cast(pid, T.int64) * num_threads + T.get_thread_binding()
            philox(T.cast(offset + block * (OWN // 4), T.uint64), T.cast(seed, T.uint64), words)
            for k in T.unroll(OWN // 4):
                normal_pair(words[k, 0], words[k, 1], values, 4 * k)
                normal_pair(words[k, 2], words[k, 3], values, 4 * k + 2)
            for e in T.vectorized(OWN):
                rounded[e] = T.cast(values[e], T.dtype(dtype))
            if block * OWN + OWN <= count:
                for p in T.unroll(OWN // width):
                    for e in T.vectorized(width):
                        out[block * OWN + p * width + e] = rounded[p * width + e]
            else:
                for e in T.unroll(OWN):
                    if block * OWN + e < count:
                        out[block * OWN + e] = rounded[e]

    return normal


# Op -----------------------------------------------------------------------------------------


@op()
def normal_(out: Out, seed: int, offset: int = 0) -> None:
    """Fill `out` with independent normal numbers of mean 0 and variance 1.

    Args:
        out: bfloat16, float16 or float32, contiguous, any shape; overwritten.
        seed: selects the stream, any 64-bit integer.
        offset: start in the stream, in units of four numbers; a tensor uses ceil(numel / 4) of them.
    """
    check.dtype(out, 'out', DTYPES)
    check.contiguous(out, 'out')
    width = math.gcd(OWN, check.vector_bytes(out.view(-1)) // out.element_size())
    launch(normal_kernel, (out.dtype, width), out.view(-1), signed(seed), signed(offset), size=out.numel())


def signed(value: int) -> int:
    """The signed 64-bit integer with the bits of `value`."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)


# Cases --------------------------------------------------------------------------------------


def _make(shape: tuple, dtype: torch.dtype, seed: int = 1, offset: int = 0, shift: int = 0) -> dict:
    """The tensor is misaligned by `shift` elements."""
    out = torch.empty(math.prod(shape) + shift, dtype=dtype)[shift:].view(shape)
    return dict(out=out, seed=seed, offset=offset)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
normal_.cases(
    make=_make,
    match='bitwise',
    smoke=grid(shape=[(0,), (1,), (3000,)], dtype=[F32])
    + grid(shape=[(5, 7)], dtype=[BF16, F16], seed=[-7], offset=[1 << 33], shift=[1]),
    full=grid(shape=[(4097, 1000)], dtype=[F32, BF16], seed=[12345678901234]) + grid(shape=[(1 << 28,)], dtype=[F16]),
    bench=grid(shape=[(64, 7168), (4096, 7168), (8001, 16384)], dtype=[F32, BF16]),
)
