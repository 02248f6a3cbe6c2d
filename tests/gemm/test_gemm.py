"""What the contract does not see of the dense product and of the kernels for other GPUs."""

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.launch import on_gpu, tracing
from tile_kernels.gemm import (
    _macros,
    gemm,
    gemm_fp8,
    grouped_gemm,
    grouped_gemm_bwd,
    grouped_gemm_fp8,
    grouped_gemm_swiglu,
)
from tile_kernels.modeling import MoELayer

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True):
        yield


def test_floors_count_the_operations_of_products():
    a, b = torch.randn(2, 64, 128).to(torch.bfloat16)
    ends, dd = torch.tensor([10, 64], dtype=torch.int32), torch.randn(64, 64).to(torch.bfloat16)
    for op, arguments, products in (
        (gemm, (a, b), 1),
        (grouped_gemm, (a, torch.stack((b, b)), ends), 1),
        (grouped_gemm_bwd, (dd, a, torch.stack((b, b)), ends), 2),
    ):
        assert sum(launch.cost.flops for launch in op.trace(*arguments)) == products * 2 * 64 * 64 * 128
    (launch,) = gemm_fp8.trace_case({'m': 8192, 'n': 2048, 'k': 7168})
    assert launch.cost.floor_us() == pytest.approx(2 * 8192 * 2048 * 7168 / 1979e12 * 1e6)


def test_dense_is_a_group_of_all_rows():
    torch.manual_seed(0)
    a = torch.randn(200, 72, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(136, 72, device=DEVICE, dtype=torch.bfloat16)
    end = torch.tensor([200], device=DEVICE, dtype=torch.int32)
    assert torch.equal(gemm(a, b), grouped_gemm(a, b.unsqueeze(0), end))
    codes, sf = (a.to(FP8), b.to(FP8)), (torch.rand(200, 1, device=DEVICE), torch.rand(2, 1, device=DEVICE))
    codes = [torch.cat((x, x.new_zeros(x.shape[0], 8)), 1) for x in codes]  # rows of 16 bytes
    dense = gemm_fp8(codes[0], sf[0], codes[1], sf[1])
    assert torch.equal(dense, grouped_gemm_fp8(codes[0], sf[0], codes[1].unsqueeze(0), sf[1].unsqueeze(0), end))


def test_tiles_cover_every_band(monkeypatch):
    """More rows of tiles than a band holds, and a last band that is higher; the same behind other groups."""
    monkeypatch.setattr(_macros, 'BAND', 2)
    a = torch.randn(5 * 128 - 9, 24, device=DEVICE, dtype=torch.bfloat16)  # a shape no other test builds
    b = torch.randn(3, 2 * 256 + 8, 24, device=DEVICE, dtype=torch.bfloat16)
    torch.testing.assert_close(gemm(a, b[0]), (a.float() @ b[0].float().T).bfloat16(), rtol=2e-2, atol=2e-2)
    end = torch.tensor([65, 65, 600], device=DEVICE, dtype=torch.int32)
    expected = torch.cat([a[:65].float() @ b[0].float().T, a[65:600].float() @ b[2].float().T])
    d = grouped_gemm(a, b, end)
    torch.testing.assert_close(d[:600], expected.bfloat16(), rtol=2e-2, atol=2e-2)
    assert not d[600:].any()


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (lambda a, b: (a.float(), b), 'gemm.gemm: a must be bfloat16 or float16'),
        (lambda a, b: (a, b.half()), 'gemm.gemm: b must be bfloat16'),
        (lambda a, b: (a, b[:, :8].contiguous()), r'gemm.gemm: b must be \(n, k\) with k = 16'),
        (lambda a, b: (a.T.contiguous().T, b), 'gemm.gemm: a must be contiguous'),
        (lambda a, b: (a, b[:7].contiguous()), 'gemm.gemm: the bytes of a row of a must be a multiple of 16'),
    ],
)
def test_bad_arguments_are_told(change, sentence):
    operands = torch.zeros(32, 16, dtype=torch.bfloat16), torch.zeros(8, 16, dtype=torch.bfloat16)
    with pytest.raises(ArgumentError, match=sentence):
        gemm(*change(*operands))


@pytest.mark.parametrize('gpu', [name for name, gpu in GPUS.items() if gpu.arch != 90])
def test_other_gpus_run_other_kernels(gpu):
    a, b = torch.zeros(24, 16, dtype=torch.bfloat16), torch.zeros(2, 16, 16, dtype=torch.bfloat16)
    end = torch.tensor([4, 24], dtype=torch.int32)
    layer = MoELayer(4, 2, 128, compute='fp8').eval()
    layer.experts.prepare_fp8()
    with torch.no_grad(), on_gpu(gpu), tracing() as launches:
        gemm(a, b[0])
        grouped_gemm(a, b, end)
        grouped_gemm_bwd(a, a, b, end)
        grouped_gemm_swiglu(a, b, end)
        layer(torch.zeros(20, 128, dtype=torch.bfloat16))
    products = [launch.kernel for launch in launches if launch.kernel.__module__.startswith('tile_kernels.gemm')]
    assert len(products) == 7 and all(kernel.name.startswith('portable_') for kernel in products)
