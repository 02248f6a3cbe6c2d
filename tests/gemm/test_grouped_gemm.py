"""What the contract does not see: rows of one group never reach another, any sizes of groups, errors, cold starts."""

import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch

from tile_kernels import ArgumentError, knobs
from tile_kernels.core.jit import kernels
from tile_kernels.core.launch import on_gpu
from tile_kernels.gemm import grouped_gemm, grouped_gemm_bwd, grouped_gemm_fp8
from tile_kernels.reference import gemm as reference

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


@pytest.fixture(autouse=True)
def interpreting():
    with knobs(interpret=True, checks='races'):
        yield


def operands(num_rows=150, n=72, k=80, ends=(64, 64, 70, 149)):
    torch.manual_seed(0)
    a = torch.randn(num_rows, k, device=DEVICE, dtype=torch.bfloat16)
    b = torch.randn(len(ends), n, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5
    return a, b, torch.tensor(ends, device=DEVICE, dtype=torch.int32)


@pytest.mark.parametrize('ends', [(0, 0, 0), (150, 150, 150), (1, 2, 3), (63, 64, 65), (64, 128, 150), (0, 149, 150)])
@pytest.mark.parametrize('gpu', [None] if torch.cuda.is_available() else ['h200', 'a100'])
def test_any_sizes_of_groups(ends, gpu):
    with on_gpu(gpu) if gpu else nullcontext():
        check_sizes(ends)


def check_sizes(ends):
    a, b, group_end = operands(ends=ends)
    torch.testing.assert_close(grouped_gemm(a, b, group_end), reference.grouped_gemm(a, b, group_end))
    dd = torch.randn(150, 72, device=DEVICE, dtype=torch.bfloat16)
    expected = reference.grouped_gemm_bwd(dd, a, b, group_end)
    for actual, wanted in zip(grouped_gemm_bwd(dd, a, b, group_end), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=2e-2, atol=2e-2)


def test_a_poisoned_group_stays_alone():
    a, b, group_end = operands()
    dd = torch.randn(150, 72, device=DEVICE, dtype=torch.bfloat16)
    clean_d, (clean_da, clean_db) = grouped_gemm(a, b, group_end), grouped_gemm_bwd(dd, a, b, group_end)
    a[64:70], dd[64:70] = float('nan'), float('inf')  # all of group 2
    d, (da, db) = grouped_gemm(a, b, group_end), grouped_gemm_bwd(dd, a, b, group_end)
    others = torch.tensor([row for row in range(150) if not 64 <= row < 70], device=DEVICE)
    assert torch.equal(d[others], clean_d[others]) and torch.equal(da[others], clean_da[others])
    assert torch.equal(db[[0, 1, 3]], clean_db[[0, 1, 3]])
    assert d[64:70].isnan().all() and db[2].isnan().all()


def test_results_do_not_depend_on_the_neighbours():
    a, b, group_end = operands()
    alone = grouped_gemm(a[64:70].contiguous(), b[2:3].contiguous(), group_end.new_tensor([6]))
    assert torch.equal(grouped_gemm(a, b, group_end)[64:70], alone)


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (lambda a, b, e: (a.float(), b, e), 'a must be bfloat16 or float16'),
        (lambda a, b, e: (a, b.half(), e), 'b must be bfloat16'),
        (lambda a, b, e: (a[:, :72].contiguous(), b, e), r'b must be \(num_groups, n, k\) with k = 72'),
        (lambda a, b, e: (a, b, e.long()), 'group_end must be int32'),
        (lambda a, b, e: (a, b, e[:2]), r'group_end must be \(num_groups\) with num_groups = 4'),
        (lambda a, b, e: (a.T.contiguous().T, b, e), 'a must be contiguous'),
        (lambda a, b, e: (a[:, :7].contiguous(), b[..., :7].contiguous(), e), 'the bytes of a row of a must be'),
    ],
)
def test_bad_arguments_are_told(change, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        grouped_gemm(*change(*operands()))


def test_factors_of_another_shape_are_told():
    a, b, group_end = operands()
    codes = [x.to(torch.float8_e4m3fn) for x in (a, b)]
    with pytest.raises(ArgumentError, match='a_sf must be'):
        grouped_gemm_fp8(codes[0], a.float(), codes[1], torch.ones(4, 1, 1, device=DEVICE), group_end)


def test_a_kernel_with_tensor_maps_loads_without_tilelang():
    config = dict(block_m=64, block_n=128, ring=3)
    path = kernels['grouped_gemm_kernel'].library((64, 64, 2, True, torch.bfloat16), config, 'sm_90a')
    code = (
        'import sys; from pathlib import Path; from tile_kernels.core.nvcc import load_function;'
        f"load_function(Path({str(path)!r})); import tvm_ffi; print('tilelang' in sys.modules,"
        " tvm_ffi.get_global_func('__tvm_tensormap_create_tiled', allow_missing=True) is not None)"
    )
    out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ['False', 'True']


def test_an_odd_number_of_column_groups_reads_no_factors_behind_the_last():
    torch.manual_seed(0)
    ends = torch.tensor([5, 9], device=DEVICE, dtype=torch.int32)
    a, b = (torch.randn(*shape, 128, device=DEVICE).to(torch.float8_e4m3fn) for shape in ((9,), (2, 128)))
    a_sf, b_sf = torch.rand(9, 1, device=DEVICE) + 0.5, torch.rand(2, 1, 1, device=DEVICE) + 0.5
    expected = reference.grouped_gemm_fp8(a, a_sf, b, b_sf, ends)
    torch.testing.assert_close(grouped_gemm_fp8(a, a_sf, b, b_sf, ends), expected, rtol=2e-2, atol=2e-2)
