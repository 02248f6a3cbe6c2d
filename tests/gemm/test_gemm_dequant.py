"""What the contract does not see of the product with packed weights: error bounds, permutations, `out`, compilation."""

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.core.gpus import gpu_named
from tile_kernels.core.launch import on_gpu, tracing
from tile_kernels.core.registry import cases_of, find_op, launches_of
from tile_kernels.gemm import gemm_dequant, grouped_gemm_dequant, pack_weight, quantize_weight
from tile_kernels.gemm.gemm_dequant_kernels import row_splits
from tile_kernels.gemm.packed_weight import FORMATS

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def made(fmt, m=5, n=24, k=256, dtype=BF16):
    torch.manual_seed(0)
    weight = quantize_weight(torch.randn(n, k, device=DEVICE).to(dtype), fmt)
    return torch.randn(m, k, device=DEVICE, dtype=dtype), weight


@pytest.mark.parametrize('fmt', FORMATS)
def test_errors_are_those_of_one_rounding(fmt):
    """e(d) <= 2 e(a @ W16.T) + 1e-5 max|d|, with few rows and with tiles."""
    for m, dtype in ((5, BF16), (20, torch.float16)):
        a, weight = made(fmt, m, dtype=dtype)
        exact = a.double() @ weight.dequantize(torch.float64).T
        plain = (a.float() @ weight.dequantize(dtype).float().T).to(dtype)
        error = (gemm_dequant(a, weight).double() - exact).abs().max()
        assert error <= 2 * (plain.double() - exact).abs().max() + 1e-5 * exact.abs().max()


@pytest.mark.parametrize('fmt', ['u4_1x64', 's8_1xk', 'e4m3_1xk_f32', 'e2m1_1x32_ue8m0'])
@pytest.mark.parametrize('dtype', [BF16, torch.float16])
def test_every_code_is_multiplied_exactly(fmt, dtype):
    """Rows of the identity give the matrix itself, which has every code, also in every column of 4 bits."""
    n, k, form = 16, 64, FORMATS[fmt]
    row, column = torch.arange(n, device=DEVICE)[:, None], torch.arange(k, device=DEVICE) % 16
    codes = (
        (row * 16 + (row + column) % 16).to(torch.uint8) % 16 if form.bits == 4 else (row * 16 + column).to(torch.uint8)
    )
    if form.element == 'e4m3':
        codes = torch.where((codes & 127) == 127, 0, codes).to(torch.uint8)
    kind = {'s8': torch.int8, 'e4m3': torch.float8_e4m3fn}.get(form.element, torch.uint8)
    scale = torch.ones(n, form.groups(k), device=DEVICE)
    if form.factor == 'ue8m0':
        scale = torch.full_like(scale, 127, dtype=torch.uint8)
    zero = row.expand(scale.shape) if form.element == 'u4' else None
    weight = pack_weight(codes.view(kind), scale, zero, fmt=fmt)
    for rows in (16, 32):
        given = torch.eye(k, device=DEVICE, dtype=dtype)[:rows].contiguous()
        assert torch.equal(gemm_dequant(given, weight), weight.dequantize(dtype).T[:rows])


def test_permuted_channels_and_gradients():
    codes, scale = torch.randint(16, (24, 128), device=DEVICE), torch.rand(24, 2, device=DEVICE).to(BF16)
    weight = pack_weight(codes, scale, fmt='u4_1x64', perm=torch.randperm(128, device=DEVICE))
    a = torch.randn(3, 128, device=DEVICE, dtype=BF16, requires_grad=True)
    bias = torch.randn(24, device=DEVICE, dtype=BF16, requires_grad=True)
    d = gemm_dequant(a, weight, bias)
    matrix = weight.dequantize()
    torch.testing.assert_close(d.float(), a.detach().float() @ matrix.T + bias.float(), rtol=1e-2, atol=0.1)
    d.sum().backward()
    torch.testing.assert_close(a.grad.float(), matrix.sum(0).expand(3, 128), rtol=1e-2, atol=0.1)
    assert torch.equal(bias.grad, torch.full_like(bias, 3))


def test_results_go_where_they_are_asked_to():
    a, weight = made('u4_1x128')
    out = torch.full((5, 24), torch.nan, device=DEVICE, dtype=BF16)
    assert gemm_dequant(a, weight, out=out) is out and torch.equal(out, gemm_dequant(a, weight))
    assert gemm_dequant(a[:0], weight).shape == (0, 24)


def test_what_is_not_multiplied_has_no_effect():
    """NaN in other rows and beside the rows of a view; a NaN of a row stays in that row."""
    wide = torch.full((6, 264), torch.nan, device=DEVICE, dtype=BF16)
    a, weight = made('e2m1_1x16_e4m3')
    wide[:5, :256] = a
    wide[2, 7] = torch.nan
    d = gemm_dequant(wide[:5, :256], weight)
    assert d[2].isnan().all() and torch.equal(d[[0, 1, 3, 4]], gemm_dequant(a, weight)[[0, 1, 3, 4]])


def test_blocks_fill_the_gpu():
    for n, k in ((8192, 8192), (8192, 16384), (7168, 20480), (8, 64), (2048, 7168)):
        form = FORMATS['u4_1x128']
        splits, cols = row_splits(n, k, form), form.tiles(n, k)[1]
        assert -(-cols // splits) * 64 <= 2048 and (splits - 1) * -(-cols // splits) < cols
    assert row_splits(8192, 8192, FORMATS['u4_1x128']) * 64 == 256


def test_the_result_does_not_depend_on_other_rows():
    a, weight = made('u4_1x32', m=16)
    assert torch.equal(gemm_dequant(a, weight)[:8], gemm_dequant(a[:8], weight))


def test_weights_of_many_experts_make_kernels():
    op = find_op('gemm.grouped_gemm_dequant')
    largest = max(cases_of(op).bench, key=lambda case: case['n'] * case['k'] * case['num_groups'])
    with on_gpu(gpu_named('sm_90a')):
        for launched in launches_of(op, largest):  # int32 cannot count the bits of these weights
            assert launched.kernel.tir(*launched.static, **launched.config) is not None


def test_floors_count_the_packed_bytes():
    with tracing() as launches:
        gemm_dequant(*made('u4_1x128', m=1, n=1024, k=2048))
    assert sum(launch.cost.flops or 0 for launch in launches) == 2 * 1024 * 2048
    assert launches[0].cost.bytes >= 1024 * 2048 // 2


def test_compiles_with_a_packed_weight():
    a, weight = made('s8_1xk', k=64)
    compiled = torch.compile(lambda x: gemm_dequant(x, weight), fullgraph=True, backend='aot_eager')
    with knobs(interpret=False):
        assert torch.equal(compiled(a), gemm_dequant(a, weight))


def test_autocast_rounds_the_input_to_its_dtype():
    a, weight = made('u4_1x64')
    bias = torch.randn(24, device=DEVICE, dtype=BF16)
    several = quantize_weight(torch.randn(2, 24, 256, device=DEVICE).to(BF16), 'u4_1x64')
    ends = torch.tensor([2, 5], device=DEVICE, dtype=torch.int32)
    with torch.autocast(DEVICE, BF16):
        d, grouped = gemm_dequant(a.float(), weight, bias.float()), grouped_gemm_dequant(a.float(), several, ends)
    assert torch.equal(d, gemm_dequant(a, weight, bias))
    assert torch.equal(grouped, grouped_gemm_dequant(a, several, ends))


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (lambda a, w: (a, a), 'gemm_dequant: weight must be a PackedWeight, got bfloat16'),
        (lambda a, w: (a.float(), w), 'gemm_dequant: a must be bfloat16 or float16'),
        (lambda a, w: (a[:, :64], w), r'a must be \(m, 256\)'),
        (lambda a, w: (torch.zeros(5, 257, dtype=BF16)[:, 1:], w), 'a must have rows that begin at multiples of 16'),
        (lambda a, w: (a, w, torch.zeros(25, dtype=BF16)), r'bias must be \(n\) with n = 24'),
        (lambda a, w: (a, w, torch.zeros(24).double()), 'bias must be bfloat16 or float32'),
        (lambda a, w: (a, quantize_weight(torch.ones(2, 8, 256), 'u4_1x128')), 'weight must be one matrix'),
    ],
)
def test_bad_arguments_are_told(change, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        gemm_dequant(*change(*made('u4_1x128')))
