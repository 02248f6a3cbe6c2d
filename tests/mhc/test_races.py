"""Kernels have no data race, and write every element of their results."""

import pytest
import torch

from tile_kernels import knobs, mhc
from tile_kernels.core.launch import forced_config
from tile_kernels.core.op import ops
from tile_kernels.mhc import norm_fn_slices_kernels as slices
from tile_kernels.mhc.pre_kernels import pre_streams_kernel
from tile_kernels.testing import contract

CASES = {case.op.name: case for case in contract.contract_cases('smoke') if case.op.name.startswith('mhc.')}


@pytest.mark.parametrize('case', CASES.values(), ids=CASES)
def test_kernels_are_free_of_races(case):
    with knobs(checks='all'):
        contract.check_kernel(case.op, case.case)


def test_all_ops_are_checked():
    assert set(CASES) == {name for name in ops if name.startswith('mhc.')}


@pytest.mark.parametrize('op', ['pre', 'norm_fn', 'post_pre'])
@pytest.mark.parametrize(
    ('num_tokens', 'hidden', 'n', 'tile', 'stages'),
    # two blocks, two wide ones, owners in every second tile; sizes that no other test builds
    [(90, 448, 4, 16, 3), (43, 832, 4, 8, 2), (60, 3584, 2, 8, 3)],
)
def test_what_blocks_send_finds_its_place_free(monkeypatch, op, num_tokens, hidden, n, tile, stages):
    """One cluster has more tiles than stages, so blocks send into buffers that were used before."""
    monkeypatch.setattr(slices, 'ACTIVE_CLUSTERS', dict.fromkeys(slices.ACTIVE_CLUSTERS, 1))
    width, k = n * (2 + n), n * hidden
    residual = torch.randn(num_tokens, n, hidden, dtype=torch.bfloat16)
    layer = torch.randn(num_tokens, hidden, dtype=torch.bfloat16), residual
    mixes = torch.randn(num_tokens, n, 1), torch.randn(num_tokens, n, n)
    fn, scale, base = torch.randn(width, k) * k**-0.5, torch.ones(3), torch.randn(width)
    calls = {
        'pre': lambda: mhc.pre(residual, fn, scale, base),
        'norm_fn': lambda: mhc.norm_fn(residual, fn),
        'post_pre': lambda: mhc.post_pre(*layer, *mixes, fn, scale, base),
    }
    with knobs(interpret=True, checks='all'), forced_config(pre_streams_kernel, tile=tile, stages=stages):
        calls[op]()
