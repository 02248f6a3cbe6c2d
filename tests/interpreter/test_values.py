"""Number formats and arithmetic: what a value is, how it rounds, wraps and converts."""

import numpy as np
import pytest
import tilelang.language as T
import torch

from tile_kernels.interpreter import UnsupportedConstruct
from tile_kernels.interpreter.meaning.math_ops import reinterpret
from tile_kernels.interpreter.memory.dtypes import caster, constant, decoder, dtype_of, encoder, rounder

from .kernels import elementwise

FLOATS = torch.tensor(
    [0.0, -0.0, 1.0, -1.5, 3.1415927, 1e-8, -7e4, 6.0, 448.0, 449.0, 1e9, float('inf'), -float('inf')]
)
SMALL = {
    'bfloat16': torch.bfloat16,
    'float16': torch.float16,
    'float8_e4m3fn': torch.float8_e4m3fn,
    'float8_e5m2': torch.float8_e5m2,
}


@pytest.mark.parametrize('name', [*SMALL, 'float8_e8m0fnu', 'float4_e2m1fn'])
def test_every_code_survives_decoding_and_encoding(name):
    dtype = dtype_of(name)
    codes = np.arange(1 << min(dtype.bits, 16), dtype=np.uint32).astype(dtype.storage)
    values = decoder(dtype)(codes)
    again = encoder(dtype)(values)
    numbers = ~np.isnan(values)
    assert (again[numbers] == codes[numbers]).all()
    assert np.isnan(decoder(dtype)(again[~numbers])).all()


@pytest.mark.parametrize('name', SMALL)
def test_decoding_is_that_of_torch(name):
    dtype = dtype_of(name)
    codes = np.arange(1 << dtype.bits, dtype=np.uint32).astype(dtype.storage)
    want = torch.from_numpy(codes.view(f'i{dtype.bits // 8}')).view(SMALL[name]).float().numpy()
    np.testing.assert_array_equal(decoder(dtype)(codes), want)


@pytest.mark.parametrize('name', ['bfloat16', 'float16'])
def test_rounding_to_16_bits_is_to_nearest_even_and_overflows_to_infinity(name):
    source = torch.cat([FLOATS, torch.randn(1000) * 100])
    np.testing.assert_array_equal(rounder(dtype_of(name))(source.numpy()), source.to(SMALL[name]).float().numpy())


@pytest.mark.parametrize(('name', 'limit'), [('float8_e4m3fn', 448.0), ('float8_e5m2', 57344.0)])
def test_rounding_to_8_bits_saturates(name, limit):
    source = torch.cat([FLOATS, torch.randn(1000) * 100])
    want = source.clamp(-limit, limit).to(SMALL[name]).float().numpy()
    np.testing.assert_array_equal(rounder(dtype_of(name))(source.numpy()), want)
    assert encoder(dtype_of(name))(rounder(dtype_of(name))(np.float32(-np.nan))) == 0x7F


def test_rounding_to_e2m1_is_to_nearest_even_and_saturates():
    source = np.array([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 100, -0.2, -5.0], np.float32)
    want = np.array([0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, -0.0, -4], np.float32)
    got = rounder(dtype_of('float4_e2m1fn'))(source)
    np.testing.assert_array_equal(got, want)
    assert np.signbit(got[-2])


def test_rounding_to_e8m0_is_up_to_a_power_of_two():
    source = np.array([1.0, 1.01, 2.0, 3.0, 0.5, 0.0, 2.0**-130, np.inf], np.float32)
    want = np.array([1.0, 2.0, 2.0, 4.0, 0.5, 2.0**-127, 2.0**-127, 2.0**127], np.float32)
    np.testing.assert_array_equal(rounder(dtype_of('float8_e8m0fnu'))(source), want)


@pytest.mark.parametrize('name', ['int8', 'uint8', 'int16', 'uint16', 'int32', 'uint32', 'int64', 'uint64'])
def test_integers_wrap_when_cast(name):
    source = np.array([0, -1, 127, 128, 255, 256, 65535, 2**31 - 1, -(2**31)], np.int32)
    got = caster(dtype_of('int32'), dtype_of(name))(source)
    np.testing.assert_array_equal(got.astype(np.int64), source.astype(name).astype(np.int64))
    assert constant(-1, dtype_of(name)) == int(np.int64(-1).astype(name))


def test_floats_become_integers_toward_zero_and_saturate():
    source = np.array([1.9, -1.9, 3e9, -3e9, np.nan, np.inf], np.float32)
    np.testing.assert_array_equal(
        caster(dtype_of('float32'), dtype_of('int32'))(source), [1, -1, 2**31 - 1, -(2**31), 0, 2**31 - 1]
    )
    np.testing.assert_array_equal(
        caster(dtype_of('float32'), dtype_of('uint32'))(source), [1, 0, 3000000000, 0, 0, 2**32 - 1]
    )


def test_small_integers_are_promoted_before_arithmetic():
    values = torch.tensor([0x1234, 0xFFFF, 1], dtype=torch.uint16)
    shifted = elementwise(lambda x: T.cast(x << T.uint16(8), 'uint32'), values, out=torch.uint32)
    assert shifted.tolist() == [0x123400, 0xFFFF00, 0x100]
    stored = elementwise(lambda x: x << T.uint16(8), values)
    assert stored.tolist() == [0x3400, 0xFF00, 0x100]


def test_unsigned_arithmetic_wraps_at_its_width():
    values = torch.tensor([0, 1, 0xFFFFFFFF], dtype=torch.uint32)
    assert elementwise(lambda x: x - T.uint32(1), values).tolist() == [0xFFFFFFFF, 0, 0xFFFFFFFE]
    hashed = elementwise(lambda x: (x ^ T.uint32(2166136261)) * T.uint32(16777619), values)
    assert hashed.tolist() == [((x ^ 2166136261) * 16777619) % 2**32 for x in values.tolist()]


def test_division_rounds_down_or_toward_zero_as_written():
    left = torch.tensor([7, -7, 7, -7], dtype=torch.int32)
    right = torch.tensor([2, 2, -2, -2], dtype=torch.int32)
    assert elementwise(lambda a, b: T.floordiv(a, b), left, right).tolist() == [3, -4, -4, 3]
    assert elementwise(lambda a, b: T.floormod(a, b), left, right).tolist() == [1, 1, -1, -1]
    assert elementwise(lambda a, b: T.truncdiv(a, b), left, right).tolist() == [3, -3, -3, 3]
    assert elementwise(lambda a, b: T.truncmod(a, b), left, right).tolist() == [1, -1, 1, -1]


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('operation', ['add', 'sub', 'mul', 'div'])
def test_float_arithmetic_rounds_after_each_operation(dtype, operation):
    torch.manual_seed(0)
    a, b = torch.randn(2, 500).to(dtype)
    function = {
        'add': lambda x, y: x + y,
        'sub': lambda x, y: x - y,
        'mul': lambda x, y: x * y,
        'div': lambda x, y: x / y,
    }[operation]
    assert torch.equal(elementwise(function, a, b), function(a, b))


def test_fma_rounds_once_and_only_where_written():
    a = torch.tensor([1 + 2.0**-12, 1 + 2.0**-23, 3.0])
    b = torch.tensor([1 + 2.0**-12, 1 - 2.0**-23, 1 / 3])
    c = torch.tensor([-1 - 2.0**-11, -1.0, -1.0])
    exact = (a.double() * b.double() + c.double()).float()
    assert torch.equal(elementwise(lambda x, y, z: T.fma(x, y, z), a, b, c), exact)
    assert torch.equal(elementwise(lambda x, y, z: T.ieee_fmaf(x, y, z), a, b, c), exact)
    assert torch.equal(elementwise(lambda x, y, z: x * y + z, a, b, c), a * b + c)
    assert not torch.equal(exact, a * b + c)


def test_fma_is_correct_where_rounding_twice_is_not():
    # The sum lies just above the middle of two float32 numbers, by less than float64 can hold.
    a, b = torch.tensor([1 + 2.0**-23]), torch.tensor([2.0**-24 * (1 + 2.0**-23)])
    c = torch.tensor([1.0])
    got = elementwise(lambda x, y, z: T.fma(x, y, z), a, b, c)
    assert got.item() == 1 + 2.0**-23


def test_max_and_min_drop_nan_and_order_zeros():
    nan = float('nan')
    a = torch.tensor([1.0, nan, 2.0, nan, -0.0, 0.0])
    b = torch.tensor([nan, 1.0, 3.0, nan, 0.0, -0.0])
    high = elementwise(lambda x, y: T.max(x, y), a, b)
    low = elementwise(lambda x, y: T.min(x, y), a, b)
    assert high[:3].tolist() == [1, 1, 3] and low[:3].tolist() == [1, 1, 2]
    assert high[3].isnan() and not torch.signbit(high[4:]).any() and torch.signbit(low[4:]).all()


@pytest.mark.parametrize(
    'name',
    [
        'exp',
        'exp2',
        'log',
        'log2',
        'log1p',
        'sqrt',
        'rsqrt',
        'sin',
        'cos',
        'tanh',
        'sigmoid',
        'erf',
        'floor',
        'ceil',
        'trunc',
        'abs',
    ],
)
def test_functions_are_those_of_torch(name):
    values = torch.rand(200) * 3 + 0.1
    got = elementwise(lambda x: getattr(T, name)(x), values)
    torch.testing.assert_close(got, getattr(torch, name)(values), rtol=2e-7, atol=0)


def test_classification_of_floats():
    values = torch.tensor([1.0, float('inf'), float('nan'), -float('inf')])
    for name in ('isnan', 'isinf', 'isfinite'):
        got = elementwise(lambda x, name=name: T.cast(getattr(T, name)(x), 'int32'), values, out=torch.int32)
        assert got.bool().tolist() == getattr(torch, name)(values).tolist()


def test_bit_operations():
    a = torch.tensor([0b1100, -1, 0x7FFFFFFF], dtype=torch.int32)
    b = torch.tensor([0b1010, 3, 1], dtype=torch.int32)
    for function in (
        lambda x, y: x & y,
        lambda x, y: x | y,
        lambda x, y: x ^ y,
        lambda x, y: x << y,
        lambda x, y: x >> y,
    ):
        assert elementwise(function, a, b).tolist() == torch_shift_safe(function, a, b)
    assert elementwise(lambda x: ~x, a).tolist() == (~a).tolist()
    assert elementwise(lambda x: T.popcount(x), a).tolist() == [2, 32, 31]
    assert elementwise(lambda x: T.clz(x), a).tolist() == [28, 0, 1]


def torch_shift_safe(function, a, b):
    """NumPy's answer, whose shifts are defined for every amount."""
    return function(a.numpy(), b.numpy()).tolist()


def test_reinterpret_keeps_bits():
    values = torch.tensor([1.0, -2.5, 0.0])
    bits = elementwise(lambda x: T.reinterpret(x, 'uint32'), values, out=torch.uint32)
    assert bits.tolist() == [0x3F800000, 0xC0200000, 0]
    assert torch.equal(elementwise(lambda x: T.reinterpret(x, 'float32'), bits, out=torch.float32), values)
    half = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    assert elementwise(lambda x: T.reinterpret(x, 'uint16'), half, out=torch.uint16).tolist() == [0x3F80, 0xC000]


def test_reinterpret_splits_and_joins_vectors():
    word = np.array([0x3F80C000], np.uint32).reshape(1, 1)
    low, high = reinterpret(word, dtype_of('uint32'), dtype_of('bfloat16x2'))
    assert low.item() == -2.0 and high.item() == 1.0
    assert reinterpret((low, high), dtype_of('bfloat16x2'), dtype_of('uint32')).item() == 0x3F80C000


def test_packed_pairs_compute_component_by_component():
    torch.manual_seed(0)
    a, b = torch.randn(2, 64).bfloat16().view(torch.int32).view(2, 32)

    def pair(function):
        return lambda x, y: T.reinterpret(
            function(T.reinterpret(x, 'bfloat16x2'), T.reinterpret(y, 'bfloat16x2')), 'int32'
        )

    left, right = a.view(torch.bfloat16), b.view(torch.bfloat16)
    for function, want in ((T.add2, left + right), (T.mul2, left * right), (T.max2, torch.maximum(left, right))):
        assert torch.equal(elementwise(pair(function), a.contiguous(), b.contiguous()).view(torch.bfloat16), want)


def test_casts_between_every_pair_of_types():
    values = torch.tensor([0, 1, 2, 3, 100])
    for source in (
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float8_e4m3fn,
    ):
        for target in (
            torch.int8,
            torch.int16,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
            torch.float8_e5m2,
        ):
            given = values.float().to(source)
            got = elementwise(lambda x, target=target: T.cast(x, str(target).removeprefix('torch.')), given, out=target)
            assert torch.equal(got.float(), given.float().to(target).float()), (source, target)


def test_infinity_of_small_floats():
    ones = torch.ones(4).to(torch.float8_e5m2)
    assert elementwise(lambda x: T.infinity('float8_e5m2'), ones).float().tolist() == [float('inf')] * 4
    assert elementwise(lambda x: -T.infinity('float8_e5m2'), ones).float().tolist() == [-57344.0] * 4
    with pytest.raises(UnsupportedConstruct, match='infinity of float8_e4m3fn'):
        elementwise(lambda x: T.infinity('float8_e4m3fn'), torch.ones(4).to(torch.float8_e4m3fn))
