"""What is special about dequantising: every code, every layout, formats read off plain pairs, e5m6 both ways."""

import pytest
import torch

from tile_kernels import ArgumentError, QuantFormat, QuantTensor, knobs, quant
from tile_kernels.core.launch import forced_config
from tile_kernels.quant.dequantize import dequantize
from tile_kernels.quant.per_token_cast import per_token_cast
from tile_kernels.quant.per_token_cast_and_cast_back import per_token_cast_and_cast_back
from tile_kernels.quant.per_token_cast_with_precomputed_sf import per_token_cast_with_precomputed_sf
from tile_kernels.reference import quant as twin
from tile_kernels.reference.quant import _common
from tile_kernels.testing.numeric import assert_equal

NAN, INF = float('nan'), float('inf')


def parse(name: str) -> QuantFormat:
    return QuantFormat.parse(name)


def kernel(op, *args):
    with knobs(interpret=True):
        return op(*args)


# Every code ---------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize('name', ['e4m3', 'e5m2'])
def test_every_fp8_code(name, dtype):
    fmt = parse(f'{name}_1x256_f32')
    codes = torch.arange(256, dtype=torch.uint8).view(1, 256).view(fmt.data.torch)
    y = kernel(dequantize, QuantTensor(codes, torch.full((1, 1), 0.3), fmt), dtype)
    expected = (codes.float() * torch.tensor(0.3)).to(dtype)
    assert torch.equal(y.isnan(), expected.isnan())
    assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_every_fp4_code():
    fmt, codes = parse('e2m1_1x512_f32'), torch.arange(256, dtype=torch.uint8).view(torch.int8).view(1, 256)
    y = kernel(dequantize, QuantTensor(codes, torch.full((1, 1), 2.0), fmt), torch.float32)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat((magnitudes, -magnitudes)) * 2
    expected = torch.stack((numbers.repeat(16), numbers.repeat_interleave(16)), -1).view(1, 512)
    assert_equal(y, expected)


def test_every_e5m6_code_comes_back_and_is_found_again():
    fmt, codes = parse('e5m6_1x4096_f32'), torch.arange(4096).view(1, 4096)
    packed, sf = _common.pack_e5m6(codes), torch.ones(1, 1)
    y = kernel(dequantize, QuantTensor(packed, sf, fmt), torch.float32)
    expected = (codes << 4).to(torch.uint16).view(torch.float16).float()
    assert torch.equal(y.nan_to_num(7.0), expected.nan_to_num(7.0))
    found = kernel(per_token_cast_with_precomputed_sf.call, y, sf, parse('e5m6_1xall_f32'))
    finite = expected.isfinite()[0]
    assert torch.equal(_common.unpack_e5m6(found)[0, finite], codes[0, finite])
    infinite = expected[0].isinf()
    assert _common.unpack_e5m6(found)[0, infinite].tolist() == [0x7BF, 0xFBF], 'infinity saturates'
    assert set(_common.unpack_e5m6(found)[0, expected[0].isnan()].tolist()) == {0x7FF}


def test_the_words_of_e5m6_are_those_of_the_specification():
    code = torch.randint(0, 4096, (1, 8))
    h = code[0].tolist()
    words = (
        (h[0] << 20 | h[1] << 8 | h[2] >> 4),
        (h[2] << 28 | h[3] << 16 | h[4] << 4 | h[5] >> 8) & 0xFFFFFFFF,
        (h[5] << 24 | h[6] << 12 | h[7]) & 0xFFFFFFFF,
    )
    assert bytes(_common.pack_e5m6(code)[0].tolist()) == b''.join(word.to_bytes(4, 'little') for word in words)
    assert torch.equal(_common.unpack_e5m6(_common.pack_e5m6(code)), code)


@pytest.mark.parametrize('hidden', [64, 72])  # words move between lanes, or do not
def test_e5m6_rounds_by_the_low_bits_of_the_float32(hidden):
    """Normal numbers to nearest even; below 2^-14 the same 17 bits decide, although steps are wider there."""
    ties = torch.tensor(
        [1 + 1 / 128, 1 + 3 / 128, 1 + 1 / 128 + 2**-23, 2**-14 * 63 / 64, 2**-20, 2**-20 * 1.5, 2**-24]
    )
    x = torch.zeros(2, hidden)
    x[0, :7], x[1, :7], x[:, -1] = ties, -ties, 65024.0
    fmt = parse('e5m6_1xall_f32')
    y = kernel(per_token_cast.call, x, fmt)
    assert_equal(y.data, twin.per_token_cast(x, fmt).data)
    back = kernel(dequantize, y, torch.float32)
    assert y.sf.flatten().tolist() == [1.0, 1.0]
    assert back[0, :3].tolist() == [1.0, 1 + 1 / 32, 1 + 1 / 64]
    assert back[0, 3:6].tolist() == [2**-14 * 63 / 64, 2**-20, 2**-20]
    assert torch.equal(back[1, :7], -back[0, :7])


@pytest.mark.parametrize('sf', [1.0, 0.7])
def test_every_bf16_to_e5m6(sf):
    """Normal numbers are rounded another way than those below 2^-14 and above the largest: all of them meet here."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(-1, 256)
    mixed = x.view(256, 256).t().contiguous()  # and lanes with numbers of one kind only
    fmt, factors = parse('e5m6_1xall_f32'), torch.full((256, 1), sf)
    for numbers in (x, mixed):
        y = kernel(per_token_cast_with_precomputed_sf.call, numbers, factors, fmt)
        assert_equal(y, twin.per_token_cast_with_precomputed_sf(numbers, factors, fmt))


@pytest.mark.parametrize('flags', [(False, False, False), (False, True, False), (True, True, True)])
def test_e5m6_by_flags(flags):
    x = torch.randn(9, 320)
    expected = twin.cast_to_e5m6(x, 320, *flags)
    y = per_token_cast.call(x, expected.fmt)
    assert_equal(y.data, expected.data)
    assert_equal(y.sf, expected.sf)
    back = quant.per_token_cast_back(tuple(y), 'fp32', 320, x_special_fmt='e5m6')
    assert_equal(back, twin.cast_back_from_e5m6(tuple(expected), 'fp32', (1, 320)))
    assert bool(((back - x).abs() <= x.abs() / 64 + 2e-8 * x.abs().amax(1, keepdim=True)).all())


# Layouts ------------------------------------------------------------------------------------


@pytest.mark.parametrize(('vectors', 'along'), [(1, 1), (2, 1), (4, 1), (8, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize('hidden', [144, 1024])
def test_every_number_of_vectors_per_lane_gives_the_same(vectors, along, hidden):
    x = twin.per_token_cast(torch.randn(11, hidden), parse('e4m3_1x32_ue8m0x4_col'))
    with forced_config(vectors=vectors, along=along, num_threads=128):
        assert_equal(kernel(dequantize, x, torch.bfloat16), twin.dequantize(x, torch.bfloat16))


@pytest.mark.parametrize('shape', [(1, 128), (5, 128), (1, 512), (37, 264)])
@pytest.mark.parametrize(
    'flags', [(False, False, False), (True, False, False), (True, True, True), (False, True, True)]
)
def test_plain_pairs_are_read_by_dtype_and_stride(shape, flags):
    x = torch.randn(shape)
    fmt = QuantFormat.from_flags('e4m3', (1, 128), *flags)
    y = per_token_cast.call(x, fmt)
    expected = twin.dequantize(y, torch.float32)
    assert_equal(quant.cast_back(y, 'fp32'), expected)
    assert_equal(quant.cast_back(tuple(y), 'fp32', (1, 128)), expected)
    assert_equal(quant.per_token_cast_back(tuple(y), 'bf16', 128), expected.bfloat16())


@pytest.mark.parametrize('interpret', [False, True])
def test_rows_of_scale_factors_may_lie_apart(interpret):
    x = torch.randn(5, 256)
    data, sf = per_token_cast.call(x, QuantFormat.parse('e4m3_1x128_f32'))
    apart = torch.full((5, 8), float('nan'))[:, :2].copy_(sf)
    with knobs(interpret=interpret):
        assert_equal(quant.cast_back((data, apart), 'fp32', (1, 128)), quant.cast_back((data, sf), 'fp32', (1, 128)))
        assert_equal(quant.per_token_cast_with_precomputed_sf(x, 'e4m3', 128, apart), data)
        dy, psum = torch.randn(5, 128).bfloat16(), torch.tensor([5], dtype=torch.int32)
        options = dict(psum_num_tokens_per_expert=psum, num_per_channels=128)
        dx = [quant.swiglu_backward_and_per_token_cast((data, f), dy, 'e4m3', **options)[0] for f in (apart, sf)]
        assert_equal(*dx)


@pytest.mark.parametrize('block', [(128, 1), (128, 128), (32, 32), (1, 264)])
@pytest.mark.parametrize('fmt', ['e4m3', 'e2m1'])
def test_blocks_of_the_reference_come_back(block, fmt):
    x = torch.randn(130, 264)
    pair = twin.cast(x, fmt, block)
    with knobs(interpret=True):
        back = quant.cast_back(tuple(pair), 'fp32', block)
    assert_equal(back, twin.cast_back(pair, 'fp32', block))


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (dict(x=torch.randn(2, 2)), r'x must be a pair \(data, sf\), got float32\[2, 2\]'),
        (dict(x=(torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 1))), 'x_block_size must be given'),
        (
            dict(x=(torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 2)), x_block_size=(1, 64)),
            'x.sf must be .* with sf_cols = 1',
        ),
        (dict(x=(torch.zeros(2, 64), torch.ones(2, 1)), x_block_size=(1, 64)), r'x\[0\].dtype must be one of'),
        (
            dict(x=(torch.zeros(2, 64).to(torch.float8_e4m3fn), torch.ones(2, 1)), x_block_size=(1.0, 64.0)),
            r'x_block_size must be two integers, of rows and of channels, got \(1.0, 64.0\)',
        ),
        (dict(x=(torch.zeros(2, 64), torch.ones(2, 1)), fmt='fp64'), 'fmt must be one of bf16, fp16, fp32'),
    ],
)
def test_wrong_pairs_are_told_in_one_sentence(arguments, sentence):
    with pytest.raises(ArgumentError, match=f'^quant.cast_back: {sentence}'):
        quant.cast_back(**arguments)


def test_one_graph_serves_every_token_count():
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(
        lambda pair: quant.per_token_cast_back(pair, 'fp32', 128), backend=count, fullgraph=True, dynamic=True
    )
    for num_tokens in (8, 16, 33):
        pair = tuple(per_token_cast.call(torch.randn(num_tokens, 256), parse('e4m3_1x128_f32')))
        assert_equal(compiled(pair), twin.cast_back(pair, 'fp32', (1, 128)))
    assert len(graphs) == 1


# There and back -----------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['e4m3_1x32_f32', 'e2m1_1x16_f32p2', 'e2m1_1x32_e4m3'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_casting_there_and_back_is_done_in_place(name, dtype):
    memory = torch.randn(7, 80).to(dtype)
    before, x = memory.clone(), memory[:, :72]
    expected = twin.dequantize(twin.per_token_cast(x, parse(name)), dtype)
    assert kernel(per_token_cast_and_cast_back.call, x, parse(name)) is None
    assert_equal(memory[:, :72].contiguous(), expected)
    assert_equal(memory[:, 72:].contiguous(), before[:, 72:].contiguous())
    once = x.clone()
    quant.per_token_cast_and_cast_back(x, *_flags(name))
    if 'f32p2' in name:
        assert_equal(x.contiguous(), once.contiguous())  # powers of two: nothing is left to round


def _flags(name: str) -> tuple:
    fmt = parse(name)
    return fmt.data.name, fmt.sf_block[1], fmt.sf == 'f32p2', fmt.sf == 'e4m3'


# Straight through ---------------------------------------------------------------------------


@pytest.mark.parametrize('name', ['e4m3_1x128_f32', 'e2m1_1x32_f32p2'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float32])
def test_fake_quantization_passes_its_gradient_through(name, dtype):
    x = torch.randn(5, 200, dtype=dtype).requires_grad_()
    dy = torch.randn(5, 200).to(dtype)
    y = quant.fake_quantize(x, name)
    assert_equal(y.detach(), twin.dequantize(twin.per_token_cast(x.detach(), parse(name)), dtype))
    y.backward(dy)
    assert_equal(x.grad, dy)
    assert quant.fake_quantise is quant.fake_quantize


def test_fake_quantization_trains_under_compile_and_functorch():
    weight, x = torch.randn(64, 64), torch.randn(7, 64)

    def loss(weight, x):
        return (quant.fake_quantize(x @ weight, 'e4m3_1x32_f32') ** 2).sum()

    eager = weight.clone().requires_grad_()
    loss(eager, x).backward()
    y = quant.fake_quantize(x @ weight, 'e4m3_1x32_f32')
    torch.testing.assert_close(eager.grad, x.t() @ (2 * y))
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend='aot_eager')
    for num_tokens in (7, 9):
        x = torch.randn(num_tokens, 64)
        traced, plain = weight.clone().requires_grad_(), weight.clone().requires_grad_()
        compiled(traced, x).backward()
        loss(plain, x).backward()
        torch.testing.assert_close(traced.grad, plain.grad)
    torch.testing.assert_close(torch.func.grad(loss)(weight, x), plain.grad)


def test_fake_quantization_leaves_its_input_alone():
    memory = torch.randn(3, 80)
    x, before = memory[:, :64], memory.clone()
    with knobs(interpret=True):
        y = quant.fake_quantize(x, 'e2m1_1x16_e4m3')
    assert torch.equal(memory, before) and y.is_contiguous()
    with pytest.raises(ArgumentError, match=r'^quant.fake_quantize: fmt.sf must be one of f32, f32p2, e4m3'):
        quant.fake_quantize(x, 'e4m3_1x32_ue8m0x4')
    with pytest.raises(ArgumentError, match=r'^quant.fake_quantize: fmt must be a whole format .*, got \'e4m3\'$'):
        quant.fake_quantize(x, 'e4m3')
    with pytest.raises(ArgumentError, match=r'^quant.fake_quantize: x must be a tensor'):
        quant.fake_quantize(None, 'e4m3_1x32_f32')
