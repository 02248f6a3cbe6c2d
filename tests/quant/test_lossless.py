"""The lossless cast changes no value, whatever the layouts; what cannot be kept is rounded."""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, QuantTensor, knobs, quant
from tile_kernels.quant.per_block_cast_lossless import _make, per_block_cast_lossless
from tile_kernels.reference import quant as twin
from tile_kernels.reference.quant import _common

SOURCES = ['e2m1_1x32_f32p2', 'e2m1_1x32_ue8m0x4_col', 'e2m1_32x32_ue8m0x4', 'e2m1_1x16_f32_col']
TARGETS = ['e4m3_1x128_f32p2', 'e4m3_32x32_ue8m0x4_col', 'e4m3_128x128_f32_col', 'e4m3_32x64_ue8m0x4']
NESTED = [(s, t) for s in SOURCES for t in TARGETS if ('_32x' in s) <= ('_1x' not in t)]


@pytest.mark.parametrize(('source', 'target'), NESTED)
@pytest.mark.parametrize('base', [1, 110, 243])  # the smallest exponents, the middle, the largest
def test_values_stay(source, target, base):
    fmt = QuantFormat.parse(target)
    x = _make(50, 200, source, target, base)['x']
    with knobs(interpret=True):
        y = per_block_cast_lossless.call(x, fmt)
    assert torch.equal(twin.dequantize(y, torch.float32), twin.dequantize(x, torch.float32))
    assert bool((_common.load_sf(y.sf, fmt, fmt.blocks(50, 200)) >= 2.0**-126).all())


@pytest.mark.parametrize(('spread', 'kept'), [(14, True), (15, False)])
def test_factors_may_spread_over_2_to_the_14(spread, kept):
    codes = torch.full((1, 32), 0x11, dtype=torch.int8)  # 0.5, the hardest to keep
    sf = torch.tensor([[2.0**spread, 1.0]])
    x = QuantTensor(codes, sf, 'e2m1_1x32_f32p2')
    with knobs(interpret=True):
        y = per_block_cast_lossless.call(x, QuantFormat.parse('e4m3_1x128_f32p2'))
    back = twin.dequantize(y, torch.float32)
    assert torch.equal(back[:, :32], twin.dequantize(x, torch.float32)[:, :32])
    assert bool((back[:, 32:] == 0.5).all()) is kept


def test_tilekernels_arguments():
    x = _make(40, 128, 'e2m1_1x32_f32p2', 'e4m3_32x32_f32')['x']
    expected = twin.dequantize(x, torch.float32)
    for flags in ((False, True, False), (True, True, True), (False, False, False)):
        y = quant.per_block_cast_lossless(tuple(x), 'e4m3', (1, 32), (32, 32), *flags)
        assert torch.equal(quant.cast_back(tuple(y), 'fp32', (32, 32)), expected)
    with pytest.raises(
        ArgumentError, match=r'^quant.per_block_cast_lossless: out_block_size must be a multiple of 32, got 16'
    ):
        quant.per_block_cast_lossless(tuple(x), 'e4m3', (1, 32), (1, 16))
    with pytest.raises(ArgumentError, match='fmt must be e4m3, got e5m2'):
        quant.per_block_cast_lossless(tuple(x), 'e5m2', (1, 32), (32, 32))
