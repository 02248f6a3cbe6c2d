"""Gradients of the projection over more tiles of tokens than a block has buffers for, which no smoke case reaches."""

import itertools

import pytest

from tile_kernels import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.core.op import ops
from tile_kernels.mhc.norm_fn_bwd_device import norm_fn_bwd_kernel
from tile_kernels.testing import contract

CASE = dict(lead=(330,), hidden=64, num_streams=2, num_mixes=5)


@pytest.mark.parametrize('op', ['mhc.norm_fn_bwd', 'mhc.norm_fn_bwd_'])
@pytest.mark.parametrize(('num_stages', 'in_place'), itertools.product((2, 3), (False, True)))
def test_a_block_may_have_many_tiles(op, num_stages, in_place):
    config = dict(parts=1, num_stages=num_stages, in_place=in_place)
    with forced_config(norm_fn_bwd_kernel, **config), knobs(checks='all'):
        contract.check_kernel(ops[op], CASE)
