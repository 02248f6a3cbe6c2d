"""Conversions of single numbers: all of them, stochastic rounding, unpacked fp4, scale factors of weights."""

import pytest
import torch

from tile_kernels import ArgumentError, knobs, quant
from tile_kernels.core.launch import forced_config
from tile_kernels.quant.cast import STOCHASTIC, cast
from tile_kernels.quant.transpose_weight_sf import transpose_weight_sf
from tile_kernels.quant.unpack_from_e2m1fn_x2 import unpack_from_e2m1fn_x2
from tile_kernels.reference import quant as twin
from tile_kernels.reference.quant._common import random_words
from tile_kernels.testing.numeric import assert_equal

NAN, INF = float('nan'), float('inf')
E4M3, E5M2, BF16, F32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
EVERY_BF16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(BF16)


def kernel(op, *args):
    with knobs(interpret=True):
        return op(*args)


@pytest.mark.parametrize('target', [E4M3, E5M2])
def test_every_bf16_to_fp8(target):
    finite = EVERY_BF16[EVERY_BF16.isfinite()]
    largest = torch.finfo(target).max
    y = kernel(cast, finite, target)
    assert torch.equal(y.view(torch.uint8), finite.float().clamp(-largest, largest).to(target).view(torch.uint8))


def test_every_bf16_rounds_stochastically_to_a_neighbour():
    finite = EVERY_BF16[EVERY_BF16.isfinite()]
    y = kernel(cast, finite, E4M3, True)
    assert_equal(y, twin.convert(finite, E4M3, True))
    v, rounded = finite.float().clamp(-448, 448), y.float()
    codes = torch.arange(128, dtype=torch.uint8)[:127].view(E4M3).float()
    below = codes[(torch.bucketize(v.abs(), codes, right=True) - 1)]
    above = codes[torch.bucketize(v.abs(), codes)]
    assert bool(((rounded.abs() == below) | (rounded.abs() == above)).all())
    exact = below == above
    assert torch.equal(rounded[exact], v[exact]) and torch.equal(rounded.signbit(), v.signbit())
    assert bool((rounded.abs() != below)[~exact].any()) and bool((rounded.abs() != above)[~exact].any())


@pytest.mark.parametrize(('source', 'target'), STOCHASTIC)
@pytest.mark.parametrize('low', [1.0, -0.25, 2.0**-8, 2.0**-10])  # the last two: e4m3 subnormals
def test_stochastic_rounding_loses_nothing_on_average(source, target, low):
    """The mean of n roundings has a deviation of at most 1 / sqrt(n) of half a step; four of these are allowed."""
    count = 1 << 14
    x = (low * (1 + torch.rand(count) * 0.9)).to(source)
    y = twin.convert(x, target, True)
    step = abs(low) * 2.0**-7 if target is BF16 else max(abs(low) * 2.0**-3, 2.0**-9)
    assert (y.double() - x.double()).mean().abs() <= 4 * step / 2 / count**0.5
    assert (y.double() - x.double()).abs().max() < step


@pytest.mark.parametrize(('source', 'target'), STOCHASTIC)
def test_stochastic_rounding_of_what_is_not_finite(source, target):
    x = torch.tensor([INF, -INF, NAN, 0.0, -0.0, 1e30, -1e30, 1.0]).to(source)
    y = kernel(cast, x, target, True).float()
    assert y[2].isnan() and y[3:5].signbit().tolist() == [False, True] and y[7] == 1.0
    if target is E4M3:
        assert y[[0, 1, 5, 6]].tolist() == [448.0, -448.0, 448.0, -448.0]
    else:
        assert y[:2].tolist() == [INF, -INF]


def test_the_hash_is_that_of_the_specification():
    """One word of four numbers, followed step by step with Python's integers."""
    v = torch.tensor([1.1, -2.2, 3.3e-5, 4.4e7])
    bits = [int(b) & 0xFFFFFFFF for b in v.view(torch.int32)]
    mask = 0xFFFFFFFF
    h = sum(b * f for b, f in zip(bits, (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D), strict=True)) & mask
    h = (h ^ h >> 23) * 0x7FEB352D & mask
    h = (h ^ h >> 16) * 0x846CA68B & mask
    s = h * 0xD35A2D97 & mask
    r, s = h ^ h >> 11, s ^ s >> 11
    first, second = random_words(v)
    assert (first.item(), second.item()) == (r, s)
    expected = [
        (b + half) & 0xFFFF0000 for b, half in zip(bits, (r >> 16, r & 0xFFFF, s >> 16, s & 0xFFFF), strict=True)
    ]
    y = kernel(cast, v, BF16, True)
    assert [int(b) & 0xFFFFFFFF for b in y.float().view(torch.int32)] == expected


@pytest.mark.parametrize('vectors', [1, 2, 4, 8])
@pytest.mark.parametrize('count', [1, 2050, 4097])
def test_every_number_of_vectors_gives_the_same(vectors, count):
    x = torch.randn(count)
    with forced_config(vectors=vectors, num_threads=128):
        assert_equal(kernel(cast, x, BF16, True), twin.convert(x, BF16, True))


def test_memory_may_start_anywhere():
    x = torch.randn(70)[1:]
    assert_equal(kernel(cast, x, BF16), x.bfloat16())


def test_wrong_conversions_are_told_in_one_sentence():
    with pytest.raises(ArgumentError, match=r'^quant.cast: x must be contiguous'):
        quant.cast(torch.randn(4, 4).t(), BF16)
    with pytest.raises(ArgumentError, match='stochastic_rounding must be False for this pair of dtypes'):
        quant.cast(torch.randn(4), E5M2, stochastic_rounding=True)
    with pytest.raises(ArgumentError, match='x must be bfloat16 or'):
        quant.cast(torch.arange(4), BF16)


# fp4 ----------------------------------------------------------------------------------------


def test_unpacking_takes_the_lower_nibble_first():
    x = torch.tensor([[0x71, 0x2A]], dtype=torch.uint8).view(torch.int8)
    assert kernel(unpack_from_e2m1fn_x2, x).tolist() == [[0.5, 6.0, -1.0, 1.0]]
    assert kernel(unpack_from_e2m1fn_x2, x.view(torch.uint8), BF16).dtype is BF16
    with pytest.raises(ValueError, match='at least one dimension'):
        unpack_from_e2m1fn_x2(torch.tensor(3, dtype=torch.int8))


# Scale factors of weights -------------------------------------------------------------------


@pytest.mark.parametrize('block', [32, 128])
@pytest.mark.parametrize('batch', [None, 3])
def test_weight_factors_are_packed_both_ways(block, batch):
    shape = (5, 6) if batch is None else (batch, 5, 6)
    sf = torch.exp2(torch.randint(-9, 9, shape).float())
    with knobs(interpret=True):
        (sf0, sf1), (_, turned) = quant.batched_transpose_weight_sf([sf, sf], block, [False, True], [None, None])
    for result, expected in zip((sf0, sf1), twin.batched_transpose_weight_sf([sf], block, [False])[0], strict=True):
        assert_equal(result, expected)
    n, k = 5 * block, 6 * block
    assert sf0.shape[-2:] == (n, 2) and sf0.stride()[-2:] == (1, n)
    assert sf1.shape[-2:] == (k, 2) and sf1.stride()[-2:] == (1, k)
    assert turned.is_contiguous() and torch.equal(turned, sf1.mT)
    exponent = (sf.view(torch.int32) >> 23).expand(*shape)
    for column in range(8):
        byte = (sf0[..., column // 4] >> 8 * (column % 4)) & 0xFF
        expected = exponent[..., column].repeat_interleave(block, -1) if column < 6 else torch.zeros_like(byte)
        assert torch.equal(byte, expected)
        byte = (sf1[..., column // 4] >> 8 * (column % 4)) & 0xFF
        expected = exponent[..., column, :].repeat_interleave(block, -1) if column < 5 else torch.zeros_like(byte)
        assert torch.equal(byte, expected)


def test_weight_factors_have_square_blocks():
    with pytest.raises(ArgumentError, match=r'^quant.batched_transpose_weight_sf: block_size .*, got \(32, 128\)'):
        quant.batched_transpose_weight_sf([torch.ones(4, 4)], (32, 128), [False])


def test_weight_factors_can_be_written_to_given_tensors():
    sf = torch.exp2(torch.randint(-9, 9, (4, 8)).float())
    ((sf0, sf1),) = quant.batched_transpose_weight_sf([sf], 32, [False])
    outs = (torch.empty_like(sf0), torch.empty_like(sf1))
    ((a, b),) = quant.batched_transpose_weight_sf([sf], (32, 32), [False], [outs])
    assert a is outs[0] and b is outs[1] and torch.equal(a, sf0) and torch.equal(b, sf1)
    with pytest.raises(ArgumentError, match='must have the same length, got 1, 2 and 1'):
        quant.batched_transpose_weight_sf([sf], 32, [False, True])
    with pytest.raises(ArgumentError, match='block must be one of 32, 128, got 64'):
        transpose_weight_sf(sf.unsqueeze(0), 64)
