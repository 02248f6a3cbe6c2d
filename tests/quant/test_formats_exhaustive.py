"""Every bf16 number through every data format, and every exponent byte: the reference against a search over all codes.

The oracle knows only what the codes of a format mean: it measures the distance from a number to each of them.
"""

import pytest
import torch

from tile_kernels import QuantFormat, knobs
from tile_kernels.quant.per_token_cast import per_token_cast
from tile_kernels.quant.per_token_cast_with_precomputed_sf import per_token_cast_with_precomputed_sf
from tile_kernels.quant.per_token_cast_with_sf_only import per_token_cast_with_sf_only
from tile_kernels.testing.numeric import assert_equal

GROUP = 128
DATA = ('e4m3', 'e5m2', 'e2m1')


def all_bf16() -> torch.Tensor:
    """The 2^16 bf16 numbers as rows of one group."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    return bits.view(torch.bfloat16).view(-1, GROUP)


def magnitudes(data: str) -> torch.Tensor:
    """The finite magnitudes of a format in the order of their codes."""
    if data == 'e2m1':
        return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
    codes = torch.arange(128, dtype=torch.uint8).view(QuantFormat.parse(f'{data}_1x128_f32').data.torch)
    values = codes.double()
    return values[values.isfinite()]


def nearest_code(v: torch.Tensor, data: str, negative: torch.Tensor | None = None) -> torch.Tensor:
    """Code of the nearest magnitude, of two equally near ones the even code; NaN as the ops document it."""
    table = magnitudes(data)
    distance = (v.double().abs().clamp(max=table[-1].item()).unsqueeze(-1) - table).abs()
    near = distance == distance.amin(dim=-1, keepdim=True)
    even = near & (torch.arange(len(table)) % 2 == 0)
    code = torch.where(even.any(-1, keepdim=True), even, near).to(torch.uint8).argmax(dim=-1)
    negative = v.signbit() if negative is None else negative
    if data == 'e2m1':
        return (torch.where(v.isnan(), 7, code) + 8 * negative).to(torch.uint8)
    return torch.where(v.isnan(), 0x7F, code + 128 * negative).to(torch.uint8)


def codes_of(stored: torch.Tensor, data: str) -> torch.Tensor:
    """One code per element of a data tensor."""
    stored = stored.view(torch.uint8)
    return torch.stack((stored & 15, stored >> 4), -1).flatten(-2) if data == 'e2m1' else stored


@pytest.fixture(params=['twin', 'kernel'])
def implementation(request):
    with knobs(interpret=request.param == 'kernel'):
        yield request.param


@pytest.mark.parametrize('data', DATA)
@pytest.mark.parametrize('sf', ['f32', 'ue8m0x4'])
def test_every_bf16_number_takes_the_nearest_code(data, sf, implementation):
    fmt, x = QuantFormat.parse(f'{data}_1x128_{sf}'), all_bf16()
    ones = torch.ones(len(x), 1) if sf == 'f32' else torch.full((len(x), 1), 127, dtype=torch.int32)
    y = per_token_cast_with_precomputed_sf.call(x, ones, fmt)
    assert torch.equal(codes_of(y, data), nearest_code(x, data))


@pytest.mark.parametrize('data', DATA)
@pytest.mark.parametrize('dtype', [torch.float16, torch.float32])
def test_ties_and_their_neighbours_in_wider_types(data, dtype, implementation):
    table = magnitudes(data)
    middles = ((table[1:] + table[:-1]) / 2).to(dtype)
    middles = middles[(middles > 0) & middles.isfinite()]
    x = torch.cat([middles, middles.nextafter(middles + 1), middles.nextafter(middles - 1)])
    x = torch.cat([x, -x])
    x = torch.nn.functional.pad(x, (0, -len(x) % GROUP)).view(-1, GROUP)
    y = per_token_cast_with_precomputed_sf.call(x, torch.ones(len(x), 1), QuantFormat.parse(f'{data}_1x128_f32'))
    assert torch.equal(codes_of(y, data), nearest_code(x, data))


def exact_amax(x: torch.Tensor, fmt: QuantFormat) -> torch.Tensor:
    """What the group of each row is scaled by: NaN does not count, the floor and the largest float bound it."""
    amax = torch.where(x.isnan(), 0.0, x.double().abs()).amax(1, keepdim=True)
    return amax.clamp(torch.tensor(fmt.amax_floor).double(), torch.finfo(torch.float32).max)


@pytest.mark.parametrize('data', DATA)
@pytest.mark.parametrize('sf', ['f32', 'f32p2', 'ue8m0x4', 'e4m3'])
def test_every_bf16_number_scaled_by_its_group(data, sf, implementation):
    """Groups of 128 neighbouring numbers of one exponent: each scale factor that bf16 can call for."""
    fmt, x = QuantFormat.parse(f'{data}_1x128_{sf}'), all_bf16()
    y, amax = per_token_cast.call(x, fmt), exact_amax(x, fmt)
    if sf == 'f32':
        factor, inverse = (amax / fmt.data.max).float(), (fmt.data.max / amax).float()
    elif sf == 'e4m3':
        code = nearest_code((amax / fmt.data.max).float(), 'e4m3')
        factor, inverse = code.view(torch.float8_e4m3fn), 1 / code.view(torch.float8_e4m3fn).float()
    else:
        exponent = torch.log2(amax / fmt.data.max).ceil().int()
        factor = exponent + 127 if sf == 'ue8m0x4' else torch.exp2(exponent)
        inverse = torch.exp2(-exponent)
    assert_equal(y.sf, factor)
    assert torch.equal(codes_of(y.data, data), nearest_code(x.float() * inverse, data, x.signbit()))


def test_every_exponent_byte_is_produced_and_understood(implementation):
    exponents = torch.arange(-126, 128)
    powers = torch.exp2(exponents.double()).float()
    fmt = QuantFormat.parse('e2m1_1x16_ue8m0x4')
    x = torch.zeros(len(exponents), 16)
    x[:, 3] = powers
    y = per_token_cast.call(x, fmt)
    expected = (exponents - 2).clamp(min=-126) + 127  # 2^e / 6 lies above 2^(e-3)
    assert torch.equal(y.sf[:, 0], expected.int())

    bytes_ = torch.arange(255, dtype=torch.int32)
    factors = torch.exp2(bytes_.double() - 127)
    x = (factors.unsqueeze(1) * torch.tensor([0.0, 0.5, 1.0, 1.5] * 4)).float()
    stored = per_token_cast_with_precomputed_sf.call(x, bytes_.unsqueeze(1), fmt)
    assert torch.equal(codes_of(stored, 'e2m1'), torch.tensor([0, 1, 2, 3] * 4, dtype=torch.uint8).expand(255, 16))


@pytest.mark.parametrize('data', DATA)
def test_power_of_two_factors_are_the_least_that_fit(data, implementation):
    """All mantissas around the largest number of the format: ceil(log2(amax / max)) without rounding errors."""
    top = torch.tensor(QuantFormat.parse(f'{data}_1x16_f32p2').data.max)
    near = (top.view(torch.int32) + torch.arange(-(2**12), 2**12, dtype=torch.int32)).view(torch.float32)
    x = torch.nn.functional.pad(near.unsqueeze(1), (0, 15))
    sf = per_token_cast_with_sf_only.call(x, QuantFormat.parse(f'{data}_1x16_f32p2'))[:, 0]
    assert torch.equal(sf, torch.where(near > top, 2.0, 1.0))
