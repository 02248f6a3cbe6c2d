"""Gradients of the projection over more tiles of tokens than a block has buffers for, which no smoke case reaches."""

import pytest

from tile_kernels import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.core.op import ops
from tile_kernels.mhc.norm_fn_bwd_device import norm_fn_bwd_kernel
from tile_kernels.testing import contract

CASE = dict(lead=(330,), hidden=64, num_streams=2)
CASES = {
    'mhc.norm_fn_bwd': CASE | dict(num_mixes=5),
    'mhc.norm_fn_bwd_': CASE | dict(num_mixes=5),
    'mhc.pre_bwd': CASE,
    'mhc.post_pre_bwd': CASE,
}


@pytest.mark.parametrize('op', CASES)
@pytest.mark.parametrize('num_stages', [2, 3])
def test_a_block_may_have_many_tiles(op, num_stages):
    with forced_config(norm_fn_bwd_kernel, parts=1, num_stages=num_stages), knobs(checks='all'):
        contract.check_kernel(ops[op], CASES[op])
