"""What is special about the per-block casts: edges, every tile shape, numbers that are not finite, flags, errors."""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, QuantTensor, knobs, quant
from tile_kernels.core.launch import forced_config
from tile_kernels.quant.per_block_cast import per_block_cast, per_block_cast_kernel
from tile_kernels.quant.per_block_cast_with_precomputed_sf import per_block_cast_with_precomputed_sf
from tile_kernels.quant.per_block_cast_with_sf_only import per_block_cast_with_sf_only
from tile_kernels.reference import quant as twin
from tile_kernels.testing.numeric import assert_equal

NAN, INF = float('nan'), float('inf')


def parse(name: str) -> QuantFormat:
    return QuantFormat.parse(name)


def assert_same(y: QuantTensor, expected: QuantTensor) -> None:
    assert_equal(y.data, expected.data)
    assert_equal(y.sf, expected.sf)


def assert_kernel_is_twin(x: torch.Tensor, name: str) -> QuantTensor:
    expected = twin.per_block_cast(x, parse(name))
    with knobs(interpret=True):
        assert_same(per_block_cast.call(x, parse(name)), expected)
        assert_equal(per_block_cast_with_sf_only.call(x, parse(name)), expected.sf)
    return expected


@pytest.mark.parametrize('name', ['e4m3_128x128_f32', 'e4m3_32x32_f32', 'e4m3_32x128_f32', 'e4m3_128x32_f32'])
def test_blocks_at_the_edges_use_only_their_own_elements(name):
    fmt, x = parse(name), torch.randn(150, 200)
    height, width = fmt.sf_block
    y = assert_kernel_is_twin(x, name)
    row, col = 150 // height * height, 200 // width * width
    corner = twin.per_block_cast(x[row:, col:], fmt)
    assert_equal(y.data[row:, col:].contiguous(), corner.data)
    assert y.sf[-1, -1] == corner.sf[0, 0] == x[row:, col:].abs().max() / 448


@pytest.mark.parametrize(('rows', 'num_threads'), [(8, 256), (4, 512), (8, 128), (4, 128), (8, 512)])
@pytest.mark.parametrize('name', ['e4m3_32x128_f32', 'e2m1_32x32_f32p2', 'e4m3_128x128_f32'])
def test_every_tile_gives_the_same(name, rows, num_threads):
    x = torch.randn(131, 136).bfloat16()
    config = dict(rows=rows, num_threads=num_threads, resident_threads=512)
    with forced_config(**config):
        if rows * num_threads // 16 % parse(name).sf_block[0]:
            with pytest.raises(ArgumentError, match='cannot hold scale blocks'):
                per_block_cast_kernel.tir(136, parse(name), torch.bfloat16, 16, 'cast', **config)
        else:
            assert_kernel_is_twin(x, name)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('name', ['e4m3_32x32_f32', 'e5m2_32x32_f32p2', 'e2m1_32x32_f32', 'e2m1_32x32_e4m3'])
def test_nan_does_not_count_and_inf_saturates(name, dtype):
    x = torch.ones(33, 64).to(dtype)
    x[0, 3], x[1, 4], x[5, 40], x[6, 41], x[32, 0] = NAN, -NAN, INF, -INF, -0.0
    y = assert_kernel_is_twin(x, name)
    assert bool(y.sf.float().isfinite().all())
    clean = twin.per_block_cast(torch.ones(33, 64).to(dtype), parse(name))
    assert_equal(y.sf[:, :1].contiguous(), clean.sf[:, :1].contiguous())


def test_a_block_of_zeros_has_the_smallest_scale_factor():
    assert assert_kernel_is_twin(torch.zeros(5, 40), 'e4m3_128x128_f32p2').sf.item() == 2.0**-22
    assert assert_kernel_is_twin(torch.zeros(5, 40), 'e2m1_128x128_ue8m0x4').sf.item() == 1


def test_packed_bytes_are_in_channel_order_and_missing_blocks_are_zero():
    x = torch.full((33, 5 * 32), 448.0)
    x[32:, 32:64] = 2 * 448.0
    for name in ('e4m3_32x32_ue8m0x4', 'e4m3_32x32_ue8m0x4_col'):
        sf = assert_kernel_is_twin(x, name).sf
        assert [[hex(word) for word in row] for row in sf.tolist()] == [
            ['0x7f7f7f7f', '0x7f'],
            ['0x7f7f807f', '0x7f'],
        ]


def test_tokens_and_strides_are_no_compile_keys():
    memory, fmt = torch.randn(64, 1024).bfloat16(), parse('e4m3_128x128_ue8m0x4_col')
    views = (memory[:5, :256], memory[:7, 256:512], memory.view(128, 512)[:9, :256])
    assert len({per_block_cast.trace(x, fmt)[0].static for x in views}) == 1


def test_given_factors_may_be_any_number():
    x, sf, fmt = torch.randn(40, 70).bfloat16(), torch.rand(2, 3) + 0.1, parse('e2m1_32x32_f32p2')
    with knobs(interpret=True):
        y = per_block_cast_with_precomputed_sf.call(x, sf, fmt)
    assert_equal(y, twin.per_block_cast_with_precomputed_sf(x, sf, fmt))


# TileKernels' arguments ---------------------------------------------------------------------


@pytest.mark.parametrize('fmt', ['e4m3', 'e2m1'])
@pytest.mark.parametrize('block', [(128, 128), (32, 32)])
@pytest.mark.parametrize('flags', [(False, False, False), (False, True, False), (True, True, True)])
def test_flags_name_a_format(fmt, block, flags):
    x = torch.randn(150, 192)
    y = quant.per_block_cast(x, fmt, block, *flags)
    names = ('use_tma_aligned_col_major_sf', 'round_sf', 'use_packed_ue8m0')
    assert_same(y, twin.cast(x, fmt, block, **dict(zip(names, flags, strict=True))))
    sf = quant.per_block_cast_with_sf_only(x, fmt, block, round_sf=flags[1])
    assert_equal(sf, twin.cast(x, fmt, block, round_sf=flags[1]).sf)
    data = quant.per_block_cast_with_precomputed_sf(x, fmt, block, sf, round_sf=flags[1])
    assert_equal(data, twin.cast(x, fmt, block, sf=sf))


def test_results_can_be_written_to_given_tensors():
    x, fmt = torch.randn(40, 64), parse('e4m3_32x32_f32')
    expected, out = per_block_cast.call(x, fmt), fmt.empty(40, 64, x.device)
    assert quant.per_block_cast(x, 'e4m3', (32, 32), out=tuple(out)).data is out.data
    assert_same(out, expected)
    sf, data, flags = torch.empty_like(out.sf), torch.empty_like(out.data), (False, False, False)
    assert quant.per_block_cast_with_sf_only(x, fmt, out_sf=sf) is sf
    assert quant.per_block_cast_with_precomputed_sf(x, fmt, sf=sf, out=data) is data
    quant.per_block_cast(x, 'e4m3', (32, 32), *flags, (data.zero_(), sf.zero_()))
    assert_equal(data, expected.data)
    assert quant.per_block_cast_with_sf_only(x, 'e4m3', (32, 32), *flags, sf) is sf
    assert quant.per_block_cast_with_precomputed_sf(x, 'e4m3', (32, 32), sf, *flags, data) is data
    assert_equal(data, expected.data)


def test_friendly_fp8():
    w = torch.randn(130, 40)
    w_fp8, scale = quant.per_block_cast_fp8(w, block_size=128)
    assert_equal(scale, twin.per_block_cast_fp8(w, block_size=128)[1])
    assert (w_fp8.shape, w_fp8.dtype, scale.shape) == ((130, 40), torch.float8_e4m3fn, (2, 1))
    assert bool(((w_fp8.float() * scale.repeat_interleave(128, 0)[:130] - w).abs() <= w.abs() / 16 + 1e-4).all())
    assert quant.per_block_cast_fp8(w, 32, torch.float8_e5m2)[1].shape == (5, 2)


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (dict(fmt='e4m3', block_size=(64, 64)), r'block_size must be one of \(32, 32\), .*, got \(64, 64\)'),
        (dict(fmt='e4m3', block_size=128), r'block_size must be one of \(32, 32\), .*, got 128'),
        (dict(fmt='e4m3', block_size=(128.0, 128)), r'block_size must be two integers, .*, got \(128.0, 128\)'),
        (dict(fmt='e4m3_1x128_f32'), r'fmt.sf_block\[0\] must be one of 32, 128, got 1'),
        (dict(fmt='e5m6', block_size=(128, 128)), "fmt must be one of e4m3, e5m2, e2m1, got 'e5m6'"),
        (dict(fmt='e4m3', block_size=(32, 32), use_packed_ue8m0=True), 'use_packed_ue8m0 must come with round_sf=True'),
        (dict(fmt='e4m3_32x32_f32', block_size=(32, 32)), 'must be left out when fmt is a whole format'),
    ],
)
def test_wrong_formats_are_told_in_one_sentence(arguments, sentence):
    with pytest.raises(ArgumentError, match=f'^quant.per_block_cast: .*{sentence}'):
        quant.per_block_cast(torch.randn(4, 64), **arguments)


def test_one_graph_serves_every_token_count():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    name = 'e4m3_32x128_ue8m0x4_col'
    compiled = torch.compile(
        lambda x: tuple(quant.per_block_cast(x, name)), backend=count, fullgraph=True, dynamic=True
    )
    for num_tokens in (40, 70, 133):
        x = torch.randn(num_tokens, 256)
        data, sf = compiled(x)
        assert_same(QuantTensor(data, sf, name), per_block_cast.call(x, parse(name)))
    assert len(graphs) == 1
