"""Casts of nearly 2^32 numbers, compared with their twins where offsets pass 2^31 and at both ends; rows far apart."""

import pytest
import torch

from tile_kernels import QuantFormat, QuantTensor
from tile_kernels.quant.cast import cast
from tile_kernels.quant.dequantize import dequantize
from tile_kernels.quant.per_block_cast import per_block_cast
from tile_kernels.quant.per_block_cast_lossless import per_block_cast_lossless
from tile_kernels.quant.per_channel_cast import per_channel_cast
from tile_kernels.quant.per_channel_cast_and_transpose import per_channel_cast_and_transpose
from tile_kernels.quant.per_channel_recast import per_channel_recast
from tile_kernels.quant.per_token_cast import per_token_cast
from tile_kernels.quant.per_token_recast import per_token_recast
from tile_kernels.reference import quant as twin
from tile_kernels.testing import assert_equal

if not torch.cuda.is_available():
    pytest.skip('needs a CUDA device', allow_module_level=True)

HIDDEN, NUM_TOKENS = 7168, 599185  # 8,576 numbers short of 2^32; the last group of 128 rows has 17
WINDOWS = [
    (first, min(first + 256, NUM_TOKENS)) for first in (0, 2**31 // HIDDEN // 128 * 128, NUM_TOKENS // 128 * 128)
]


def rows_of(value: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Rows of a tensor, or the scale factors of groups of 128 of them."""
    height = 1 if value.shape[0] == NUM_TOKENS else 128
    return value[first // height : -(-last // height)].contiguous()


def assert_windows_agree(result, reference):
    """`reference(first, last)` is what the twin makes of some rows."""
    for first, last in WINDOWS:
        expected = reference(first, last)
        pairs = zip(result, expected, strict=True) if isinstance(result, tuple) else [(result, expected)]
        for got, wanted in pairs:
            assert_equal(rows_of(got, first, last), wanted.contiguous())


def rows_of_pair(x: QuantTensor, first: int, last: int) -> QuantTensor:
    return QuantTensor(x.data[first:last], x.sf[first:last], x.fmt)


@pytest.fixture(scope='module')
def x():
    torch.manual_seed(0)
    return torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16, device='cuda')


@pytest.fixture(scope='module')
def codes():
    fmt = QuantFormat.parse('e4m3_1x128_f32')
    data = torch.empty(NUM_TOKENS, HIDDEN, dtype=torch.uint8, device='cuda').random_(0, 0x7C)
    sf = torch.rand(NUM_TOKENS, HIDDEN // 128, device='cuda') + 0.01
    return QuantTensor(data.view(torch.float8_e4m3fn), sf, fmt)


@pytest.mark.parametrize(
    ('op', 'name'),
    [
        (per_token_cast.call, 'e4m3_1x128_f32'),
        (per_token_cast.call, 'e2m1_1x32_f32p2'),
        (per_token_cast.call, 'e5m6_1xall_f32'),
        (per_block_cast.call, 'e4m3_128x128_f32'),
        (per_channel_cast.call, 'e4m3_128x1_f32'),
    ],
)
def test_casts(x, op, name):
    fmt = QuantFormat.parse(name)
    reference = getattr(twin, op.__name__)
    assert_windows_agree(op(x, fmt), lambda first, last: reference(x[first:last], fmt))


def test_transposed_cast(x):
    fmt = QuantFormat.parse('e4m3_128x1_f32')
    y, y_sf = per_channel_cast_and_transpose.call(x, fmt)
    for first, last in WINDOWS:
        expected, expected_sf = twin.per_channel_cast_and_transpose(x[first:last], fmt)
        assert_equal(y[:, first:last].contiguous(), expected)
        assert_equal(rows_of(y_sf, first, last), expected_sf)


def test_conversion(x):
    dtype = torch.float8_e4m3fn
    assert_windows_agree(cast(x, dtype), lambda first, last: twin.convert(x[first:last], dtype))


@pytest.mark.parametrize(
    ('op', 'argument'),
    [
        (dequantize, torch.bfloat16),
        (dequantize, torch.float32),
        (per_token_recast, QuantFormat.parse('e2m1_1x32_f32p2')),
        (per_channel_recast, QuantFormat.parse('e4m3_128x1_f32')),
    ],
)
def test_quantised_inputs(codes, op, argument):
    reference = getattr(twin, op.__name__)
    assert_windows_agree(op(codes, argument), lambda *window: reference(rows_of_pair(codes, *window), argument))


def test_lossless_cast():
    fmt, target = QuantFormat.parse('e2m1_1x32_f32p2'), QuantFormat.parse('e4m3_1x128_f32p2')
    data = torch.empty(NUM_TOKENS, HIDDEN // 2, dtype=torch.int8, device='cuda').random_(-128, 128)
    sf = torch.exp2(torch.randint(-6, 6, (NUM_TOKENS, HIDDEN // 32), device='cuda').float())
    x = QuantTensor(data, sf, fmt)
    assert_windows_agree(
        per_block_cast_lossless.call(x, target),
        lambda *window: twin.per_block_cast_lossless(rows_of_pair(x, *window), target),
    )


@pytest.mark.parametrize(
    ('op', 'name'),
    [
        (per_token_cast.call, 'e4m3_1x128_f32'),
        (per_token_cast.call, 'e4m3_1xall_f32'),
        (per_block_cast.call, 'e4m3_32x32_ue8m0x4_col'),
        (per_channel_cast.call, 'e4m3_32x1_ue8m0x4'),
        (per_channel_cast.call, 'e4m3_allx1_f32'),
        (per_channel_cast_and_transpose.call, 'e4m3_128x1_f32'),
    ],
)
def test_rows_may_lie_far_apart(x, op, name):
    pitch, fmt = 7280008, QuantFormat.parse(name)
    rows = x.as_strided((589, 7160), (pitch, 1))
    for got, wanted in zip(op(rows, fmt), getattr(twin, op.__name__)(rows, fmt), strict=True):
        assert_equal(got, wanted)
