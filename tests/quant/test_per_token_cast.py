"""What is special about the per-token casts: layouts, tails, strides, numbers that are not finite, flags, errors."""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, QuantTensor, knobs, quant
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import forced_config, launch
from tile_kernels.device.scales import amax_to_sf
from tile_kernels.quant.dequantize import dequantize
from tile_kernels.quant.per_token_cast import per_token_cast
from tile_kernels.quant.per_token_cast_kernels import per_token_cast_row_kernel
from tile_kernels.quant.per_token_cast_with_precomputed_sf import per_token_cast_with_precomputed_sf
from tile_kernels.quant.per_token_cast_with_sf_only import per_token_cast_with_sf_only
from tile_kernels.quant.per_token_recast import per_token_recast
from tile_kernels.quant.per_token_recast_with_precomputed_sf import per_token_recast_with_precomputed_sf
from tile_kernels.reference import quant as twin
from tile_kernels.testing.numeric import assert_equal, check_bias

NAN, INF = float('nan'), float('inf')


def parse(name: str) -> QuantFormat:
    return QuantFormat.parse(name)


def assert_same(y: QuantTensor, expected: QuantTensor) -> None:
    assert_equal(y.data, expected.data)
    assert_equal(y.sf, expected.sf)


def assert_kernel_is_twin(x: torch.Tensor, name: str, amax_floor: float | None = None) -> QuantTensor:
    fmt = parse(name)
    expected = twin.per_token_cast(x, fmt, amax_floor)
    with knobs(interpret=True):
        assert_same(per_token_cast.call(x, fmt, amax_floor), expected)
        assert_equal(per_token_cast_with_sf_only.call(x, fmt, amax_floor), expected.sf)
        assert_equal(
            per_token_cast_with_precomputed_sf.call(x, expected.sf, fmt),
            twin.per_token_cast_with_precomputed_sf(x, expected.sf, fmt),
        )
    return expected


# Layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('name', 'shape', 'stride', 'dtype'),
    [
        ('e4m3_1x128_f32', (5, 3), (3, 1), torch.float32),
        ('e4m3_1x128_f32_col', (5, 3), (1, 8), torch.float32),
        ('e4m3_1x128_ue8m0x4', (5, 1), (1, 1), torch.int32),
        ('e4m3_1x32_ue8m0x4_col', (5, 3), (1, 8), torch.int32),
        ('e2m1_1x16_e4m3_col', (5, 19), (1, 16), torch.float8_e4m3fn),
        ('e4m3_1xall_f32', (5, 1), (1, 1), torch.float32),
    ],
)
def test_scale_factors_have_the_layout_of_the_format(name, shape, stride, dtype):
    sf = per_token_cast.call(torch.randn(5, 300), parse(name)).sf
    assert (sf.shape, sf.stride(), sf.dtype) == (shape, stride, dtype)


def test_packed_bytes_are_in_channel_order_and_missing_groups_are_zero():
    x = torch.full((2, 5 * 32), 448.0)
    x[:, 32:64] = 2 * 448.0
    for name in ('e4m3_1x32_ue8m0x4', 'e4m3_1x32_ue8m0x4_col'):
        sf = assert_kernel_is_twin(x, name).sf
        assert [hex(word) for word in sf[1].tolist()] == ['0x7f7f807f', '0x7f']


def test_the_even_channel_is_in_the_lower_nibble():
    x = torch.tensor([[0.5, 6.0] + [0.0] * 14])
    assert assert_kernel_is_twin(x, 'e2m1_1x16_f32').data[0, 0].item() == 0x71


@pytest.mark.parametrize('name', ['e4m3_1x64_f32', 'e2m1_1x32_f32', 'e4m3_1xall_f32', 'e5m2_1x128_f32p2'])
def test_what_comes_back_is_near_what_went_in(name):
    x, fmt = torch.randn(64, 320), parse(name)
    back = twin.cast_back(per_token_cast.call(x, fmt), 'fp32', (1, fmt.sf_block[1]))
    step = {'e4m3': 2**-4, 'e5m2': 2**-3, 'e2m1': 2**-2}[fmt.data.name]
    amax = x.abs().amax(1, keepdim=True)
    assert bool(((back - x).abs() <= step * x.abs() + 0.1 * amax * (fmt.data.name == 'e2m1') + 1e-4 * amax).all())


# Shapes and strides -------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['e4m3_1x128_f32', 'e2m1_1x32_ue8m0x4_col', 'e2m1_1xall_f32'])
def test_a_tail_group_uses_only_its_own_channels(name):
    x = torch.randn(3, 200)
    expected = assert_kernel_is_twin(x, name)
    if 'all' not in name:
        group = parse(name).sf_block[1]
        first = 200 // group * group
        alone = twin.per_token_cast(x[:, first:], parse(name))
        assert torch.equal(expected.data[:, -alone.data.shape[1] :].view(torch.uint8), alone.data.view(torch.uint8))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(('pitch', 'offset'), [(256, 0), (131, 0), (130, 1), (136, 4)])
def test_rows_may_be_strided_and_start_anywhere(dtype, pitch, offset):
    memory = torch.randn(4 * pitch + offset).to(dtype)
    x = memory[offset:].as_strided((4, 128), (pitch, 1))
    expected = assert_kernel_is_twin(x, 'e4m3_1x64_f32')
    assert_same(expected, twin.per_token_cast(x.clone(), parse('e4m3_1x64_f32')))


@pytest.mark.parametrize('name', ['e4m3_1x128_f32', 'e4m3_1x32_ue8m0x4_col', 'e2m1_1xall_f32'])
def test_no_rows_give_empty_results(name):
    with knobs(interpret=True):
        y = per_token_cast.call(torch.empty(0, 256, dtype=torch.bfloat16), parse(name))
    assert y.shape == (0, 256)
    assert y.sf.shape == parse(name).sf_shape(0, 256)


@pytest.mark.parametrize('name', ['e2m1_1x32_f32', 'e2m1_1x32_f32_col', 'e4m3_1x16_ue8m0x4', 'e4m3_1x128_e4m3'])
@pytest.mark.parametrize('vectors', [2, 4, 8])
@pytest.mark.parametrize('hidden', [144, 1024, 1536])  # vectors of a lane in neighbouring rows, along its row, both
def test_every_number_of_vectors_per_lane_gives_the_same(name, vectors, hidden):
    x = torch.randn(11, hidden).bfloat16()
    with forced_config(vectors=vectors, num_threads=128):
        assert_kernel_is_twin(x, name)


@pytest.mark.parametrize('vectors', [1, 2, 4, 8])
def test_every_number_of_vectors_per_thread_gives_the_same(vectors):
    with forced_config(vectors=vectors):
        assert_kernel_is_twin(torch.randn(3, 1032).bfloat16(), 'e4m3_1xall_f32')


def test_a_row_too_long_for_registers_is_read_twice():
    with forced_config(vectors=1):
        x = torch.randn(2, 1024 * 8 + 24)
        assert per_token_cast_row_kernel.tir(x.shape[1], parse('e4m3_1xall_f32'), x.dtype, 16, 'cast', vectors=1)
        assert_kernel_is_twin(x, 'e4m3_1xall_f32')


# Numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    'name', ['e4m3_1x16_f32', 'e5m2_1x16_f32p2', 'e2m1_1x16_f32', 'e2m1_1x16_f32p2', 'e2m1_1x16_e4m3']
)
def test_nan_and_inf_do_what_the_docstring_says(name, dtype):
    x = torch.ones(4, 16).to(dtype)
    x[0, 3], x[0, 4] = NAN, -NAN
    x[1, 3], x[1, 4] = INF, -INF
    x[2] = NAN
    x[3, 5] = -0.0
    y = assert_kernel_is_twin(x, name)
    clean = per_token_cast.call(torch.ones(1, 16).to(dtype), parse(name))
    assert torch.equal(y.sf[0].view(torch.uint8), clean.sf[0].view(torch.uint8)), 'a NaN moves no scale factor'
    assert bool(y.sf.float().isfinite().all())
    if parse(name).data.name == 'e2m1':
        codes = torch.stack((y.data & 15, (y.data >> 4) & 15), -1).flatten(-2)
        assert codes[0, 3] == 7 and codes[1, 3:5].tolist() == [7, 15] and codes[3, 5] == 8
    else:
        assert y.data.view(torch.uint8)[0, 3:5].tolist() == [0x7F, 0x7F] and bool(y.data[2].float().isnan().all())
        assert y.data[1, 3:5].float().tolist() == [y.fmt.data.max, -y.fmt.data.max]
        assert y.data.view(torch.uint8)[3, 5] == 0x80


@pytest.mark.parametrize('name', ['e4m3_1x32_f32', 'e2m1_1x32_f32', 'e2m1_1x32_f32p2'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_subnormal_and_huge_groups(name, dtype):
    x = torch.randn(6, 32) * torch.tensor([1e-40, 1e-38, 1e-30, 1e30, 1e38, 3e38]).unsqueeze(1)
    assert_kernel_is_twin(x.to(dtype), name)


@kernel()
def scale_factor_kernel(fmt: QuantFormat):
    count = T.dynamic('count')

    @T.prim_func
    def scale_factor(
        amax: T.Tensor((count,), T.float32),
        sf: T.Tensor((count,), T.dtype(fmt.sf_dtype)),
        sf_inv: T.Tensor((count,), T.float32),
    ):
        with T.Kernel(T.ceildiv(count, 128), threads=128) as pid:
            at = pid * 128 + T.get_thread_binding()
            if at < count:
                amax_to_sf(amax[at], fmt, sf, sf_inv, at)

    return scale_factor


@pytest.mark.parametrize('data', ['e4m3', 'e5m2', 'e2m1', 'e5m6'])
@pytest.mark.parametrize('sf_name', ['f32', 'e4m3'])
def test_the_short_divisions_are_ieee_divisions(data, sf_name):
    """All significands on a GPU, whose approximate reciprocal is its own; a sample of the bits elsewhere."""
    fmt, on_gpu = parse(f'{data}_1x128_{sf_name}'), torch.cuda.is_available()
    top, floor = fmt.data.max, max(fmt.amax_floor if sf_name == 'e4m3' else 0.0, fmt.data.max * 2.0**-126)
    lowest, highest = (torch.tensor(value).view(torch.int32).item() for value in (floor, torch.finfo().max))
    significands = torch.arange(2**23, dtype=torch.int32) if on_gpu else torch.randint(2**23, (2**14,)).int()
    exponents = torch.randint(lowest >> 23, (highest >> 23) + 1, significands.shape).int()
    amax = ((exponents << 23) + significands).clamp(lowest, highest).view(torch.float32)
    amax[:2] = torch.tensor([floor, torch.finfo().max])
    given = amax.cuda() if on_gpu else amax
    sf, sf_inv = torch.empty_like(given, dtype=fmt.sf_dtype), torch.empty_like(given)
    with knobs(interpret=True):
        launch(scale_factor_kernel, (fmt,), given, sf, sf_inv)
    expected = (amax / top).clamp(max=448.0).to(fmt.sf_dtype) if sf_name == 'e4m3' else amax / top
    assert_equal(sf.cpu(), expected)
    numerator = torch.full_like(amax, 1.0 if sf_name == 'e4m3' else top)
    assert_equal(sf_inv.cpu(), numerator / (expected.float() if sf_name == 'e4m3' else amax))


def test_zeros_have_the_smallest_scale_factor():
    y = assert_kernel_is_twin(torch.zeros(1, 128), 'e4m3_1x128_f32p2')
    assert y.sf.item() == 2.0**-22
    assert assert_kernel_is_twin(torch.zeros(1, 128), 'e2m1_1x128_f32p2').sf.item() == 2.0**-126


def test_the_floor_is_a_runtime_value():
    x, fmt = torch.full((2, 128), 0.5).bfloat16(), parse('e4m3_1x128_f32')
    assert assert_kernel_is_twin(x, fmt.name, amax_floor=7.0).sf[0, 0].item() == 7.0 / 448.0
    launches = [per_token_cast.trace(x, fmt, floor)[0] for floor in (None, 7.0, 9.0)]
    assert len({launch.static for launch in launches}) == 1
    with pytest.raises(ArgumentError, match='amax_floor must be at least'):
        per_token_cast.call(x, fmt, 0.0)


def test_tokens_and_strides_are_no_compile_keys():
    memory, fmt = torch.randn(64, 1024).bfloat16(), parse('e4m3_1x128_ue8m0x4_col')
    views = (memory[:5, :256], memory[:7, 256:512], memory.view(128, 512)[:9, :256])
    assert len({per_token_cast.trace(x, fmt)[0].static for x in views}) == 1


def test_given_e4m3_factors_need_no_flag():
    x = torch.randn(3, 64)
    y = quant.per_token_cast(x, 'e2m1', 16, use_e4m3_sf=True)
    for flags in ({}, dict(use_e4m3_sf=True)):
        assert_equal(quant.per_token_cast_with_precomputed_sf(x, 'e2m1', 16, y.sf, **flags), y.data)


def test_given_factors_need_not_be_powers_of_two():
    """The packed fp4 path multiplies by powers of two only; float32 factors from a caller may be anything."""
    x, sf = torch.randn(4, 64).bfloat16(), torch.rand(4, 2) + 0.1
    fmt = parse('e2m1_1x32_f32p2')
    with knobs(interpret=True):
        assert_equal(
            per_token_cast_with_precomputed_sf.call(x, sf, fmt), twin.per_token_cast_with_precomputed_sf(x, sf, fmt)
        )


# TileKernels' flags -------------------------------------------------------------------------


@pytest.mark.parametrize('fmt', ['e4m3', 'e2m1'])
@pytest.mark.parametrize('num_per_channels', [32, 128, 320])
@pytest.mark.parametrize(
    'flags', [(False, False, False), (False, True, False), (True, True, True), (False, True, True)]
)
def test_flags_name_a_format(fmt, num_per_channels, flags):
    x = torch.randn(9, 320)
    y = quant.per_token_cast(x, fmt, num_per_channels, None, *flags)
    expected = twin.cast(
        x,
        fmt,
        (1, num_per_channels),
        round_sf=flags[1],
        use_tma_aligned_col_major_sf=flags[0],
        use_packed_ue8m0=flags[2],
    )
    assert_same(y, expected)
    sf_only = quant.per_token_cast_with_sf_only(x, fmt, num_per_channels, x_block_size=None, round_sf=flags[1])
    data = quant.per_token_cast_with_precomputed_sf(
        x, fmt, num_per_channels, sf_only, x_block_size=None, round_sf=flags[1]
    )
    assert_equal(data, expected.data)
    assert_equal(data, twin.cast(x, fmt, (1, num_per_channels), sf=sf_only))


def test_a_whole_format_replaces_the_flags():
    x = torch.randn(3, 128)
    assert_same(quant.per_token_cast(x, 'e4m3_1x128_f32'), quant.per_token_cast(x, 'e4m3', 128))
    assert_same(quant.per_token_cast(x, parse('e4m3_1x128_f32')), quant.per_token_cast(x, 'e4m3', 128))


def test_results_can_be_written_to_given_tensors():
    x, fmt = torch.randn(3, 128), parse('e4m3_1x32_f32')
    expected, out = per_token_cast.call(x, fmt), fmt.empty(3, 128, x.device)
    y = quant.per_token_cast(x, 'e4m3', 32, out=tuple(out))
    assert y.data.data_ptr() == out.data.data_ptr() and y.sf.data_ptr() == out.sf.data_ptr()
    assert_same(out, expected)
    sf, data = torch.empty_like(out.sf), torch.empty_like(out.data)
    quant.per_token_cast(x, 'e4m3', 32, None, False, False, False, False, False, (data, sf))  # all by position
    assert_equal(data, expected.data)
    assert quant.per_token_cast_with_sf_only(x, 'e4m3', 32, out_sf=sf) is sf
    assert quant.per_token_cast_with_precomputed_sf(x, 'e4m3', 32, sf, out=data) is data
    assert_equal(data, expected.data)
    with pytest.raises(ArgumentError, match=r'out\[0\] must be float8_e4m3fn\[3, 128\]'):
        quant.per_token_cast(x, 'e4m3', 32, out=(out.sf, out.sf))


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (
            dict(fmt='e4m3', num_per_channels=128, use_packed_ue8m0=True),
            'use_packed_ue8m0 must come with round_sf=True',
        ),
        (dict(fmt='e4m3', num_per_channels=128, use_e4m3_sf=True, round_sf=True), 'use_e4m3_sf must not be combined'),
        (dict(fmt='e3m2', num_per_channels=128), "fmt must be one of e4m3, e5m2, e2m1, e5m6, got 'e3m2'"),
        (
            dict(fmt=torch.float8_e4m3fn, num_per_channels=128),
            'fmt must be one of e4m3, e5m2, e2m1, e5m6, got torch.float8_e4m3fn',
        ),
        (dict(fmt='e4m3', num_per_channels=128.0), 'num_per_channels must be an integer, got float 128.0'),
        (dict(fmt='e4m3', num_per_channels=48), 'num_per_channels must be one of 16, 32, 64, 128, hidden, got 48'),
        (dict(fmt='e4m3_1x128_f32', num_per_channels=128), 'must be left out when fmt is a whole format'),
        (dict(fmt='e4m3_128x128_f32'), r'fmt.sf_block\[0\] must be 1, got 128'),
        (dict(fmt='e4m3_1x48_f32'), r'fmt.sf_block\[1\] must be one of'),
    ],
)
def test_wrong_formats_are_told_in_one_sentence(arguments, sentence):
    with pytest.raises(ArgumentError, match=f'^quant.per_token_cast: .*{sentence}'):
        quant.per_token_cast(torch.randn(2, 256), **arguments)


@pytest.mark.parametrize(
    ('x', 'sentence'),
    [
        (torch.randn(256), r'x must be \(num_tokens, hidden\), got float32\[256\]'),
        (torch.randn(2, 256, dtype=torch.float64), 'x must be bfloat16 or float16 or float32'),
        (torch.randn(256, 2).t(), 'x must have stride 1 in the last dimension'),
        (torch.randn(2, 0), 'hidden must be at least 1, got 0'),
        (None, 'x must be a tensor'),
    ],
)
def test_wrong_inputs_are_told_in_one_sentence(x, sentence):
    with pytest.raises(ArgumentError, match=f'^quant.per_token_cast: {sentence}'):
        quant.per_token_cast(x, 'e4m3_1x128_f32')


def test_an_odd_row_has_no_fp4_form():
    with pytest.raises(ArgumentError, match='hidden must be a multiple of 2, got 255'):
        quant.per_token_cast(torch.randn(2, 255), 'e2m1_1x32_f32')


@pytest.mark.parametrize(
    ('sf', 'sentence'),
    [
        (torch.ones(3, 2), 'sf_rows = 2'),
        (torch.ones(2, 1), 'sf_cols = 2'),
        (torch.ones(2, 2, dtype=torch.bfloat16), 'sf must be float32'),
        (torch.ones(2, 4)[:, ::2], 'sf must be contiguous'),
    ],
)
def test_given_factors_must_fit(sf, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        per_token_cast_with_precomputed_sf.call(torch.randn(2, 256), sf, parse('e4m3_1x128_f32'))
    with pytest.raises(ArgumentError, match='sf must be column-major'):
        per_token_cast_with_precomputed_sf.call(torch.randn(2, 256), torch.ones(2, 2), parse('e4m3_1x128_f32_col'))


# Quantised input ----------------------------------------------------------------------------


def assert_recast_is_twin(x: QuantTensor, name: str, stochastic: bool = False) -> QuantTensor:
    fmt = parse(name)
    expected = twin.per_token_recast(x, fmt, None, stochastic)
    with knobs(interpret=True):
        assert_same(per_token_recast(x, fmt, None, stochastic), expected)
    return expected


@pytest.mark.parametrize(('source', 'fmt'), [('e4m3', 'e2m1'), ('e2m1', 'e4m3')])
@pytest.mark.parametrize('block', [(1, 32), (32, 32), (128, 128), (1, 320)])
def test_a_pair_is_quantised_again(source, block, fmt):
    """Upstream's own test: powers of two in every layout, so that the order of the factors does not matter."""
    x = torch.randn(37, 320) * torch.exp2(torch.arange(37) % 9).unsqueeze(1)
    for layout in ((False, True, False), (True, True, False), (True, True, True), (False, True, True)):
        col, rounded, packed = layout
        flags = dict(round_sf=rounded, use_tma_aligned_col_major_sf=col, use_packed_ue8m0=packed)
        pair = tuple(twin.cast(x, source, block, **flags))
        y = quant.per_token_cast(pair, fmt, 64, block, col, rounded, packed)
        assert_same(y, twin.cast(pair, fmt, (1, 64), x_block_size=block, **flags))
        assert_same(y, twin.cast(twin.cast_back(pair, 'fp32', block), fmt, (1, 64), **flags))
    with knobs(interpret=True):
        assert_same(quant.per_token_cast(pair, fmt, 64, block, col, rounded, packed), y)
        assert_equal(quant.per_token_cast_with_sf_only(pair, fmt, 64, block, col, rounded, packed), y.sf)
        sf = twin.cast(pair, fmt, (1, 64), x_block_size=block, round_sf=True).sf
        data = quant.per_token_cast_with_precomputed_sf(pair, fmt, 64, sf, block, round_sf=True)
        assert_equal(data, y.data)


@pytest.mark.parametrize('name', ['e4m3_1x32_e4m3', 'e5m2_1x64_f32', 'e2m1_1x16_e4m3', 'e4m3_40x8_f32_col'])
@pytest.mark.parametrize('target', ['e2m1_1x128_f32', 'e4m3_1xall_f32_col', 'e5m6_1x32_f32p2'])
def test_a_quantised_tensor_knows_its_format(name, target):
    x = (
        twin.cast(torch.randn(5, 72), *_blocked(name))
        if '40x8' in name
        else twin.per_token_cast(torch.randn(5, 72), parse(name))
    )
    x = QuantTensor(x.data, x.sf, name)
    assert_same(quant.per_token_cast(x, target), assert_recast_is_twin(x, target))


def test_what_is_said_of_a_quantised_tensor_must_be_its_format():
    x = torch.randn(5, 96)
    narrow, whole = quant.per_token_cast(x, 'e4m3', 32), quant.per_token_cast(x, 'e4m3', 96)
    expected = quant.cast_back(narrow, 'fp32')
    for y in (quant.cast_back(narrow, 'fp32', (1, 32)), quant.per_token_cast_back(narrow, 'fp32', 32)):
        assert_equal(y, expected)
    for columns in (96, 128):  # either is all of a row
        assert_equal(quant.cast_back(whole, 'fp32', (1, columns)), quant.cast_back(whole, 'fp32'))
    for sentence, call in {
        r'x_block_size must be the block of x \(e4m3_1x32_f32\) or be left out, got \(1, 64\)': lambda: (
            quant.per_token_cast(narrow, 'e4m3', 32, (1, 64))
        ),
        r'x_block_size must be the block of x .*, got \(32, 32\)': lambda: quant.cast_back(narrow, 'bf16', (32, 32)),
        'x_block_size must be two integers': lambda: quant.cast_back(narrow, 'bf16', 32),
        'num_per_channels must be the block of x': lambda: quant.per_token_cast_back(whole, 'bf16', 32),
        "x_special_fmt must be None for data of e4m3_1x32_f32, got 'e5m6'": lambda: quant.cast_back(
            narrow, 'bf16', x_special_fmt='e5m6'
        ),
    }.items():
        with pytest.raises(ArgumentError, match=sentence):
            call()


def _blocked(name: str) -> tuple:
    fmt = parse(name)
    return fmt.data.name, fmt.sf_block, None, None, False, fmt.col


@pytest.mark.parametrize('data', ['e4m3', 'e5m2', 'e2m1'])
def test_every_code_survives_being_cast_to_itself(data):
    fmt = parse(f'{data}_1x16_f32p2')
    codes = torch.arange(256, dtype=torch.uint8).view(-1, fmt.data.stored(16)).view(fmt.data.torch)
    x = QuantTensor(codes, torch.exp2(torch.arange(len(codes)).float() - 9).unsqueeze(1), fmt)
    with knobs(interpret=True):
        y = per_token_recast_with_precomputed_sf(x, x.sf, fmt)
    infinite = torch.isinf(codes.float()) if data == 'e5m2' else torch.zeros_like(codes.view(torch.uint8)).bool()
    nan = torch.isnan(codes.float()) if data != 'e2m1' else infinite
    kept = ~(infinite | nan)
    assert torch.equal(y.view(torch.uint8)[kept], codes.view(torch.uint8)[kept])
    assert bool((y.view(torch.uint8)[nan] == 0x7F).all())
    assert_equal(y, twin.per_token_recast_with_precomputed_sf(x, x.sf, fmt))


def test_zeros_stay_zeros_whatever_their_scale_factor():
    sf = torch.tensor([[1e30, 3e38], [1e-40, 1.0]])
    x = QuantTensor(torch.zeros(2, 64).to(torch.float8_e4m3fn), sf, 'e4m3_1x32_f32')
    for name in ('e4m3_1x32_f32', 'e2m1_1x32_f32', 'e2m1_1x64_f32p2'):
        y = assert_recast_is_twin(x, name)
        assert not bool(y.data.view(torch.uint8).any())


def test_factors_are_multiplied_before_the_code():
    """With factors that are no powers of two the order shows; upstream's kernels multiply the two factors first."""
    x = QuantTensor((torch.randn(64, 128) * 90).to(torch.float8_e4m3fn), torch.rand(64, 4) + 0.1, 'e4m3_1x32_f32')
    y = assert_recast_is_twin(x, 'e4m3_1x128_f32')
    amax = twin.dequantize(x, torch.float32).abs().amax(1, keepdim=True)
    factor = x.sf * torch.full_like(amax, 448.0).div(amax)
    v = x.data.float() * factor.repeat_interleave(32, 1)
    assert_equal(y.data, v.to(torch.float8_e4m3fn))


@pytest.mark.parametrize('vectors', [2, 4, 8])
@pytest.mark.parametrize('hidden', [144, 1024])
def test_every_number_of_vectors_recasts_the_same(vectors, hidden):
    x = twin.per_token_cast(torch.randn(11, hidden), parse('e2m1_1x16_ue8m0x4'))
    with forced_config(vectors=vectors, num_threads=128):
        assert_recast_is_twin(x, 'e4m3_1x64_f32')


@pytest.mark.parametrize(
    ('x', 'block', 'sentence'),
    [
        ((torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 2)), None, 'x_block_size must be given for a'),
        (torch.randn(2, 64), (1, 32), 'x_block_size must be None for a plain x'),
        (
            (torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 64)),
            (1, 1),
            r'x.fmt.sf_block\[1\] must be a multiple',
        ),
        ((torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 3)), (1, 32), 'x.sf must be .* with sf_cols = 2'),
        ((torch.zeros(2, 64), torch.ones(2, 2)), (1, 32), r'x\[0\].dtype must be one of'),
        ((torch.zeros(2, 64),), (1, 32), r'x must be a pair \(data, sf\)'),
    ],
)
def test_wrong_pairs_are_told_in_one_sentence(x, block, sentence):
    with pytest.raises(ArgumentError, match=f'^quant.per_token_cast: {sentence}'):
        quant.per_token_cast(x, 'e4m3', 32, block)


# Stochastic rounding ------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['e4m3_1x128_f32', 'e5m2_1x64_f32p2', 'e2m1_1x32_e4m3', 'e2m1_1xall_f32'])
def test_stochastic_rounding_loses_nothing_on_average(name):
    fmt = parse(name)
    x = torch.randn(100, 512) * 3
    with knobs(interpret=True):
        y = per_token_cast.call(x, fmt, None, True)
    assert_same(y, twin.per_token_cast(x, fmt, None, True))
    nearest = twin.per_token_cast(x, fmt)
    assert_equal(y.sf, nearest.sf)
    if fmt.sf != 'e4m3':  # rounded factors may be too small for the largest numbers, which saturate
        check_bias(twin.dequantize(y, torch.float32), x)
    step = {'e4m3': 2**-3, 'e5m2': 2**-2, 'e2m1': 2**-1}[fmt.data.name]
    scale = (
        twin.dequantize(QuantTensor(torch.ones_like(y.data), y.sf, fmt), torch.float32) if fmt.data.bits == 8 else None
    )
    if scale is not None:
        assert bool(((twin.dequantize(y, torch.float32) - x).abs() <= x.abs() * step + scale).all())


def test_numbers_that_a_format_holds_are_not_rounded():
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    for name in ('e2m1_1x16_f32p2', 'e4m3_1x16_f32p2', 'e5m2_1x16_f32p2'):
        with knobs(interpret=True):
            assert_same(
                quant.per_token_cast(numbers.view(1, 16), name, stochastic_cast=True),
                quant.per_token_cast(numbers.view(1, 16), name),
            )


def test_the_random_bits_are_those_of_the_specification():
    """The place of four numbers is their channel divided by four, whatever the row."""
    row = torch.rand(1, 128).clamp(min=0.01)
    row[0, 0] = 448.0
    with knobs(interpret=True):
        y = quant.per_token_cast(row.expand(3, 128), 'e4m3', 128, stochastic_cast=True)
    bits, mask = [int(b) for b in row[0].view(torch.int32)], 0xFFFFFFFF
    for q in (1, 9):
        words = zip(bits[4 * q : 4 * q + 4], (0x5671D42B, 0x9995E499, 0xACE1B8A5, 0xE153538D), strict=True)
        h = (sum(b * f for b, f in words) + q) & mask
        h = (h ^ h >> 23) * 0x7FEB352D & mask
        h = (h ^ h >> 16) * 0x846CA68B & mask
        h ^= h >> 11
        for e in range(4):
            random = (h << 8 * e | h >> 32 - 8 * e) & mask
            expected = (bits[4 * q + e] - (120 << 23) + (random >> 12)) >> 20
            assert y.data.view(torch.uint8)[:, 4 * q + e].tolist() == [expected] * 3


def test_stochastic_rounding_of_numbers_that_are_not_finite():
    x = torch.ones(1, 16)
    x[0, 1], x[0, 5], x[0, 9], x[0, 13] = NAN, INF, -INF, -NAN
    for name in ('e4m3_1x16_f32', 'e2m1_1x16_f32', 'e5m2_1x16_f32'):
        with knobs(interpret=True):
            y = quant.per_token_cast(x, name, stochastic_cast=True)
        top = parse(name).data.max
        codes = quant.unpack_from_e2m1fn_x2(y.data) if 'e2m1' in name else y.data.float()
        assert codes[0, [5, 9]].tolist() == [top, -top]
        if 'e2m1' in name:
            assert codes[0, [1, 13]].tolist() == [top, -top]
        else:
            assert y.data.view(torch.uint8)[0, [1, 13]].tolist() == [0x7F, 0x7F]


def test_e5m6_has_no_stochastic_rounding():
    with pytest.raises(ArgumentError, match='stochastic must be False for e5m6'):
        quant.per_token_cast(torch.randn(2, 64), 'e5m6', 64, stochastic_cast=True)


# torch.compile ------------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['e4m3_1x128_f32', 'e4m3_1x32_ue8m0x4_col', 'e2m1_1x32_f32_col'])
def test_one_graph_serves_every_token_count(name):
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda x: tuple(quant.per_token_cast(x, name)), backend=count, fullgraph=True, dynamic=True
    )
    for num_tokens in (8, 16, 33):
        x = torch.randn(num_tokens, 256)
        data, sf = compiled(x)
        assert_same(QuantTensor(data, sf, name), per_token_cast.call(x, parse(name)))
    assert len(graphs) == 1


def test_one_graph_serves_every_quantised_input():
    compiled = torch.compile(
        lambda pair: tuple(quant.per_token_cast(pair, 'e2m1', 32, (32, 32), round_sf=True)),
        backend='eager',
        fullgraph=True,
        dynamic=True,
    )
    for num_tokens in (40, 64, 97):
        pair = tuple(twin.cast(torch.randn(num_tokens, 128), 'e4m3', (32, 32)))
        data, sf = compiled(pair)
        assert_same(
            QuantTensor(data, sf, 'e2m1_1x32_f32p2'), quant.per_token_cast(pair, 'e2m1', 32, (32, 32), round_sf=True)
        )


@pytest.mark.benchmark
def test_benchmark(benchmark_op):
    assert benchmark_op('quant.per_token_cast')


@pytest.mark.parametrize('name', ['e2m1_1x32_f32', 'e2m1_1x16_f32', 'e4m3_1x128_f32'])
def test_given_factors_divide_the_numbers(name):
    fmt = QuantFormat.parse(name)
    x = torch.randn(5, 256).clamp(-3, 3)  # at most 6 factors, the largest number of e2m1
    sf = torch.rand(5, 256 // fmt.sf_block[1]) * 0.7 + 0.5
    with knobs(interpret=True):
        y = per_token_cast_with_precomputed_sf.call(x, sf, fmt)
    assert_equal(y, twin.per_token_cast_with_precomputed_sf(x, sf, fmt))
    decoded = dequantize(QuantTensor(y, sf, fmt), torch.float32)
    step = sf.repeat_interleave(fmt.sf_block[1], 1) * (1.0 if fmt.data.name == 'e2m1' else 0.5)
    assert bool(((decoded - x).abs() <= step).all())
