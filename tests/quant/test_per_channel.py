"""What is special about the per-channel casts: gathered rows, requantisation, one group of all rows, the transpose."""

import pytest
import torch
from tile_kernels.torch.per_channel_cast_fused import per_channel_cast_fused

from tile_kernels import ArgumentError, QuantFormat, QuantTensor, knobs, quant
from tile_kernels.core.launch import forced_config
from tile_kernels.quant.per_channel_cast import per_channel_cast
from tile_kernels.quant.per_channel_cast_and_transpose import per_channel_cast_and_transpose
from tile_kernels.quant.per_channel_recast import per_channel_recast
from tile_kernels.reference import quant as twin
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.testing.poison import poisoned

NAN, INF = float('nan'), float('inf')


def parse(name: str) -> QuantFormat:
    return QuantFormat.parse(name)


def assert_same(y: QuantTensor, expected: QuantTensor) -> None:
    assert_equal(y.data, expected.data)
    assert_equal(y.sf, expected.sf)


def kernel(op, *args):
    with knobs(interpret=True):
        return op(*args)


def test_rows_that_do_not_exist_are_zeros():
    """-1, rows past the end and the rows of the last tile that are no rows at all; none of them reads row 0."""
    x = torch.full((3, 40), 5.0)
    rows = torch.tensor([2, -1, 3, 1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    y = kernel(per_channel_cast.call, x, parse('e4m3_32x1_f32'), rows)
    assert y.data.float()[:, 0].tolist() == [448, 0, 0, 448, 0, 0]
    assert_same(y, twin.per_channel_cast(x, parse('e4m3_32x1_f32'), rows))
    empty = kernel(per_channel_cast.call, x, parse('e4m3_128x1_f32'), torch.full((130,), -1, dtype=torch.int32))
    assert bool((empty.sf == torch.tensor(1e-4) / 448).all()) and not empty.data.float().any()


@pytest.mark.parametrize('name', ['e4m3_128x1_f32', 'e4m3_32x1_f32'])
def test_a_last_group_uses_only_its_own_rows(name):
    fmt, x = parse(name), torch.randn(150, 24)
    y = kernel(per_channel_cast.call, x, fmt)
    first = 150 // fmt.sf_block[0] * fmt.sf_block[0]
    assert torch.equal(y.sf[-1], x[first:].abs().amax(0) / torch.full((24,), 448.0))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('num_tokens', [1, 128, 300])  # one pass, one pass, two passes
def test_one_group_of_all_rows_spans_tiles(num_tokens, dtype):
    x = torch.randn(num_tokens, 130).to(dtype)
    x[:, 7], x[0, 8], x[0, 9] = 0, NAN, INF
    y = kernel(per_channel_cast.call, x, parse('e4m3_allx1_f32'))
    assert_same(y, twin.per_channel_cast(x, parse('e4m3_allx1_f32')))
    assert y.sf.shape == (1, 130)


@pytest.mark.parametrize('num_tokens', [1, 33, 130, 161])
def test_packed_factors_hold_four_groups_of_a_channel(num_tokens):
    x = torch.randn(num_tokens, 20) * torch.exp2(torch.arange(num_tokens) // 32).unsqueeze(1)
    y = kernel(per_channel_cast.call, x, parse('e4m3_32x1_ue8m0x4'))
    exponents = twin.per_channel_cast(x, parse('e4m3_32x1_f32p2')).sf.view(torch.int32) >> 23
    for group in range(4 * y.sf.shape[0]):
        byte = y.sf[group // 4] >> 8 * (group % 4) & 0xFF
        assert torch.equal(byte, exponents[group] if group < len(exponents) else torch.zeros_like(byte))


@pytest.mark.parametrize(('rows', 'num_threads', 'panel'), [(8, 256, 3), (4, 512, 1), (4, 128, 2)])
def test_every_tile_gives_the_same(rows, num_threads, panel):
    x = torch.randn(70, 300).bfloat16()
    with forced_config(rows=rows, num_threads=num_threads, resident_threads=512, row_lanes=16, lane=8, panel=panel):
        y = kernel(per_channel_cast.call, x, parse('e4m3_32x1_f32'))
    assert_same(y, twin.per_channel_cast(x, parse('e4m3_32x1_f32')))


@pytest.mark.parametrize(('row_lanes', 'num_threads', 'lane'), [(16, 256, 8), (16, 256, 16), (8, 128, 16)])
@pytest.mark.parametrize('hidden', [300, 296, 512])
def test_every_lane_gives_the_same(row_lanes, num_threads, lane, hidden):
    x = twin.per_token_cast(torch.randn(70, hidden), parse('e4m3_1x32_f32'))
    rows = torch.randint(-1, 70, (150,), dtype=torch.int32)
    with forced_config(rows=8, num_threads=num_threads, resident_threads=512, row_lanes=row_lanes, lane=lane, panel=2):
        y = kernel(per_channel_recast, x, parse('e4m3_128x1_f32'), rows)
    assert_same(y, twin.per_channel_recast(x, parse('e4m3_128x1_f32'), rows))


@pytest.mark.parametrize(
    'source', ['e4m3_1x128_f32', 'e4m3_1x32_f32_col', 'e5m2_1x64_ue8m0x4', 'e4m3_1x32_ue8m0x4_col']
)
@pytest.mark.parametrize('gathered', [False, True])
def test_requantising_is_dequantising_and_quantising(source, gathered):
    x = twin.per_token_cast(torch.randn(50, 136), parse(source))
    rows = torch.randint(-1, 50, (70,), dtype=torch.int32) if gathered else None
    y = kernel(per_channel_recast, x, parse('e4m3_32x1_f32'), rows)
    spread = (
        twin.cast_back(x, 'fp32', (1, x.fmt.sf_block[1])) if 'e5m2' not in source else twin.dequantize(x, torch.float32)
    )
    assert_same(y, twin.per_channel_cast(spread, parse('e4m3_32x1_f32'), rows))


@pytest.mark.parametrize('num_tokens', [16, 3, 40, 132, 134, 271])  # aligned; in parts; every shift of whole tiles
@pytest.mark.parametrize('name', ['e4m3_128x1_f32', 'e4m3_32x1_ue8m0x4'])
def test_the_transpose_is_that_of_the_cast(num_tokens, name):
    x = torch.randn(num_tokens, 137).bfloat16()
    y, y_sf = kernel(per_channel_cast_and_transpose.call, x, parse(name))
    plain = twin.per_channel_cast(x, parse(name))
    assert y.shape == (137, num_tokens) and y.is_contiguous()
    assert torch.equal(y.view(torch.uint8), plain.data.view(torch.uint8).t())
    assert_equal(y_sf, plain.sf)


@pytest.mark.parametrize(('row_lanes', 'blocks'), [(8, 1), (16, 1), (8, 3)])  # one strip of many tiles, three
@pytest.mark.parametrize(('num_tokens', 'ahead'), [(1063, True), (1063, False), (1040, True), (640, False)])
def test_transposed_strips_of_every_shape_give_the_same(row_lanes, blocks, num_tokens, ahead):
    x = torch.randn(num_tokens, 40).bfloat16()
    with forced_config(row_lanes=row_lanes, resident_threads=512, blocks=blocks, ahead=ahead):
        y, y_sf = kernel(per_channel_cast_and_transpose.call, x, parse('e4m3_128x1_f32'))
    plain = twin.per_channel_cast(x, parse('e4m3_128x1_f32'))
    assert torch.equal(y.view(torch.uint8), plain.data.view(torch.uint8).t())
    assert_equal(y_sf, plain.sf)


def test_rows_may_be_strided_and_start_anywhere():
    memory = torch.randn(40 * 131 + 1)
    x = memory[1:].as_strided((40, 96), (131, 1))
    assert_same(
        kernel(per_channel_cast.call, x, parse('e4m3_32x1_f32')),
        twin.per_channel_cast(x.clone(), parse('e4m3_32x1_f32')),
    )


@pytest.mark.parametrize('gathered', [False, True])
def test_no_rows_give_empty_results(gathered):
    rows = torch.empty(0, dtype=torch.int32) if gathered else None
    y = kernel(per_channel_cast.call, torch.randn(3 if gathered else 0, 64), parse('e4m3_128x1_f32'), rows)
    assert y.data.shape == (0, 64) and y.sf.shape == (0, 64)
    packed = parse('e4m3_128x1_ue8m0x4')
    for cast in (per_channel_cast.call, lambda *args: kernel(per_channel_cast.call, *args)):
        assert cast(torch.randn(0, 64), packed).sf.shape == (0, 64)


# TileKernels' arguments ---------------------------------------------------------------------


@pytest.mark.parametrize('round_sf', [False, True])
def test_arguments_name_a_format(round_sf):
    x, rows = torch.randn(128, 128), torch.randint(-1, 128, (144,), dtype=torch.int32)
    expected = twin.cast(x, 'e4m3', (128, 1), round_sf=round_sf)
    assert_same(quant.per_channel_cast(x, 'e4m3', 128, round_sf), expected)
    turned, sf = quant.per_channel_cast_and_transpose(x, 'e4m3', 128, round_sf)
    assert_equal(sf, expected.sf)
    assert torch.equal(turned.t().float(), expected.data.float())
    gathered = torch.where(rows[:, None] >= 0, x[rows.clamp(min=0).long()], 0.0)
    assert_same(
        quant.per_channel_cast_fused(x, 'e4m3', 128, round_sf, pos_to_token=rows),
        twin.cast(gathered, 'e4m3', (128, 1), round_sf=round_sf),
    )
    pair = tuple(twin.per_token_cast(x, parse('e4m3_1x128_f32')))
    assert_same(
        quant.per_channel_cast_fused(pair, 'e4m3', 128, round_sf, 128, rows),
        quant.per_channel_cast_fused(twin.cast_back(pair, 'fp32', (1, 128)), 'e4m3', 128, round_sf, None, rows),
    )
    packed = quant.per_channel_cast(x, 'e4m3', 32, True, use_packed_ue8m0=True)
    assert packed.sf.shape == (1, 128) and packed.sf.dtype == torch.int32


def test_the_reference_of_the_gathered_cast_has_its_own_argument_order():
    x, rows = torch.randn(40, 128), torch.randint(-1, 40, (48,), dtype=torch.int32)
    pair = tuple(twin.per_token_cast(x, parse('e4m3_1x128_f32')))
    for source, channels in ((x, None), (pair, 128)):
        expected = quant.per_channel_cast_fused(source, 'e4m3', 128, True, channels, rows)
        assert_same(per_channel_cast_fused(source, 128, channels, True, rows), expected)


def test_friendly_fp8():
    x = torch.randn(200, 33)
    x_fp8, scale = quant.per_channel_cast_fp8(x)
    assert_equal(scale, twin.per_channel_cast_fp8(x)[1])
    assert (x_fp8.dtype, scale.shape) == (torch.float8_e4m3fn, (1, 33))
    assert bool(((x_fp8.float() * scale - x).abs() <= x.abs() / 16 + 1e-4 * x.abs().amax(0)).all())
    assert quant.per_channel_cast_fp8(x, group_size=128)[1].shape == (2, 33)


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda x: quant.per_channel_cast(x, 'e4m3', 64), 'num_per_tokens must be one of 32, 128, got 64'),
        (lambda x: quant.per_channel_cast(x, 'e4m3', 128.0), 'num_per_tokens must be one of 32, 128, got 128.0'),
        (lambda x: quant.per_channel_cast(x, 'e2m1', 128), "fmt must be one of e4m3, e5m2, got 'e2m1'"),
        (lambda x: quant.per_channel_cast((x, x), 'e4m3', 128), 'num_per_channels must be given'),
        (lambda x: quant.per_channel_cast(x, 'e4m3', 128, use_packed_ue8m0=True), 'use_packed_ue8m0 must come with'),
        (lambda x: quant.per_channel_cast_fused(x, 'e4m3', 128, pos_to_token=x), r'pos_to_token must be \(num_rows\)'),
        (lambda x: quant.per_channel_cast_fp8(x, 64), 'group_size must be one of None, 32, 128, got 64'),
    ],
)
def test_wrong_arguments_are_told_in_one_sentence(call, sentence):
    with pytest.raises(ArgumentError, match=f'^quant.per_channel_cast.*: .*{sentence}'):
        call(torch.randn(4, 64))


@pytest.mark.parametrize('num_tokens', [1, 31, 32, 33, 65, 96, 97, 129])
def test_bytes_of_groups_that_do_not_exist_are_zero(num_tokens):
    """A word has the factors of four groups of rows."""
    fmt, x = parse('e4m3_32x1_ue8m0x4'), torch.randn(num_tokens, 24)
    with poisoned():
        y, sf = kernel(per_channel_cast_and_transpose.call, x, fmt)
    expected, expected_sf = twin.per_channel_cast_and_transpose(x, fmt)
    assert_equal(y, expected)
    assert_equal(sf, expected_sf)
    groups = -(-num_tokens // 32)
    found = sf.contiguous().view(torch.uint8).view(sf.shape[0], 24, 4).transpose(1, 2).reshape(-1, 24)
    assert found[:groups].all() and not found[groups:].any()
