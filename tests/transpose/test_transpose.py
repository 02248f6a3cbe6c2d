import re

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels.core import nvcc
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.reference.transpose import transpose as transpose_twin
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.transpose import batched_transpose, transpose
from tile_kernels.transpose.batched_transpose import BITS, batched_transpose_kernel

DTYPES = [
    *(torch.bool, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.int16, torch.uint16, torch.bfloat16, torch.float16),
    *(torch.int32, torch.uint32, torch.float32),
    *(torch.int64, torch.float64, torch.complex64),
]


@pytest.fixture(params=['twin', 'interpreter'])
def path(request):
    """Both ways an op runs on a CPU."""
    with knobs(interpret=request.param == 'interpreter'):
        yield request.param


def random_bits(*shape, dtype):
    """Every bit pattern of a dtype, NaN payloads included; 0 and 1 for bool."""
    bits = BITS[dtype.itemsize]
    low, high = (0, 2) if dtype is torch.bool else (torch.iinfo(bits).min, torch.iinfo(bits).max)
    return torch.randint(low, high, shape, dtype=bits).view(dtype)


def expected(x):
    """The definition, element by element: built from bits, so that no arithmetic can hide a change."""
    bits = x.contiguous().view(BITS[x.element_size()])
    batch, rows, cols = bits.shape
    index = torch.arange(rows * cols).view(rows, cols).t().reshape(-1)
    return bits.reshape(batch, rows * cols)[:, index].reshape(batch, cols, rows).view(x.dtype)


def widths(x):
    """Bytes of a load, and whether rows of the result are aligned, as the kernel is built for `x`."""
    return batched_transpose.trace(x)[0].static[1:]


# Values -------------------------------------------------------------------------------------


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_every_dtype_keeps_its_bits(dtype, path):
    x = random_bits(2, 18, 33, dtype=dtype)
    assert_equal(batched_transpose(x), expected(x))


@pytest.mark.parametrize('num_cols', [2, 31, 64, 130])
@pytest.mark.parametrize('num_rows', [2, 33, 64, 129])
def test_tails_of_rows_and_columns(num_rows, num_cols, path):
    x = random_bits(2, num_rows, num_cols, dtype=torch.bfloat16)
    assert_equal(batched_transpose(x), expected(x))


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize('load_span', batched_transpose_kernel.space['load_span'])
@pytest.mark.parametrize('store_span', batched_transpose_kernel.space['store_span'])
@pytest.mark.parametrize('odd', [0, 1])
def test_every_tile_is_right(dtype, load_span, store_span, odd):
    x = random_bits(1, store_span // dtype.itemsize + 16 - odd, load_span // dtype.itemsize + 16, dtype=dtype)
    config = dict(load_span=load_span, store_span=store_span, order='nm'[odd])
    with knobs(interpret=True), forced_config(**config):
        assert_equal(batched_transpose(x), expected(x))


@pytest.mark.parametrize('dtype', [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_rows_of_any_length_around_a_tile(dtype):
    """The rows of the result begin at every offset from alignment, and end before, at and after the first tile."""
    vector = 16 // dtype.itemsize
    with knobs(interpret=True), forced_config(load_span=128, store_span=128, order='n'):
        for num_rows in (7 * vector - 1, 7 * vector + 1, 8 * vector - 1, 8 * vector + 1, 14 * vector + 2 - vector % 2):
            x = random_bits(2, num_rows, 18, dtype=dtype)
            assert_equal(batched_transpose(x), expected(x))


@pytest.mark.parametrize('shape', [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_empty_dimensions_give_empty_results(shape, path):
    x = torch.empty(shape, dtype=torch.bfloat16)
    assert batched_transpose(x).shape == (shape[0], shape[2], shape[1])


def test_two_dimensions(path):
    x = random_bits(24, 2 * 40, dtype=torch.bfloat16)[:, :40]
    assert_equal(transpose(x), x.t().contiguous())
    assert_equal(transpose(x), transpose_twin(x))


# Strides ------------------------------------------------------------------------------------


VIEWS = {
    'aligned rows': lambda x: x[:, :, 8:40],
    'misaligned rows': lambda x: x[:, :, 1:34],
    'every fifth row': lambda x: x[:, 3::5],
    'every second matrix': lambda x: x[::2],
    'batch inside': lambda x: x.transpose(0, 1),
    'dense columns': lambda x: x.mT,
    'every third column': lambda x: x[:, :, ::3],
    'permuted': lambda x: x.permute(2, 0, 1),
    'one value': lambda x: x[:1, :1, :1].expand(2, 24, 40),
    'one row': lambda x: x[:, :1].expand(-1, 24, -1),
    'odd batch stride': lambda x: x.as_strided((1, 24, 40), (7, 48, 1)),
}


@pytest.mark.parametrize('view', VIEWS.values(), ids=VIEWS)
def test_every_stride_is_accepted(view, path):
    x = view(random_bits(12, 60, 48, dtype=torch.bfloat16))
    assert_equal(batched_transpose(x), expected(x))


def test_access_width_follows_alignment():
    x = torch.zeros(2, 64, 80, dtype=torch.bfloat16)
    assert widths(x) == (16, True)
    assert widths(x[:, :, 8:]) == (16, True)
    assert widths(x[:, :, 4:]) == (8, True)
    assert widths(x[:, :, 1:]) == (2, True)
    assert widths(x[:, :61]) == (16, False)
    assert widths(x[:, :62, :78]) == (4, False)
    assert widths(x.view(torch.uint8)[:, :63, :77]) == (1, False)
    assert widths(x.as_strided((1, 32, 48), (7, 80, 1))) == (2, True)


def test_dtypes_the_kernel_language_lacks_travel_as_bits():
    assert batched_transpose.trace(torch.zeros(1, 24, 40, dtype=torch.complex64))[0].static[0] is torch.int64
    assert batched_transpose.trace(torch.zeros(1, 24, 80, dtype=torch.bool))[0].static[0] is torch.uint8


@pytest.mark.parametrize('shape', [(5, 4, 4), (5, 8, 8), (3, 2, 700), (2, 8, 16)])
def test_small_matrices_are_copied_without_a_tile_each(shape, path):
    x = random_bits(*shape, dtype=torch.bfloat16)
    assert batched_transpose.trace(x) == []
    assert_equal(batched_transpose(x), expected(x))


def test_sizes_and_strides_share_one_kernel():
    x = torch.zeros(4, 64, 80)
    assert widths(x) == widths(x[:3, :36]) == widths(x[1:, 4:, 8:72]) == widths(x.view(2, 128, 80))


def test_result_never_shares_memory(path):
    x = random_bits(2, 24, 32, dtype=torch.float32)
    for view in (x, x[:, :4, :4], x.mT, x[:, :1], x[:, :, :1]):
        result = batched_transpose(view)
        assert result.is_contiguous()
        assert result.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_lazy_conjugate_and_negative_views(path):
    x = torch.randn(2, 24, 40, dtype=torch.complex64)
    assert_equal(batched_transpose(x.conj()), x.conj().resolve_conj().mT.contiguous())
    negative = torch._neg_view(x.real.contiguous())
    assert_equal(batched_transpose(negative), -x.real.mT.contiguous())


# Gradients and compilation ------------------------------------------------------------------


def test_gradient_is_the_transpose_back(path):
    x = torch.randn(2, 15, 20, requires_grad=True)
    dy = torch.randn(2, 20, 15)
    batched_transpose(x).backward(dy)
    assert_equal(x.grad, dy.mT.contiguous())


def test_gradient_of_a_sum(path):
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    (transpose(x) * 2).sum().backward()
    assert_equal(x.grad, torch.full_like(x, 2))


def test_one_graph_for_several_sizes():
    counter = CompileCounter()
    compiled = torch.compile(
        lambda x: transpose(x[0]) + batched_transpose(x)[1], fullgraph=True, dynamic=True, backend=counter
    )
    for rows, cols in ((5, 7), (16, 24), (33, 9)):
        x = torch.randn(2, rows, cols)
        assert_equal(compiled(x), (x[0] + x[1]).t().contiguous())
    assert counter.frame_count == 1


def test_compiled_gradients_equal_eager_ones():
    x = torch.randn(2, 5, 7, requires_grad=True)
    weight = torch.randn(2, 7, 5)
    torch.compile(lambda x: (batched_transpose(x) * weight).sum(), fullgraph=True, dynamic=True)(x).backward()
    assert_equal(x.grad, weight.mT.contiguous())


# Lowering -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('dtype', 'aligned'), [(torch.uint8, True), (torch.bfloat16, False), (torch.bfloat16, True), (torch.int64, False)]
)
def test_both_sides_of_memory_see_sixteen_bytes(dtype, aligned):
    """In PTX: the compiler may split what is one vector in the source."""
    text = nvcc.ptx(batched_transpose_kernel.source((dtype, 16, aligned), size=1 << 30), 'sm_90a')
    loads, stores = set(re.findall(r'ld\.global\S*', text)), set(re.findall(r'st\.global\S*', text))
    wide = {'ld.global.nc.v4.u32', 'ld.global.nc.v2.u64', 'st.global.v4.u32', 'st.global.v2.u64'}
    assert loads and loads <= wide
    assert stores & wide
    assert len(stores - wide) == (0 if aligned else 1)  # the elements at the ends of a row


# Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (
            lambda: batched_transpose(torch.zeros(3, 4)),
            'transpose.batched_transpose: x must be (batch, num_rows, num_cols), got float32[3, 4] on cpu',
        ),
        (
            lambda: transpose(torch.zeros(2, 3, 4)),
            'transpose.transpose: x must be (num_rows, num_cols), got float32[2, 3, 4] on cpu',
        ),
        (
            lambda: batched_transpose(torch.zeros(2, 3, 4, dtype=torch.complex128)),
            'transpose.batched_transpose: x must have elements of 1, 2, 4 or 8 bytes, got complex128[2, 3, 4] on cpu',
        ),
        (
            lambda: transpose(torch.zeros(2, 3, dtype=torch.complex128)),
            'transpose.transpose: x must have elements of 1, 2, 4 or 8 bytes, got complex128[2, 3] on cpu',
        ),
        (lambda: batched_transpose([1, 2]), 'transpose.batched_transpose: x must be a tensor, got list'),
        (
            lambda: transpose(torch.quantize_per_tensor(torch.ones(2, 3), 1.0, 0, torch.quint8)),
            'transpose.transpose: x must be a plain dense tensor, got quint8[2, 3] on cpu; pass x.dequantize()',
        ),
    ],
    ids=['rank', 'rank of transpose', 'element size', 'element size of transpose', 'no tensor', 'quantised'],
)
def test_error_sentences(call, sentence):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value) == sentence


# Speed --------------------------------------------------------------------------------------


@pytest.mark.benchmark
def test_benchmark(benchmark_op):
    assert benchmark_op('transpose.batched_transpose')
