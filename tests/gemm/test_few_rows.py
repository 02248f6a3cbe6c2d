"""Products of up to 16 rows with the sum over k split: right in the interpreter, the same bits in every run."""

import pytest
import torch

from tile_kernels import gemm, knobs
from tile_kernels.core.launch import tracing
from tile_kernels.core.registry import load_ops
from tile_kernels.testing.contract import check_kernel

CASES = {
    'gemm.gemm': [dict(m=16, n=136, k=1096, dtype=torch.bfloat16), dict(m=9, n=8, k=8, dtype=torch.float16)],
    'gemm.gemm_fp8': [case for case in load_ops()['gemm.gemm_fp8'].case_set.smoke if case['m'] in range(1, 17)][:2],
    'gemm.grouped_gemm': [case for case in load_ops()['gemm.grouped_gemm'].case_set.smoke if case['num_rows'] == 13][
        :2
    ],
}


@pytest.mark.parametrize('name', CASES)
def test_kernels_for_few_rows_agree_with_the_twins(name):
    assert CASES[name]
    for case in CASES[name]:
        with knobs(few_rows=True):
            check_kernel(load_ops()[name], case)


@pytest.mark.parametrize('few, dense, grouped', [(None, True, False), (True, True, True), (False, False, False)])
def test_the_setting_chooses_them(few, dense, grouped):
    a, b = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(8, 64, dtype=torch.bfloat16)
    ends = torch.tensor([4], dtype=torch.int32)
    with knobs(few_rows=few), tracing() as launches:
        gemm.gemm(a, b)
        gemm.grouped_gemm(a, b[None], ends)
    first = ['few_rows_kernel' if few else 'grouped_gemm_kernel' for few in (dense, grouped)]
    assert [launch.kernel.name for launch in launches if launch.kernel.name != 'sum_splits_kernel'] == first
