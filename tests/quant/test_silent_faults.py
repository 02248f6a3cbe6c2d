"""Faults that were reported of other casts and show in no error: each of them is looked for here.

The kernels run in the interpreter, which raises if anything is read or written outside a tensor or never written.
"""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, knobs, quant
from tile_kernels.quant.per_block_cast import per_block_cast
from tile_kernels.quant.per_channel_cast import per_channel_cast
from tile_kernels.quant.per_channel_cast_and_transpose import per_channel_cast_and_transpose
from tile_kernels.quant.per_token_cast import per_token_cast
from tile_kernels.reference import quant as twin
from tile_kernels.testing.numeric import assert_equal

CASTS = [
    (per_token_cast.call, 'e4m3_1x128_{}'),
    (per_block_cast.call, 'e4m3_32x128_{}'),
    (per_channel_cast.call, 'e4m3_32x1_{}'),
    (per_channel_cast_and_transpose.call, 'e4m3_32x1_{}'),
]


def kernel(op, *args):
    with knobs(interpret=True):
        return op(*args)


@pytest.mark.parametrize(('op', 'name'), CASTS)
@pytest.mark.parametrize('sf', ['f32', 'ue8m0x4'])
@pytest.mark.parametrize('shape', [(129, 136), (33, 264), (1, 8)])
def test_scale_factors_of_a_tail_tile_stay_in_their_tensor(op, name, sf, shape):
    x, fmt = torch.randn(shape).bfloat16(), QuantFormat.parse(name.format(sf))
    for got, expected in zip(kernel(op, x, fmt), getattr(twin, op.__name__)(x, fmt), strict=True):
        assert_equal(got, expected)


@pytest.mark.parametrize(('op', 'name'), CASTS)
def test_the_largest_magnitude_is_not_rounded_to_a_narrower_type(op, name):
    amax = 1 + 2.0**-20  # no bfloat16 and no float16
    x = torch.full((40, 136), amax)
    _, sf = kernel(op, x, QuantFormat.parse(name.format('f32')))
    assert bool((sf == torch.tensor(amax) / torch.tensor(448.0)).all())


def test_rows_out_of_range_do_not_read_the_first_row():
    x = torch.full((4, 64), 7.0).bfloat16()
    rows = torch.tensor([-1, 4, 2**31 - 1, -(2**31)], dtype=torch.int32)
    with knobs(interpret=True):
        y = quant.per_channel_cast_fused(x, 'e4m3', 32, pos_to_token=rows)
    assert bool((y.data.float() == 0).all())
    assert bool((y.sf == torch.tensor(y.fmt.amax_floor) / torch.tensor(448.0)).all())


def test_packed_factors_need_no_columns():
    x = torch.randn(5, 512).bfloat16()
    with knobs(interpret=True):
        packed = quant.per_token_cast(x, 'e4m3', 128, round_sf=True, use_packed_ue8m0=True)
        rounded = quant.per_token_cast(x, 'e4m3', 128, round_sf=True)
    exponents = (rounded.sf.view(torch.int32) >> 23).to(torch.uint8)
    assert torch.equal(packed.sf.view(torch.uint8), exponents)
    assert_equal(packed.data, rounded.data)


@pytest.mark.parametrize(
    'call',
    [
        lambda x: quant.per_token_cast(x, 'e4m3', 128, use_packed_ue8m0=True),
        lambda x: quant.per_block_cast(x, 'e4m3', (32, 32), True, False, True),
        lambda x: quant.per_channel_cast(x, 'e4m3', 32, False, None, True),
    ],
)
def test_packed_factors_that_are_not_rounded_are_refused(call):
    with pytest.raises(ArgumentError, match='use_packed_ue8m0 must come with round_sf=True'):
        call(torch.randn(4, 128))
