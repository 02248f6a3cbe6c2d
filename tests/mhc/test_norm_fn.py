"""The projection where smoke cases do not reach: numbers of every kind, and more tiles than there are buffers for."""

import pytest
import torch

from tile_kernels import knobs, mhc
from tile_kernels.core.launch import forced_config
from tile_kernels.core.op import ops
from tile_kernels.mhc.norm_fn_bwd_device import norm_fn_bwd_kernel
from tile_kernels.testing import contract
from tile_kernels.torch.mhc import projection as twin

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


@pytest.mark.parametrize('hidden', [320, 704])  # low parts of fn in registers, and coded
def test_fn_is_what_tf32_makes_of_it(hidden):
    """A token that is 1 in one channel has that column of fn for its mixes."""
    torch.manual_seed(0)
    num_streams, num_mixes = 2, 24
    k = num_streams * hidden
    bits = torch.randint(0, 1 << 23, (num_mixes, k)) | torch.randint(64, 190, (num_mixes, k)) << 23
    fn = (bits - (torch.randint(0, 2, bits.shape) << 31)).to(torch.int32).view(torch.float32)
    fn[:, 5] = 0.0
    fn[::2, 6], fn[1::2, 6] = -0.0, 1.0
    fn[:, 7] = 2.0 ** (torch.arange(num_mixes) - 12)
    fn[:, 8] = torch.nextafter(fn[:, 7], torch.tensor(0.0))
    residual = torch.eye(k, dtype=torch.bfloat16)[:40].view(40, num_streams, hidden)
    with knobs(interpret=True):
        mixes, rstd = mhc.norm_fn(residual, fn)
    rounded = ((fn.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
    assert torch.equal(mixes, rounded.T[:40] * rstd[:, None])


@pytest.mark.parametrize('hidden', [320, 576, 704, 1088])
@pytest.mark.parametrize('bits', [0x7FFFFFFF, 0x7FC00000, -1])
def test_a_fn_that_is_no_number_is_seen(hidden, bits):
    residual = torch.ones(3, 4, hidden, dtype=torch.bfloat16)
    fn = torch.zeros(24, 4 * hidden)
    fn.view(torch.int32)[7, 11] = bits
    with knobs(interpret=True):
        mixes, _ = mhc.norm_fn(residual, fn)
    assert mixes.isnan().any(0).nonzero().tolist() == [[7]]
    assert torch.equal(twin.norm_fn(residual, fn)[0].isnan(), mixes.isnan())
