"""The projection beyond smoke cases: all float32 numbers, and more tiles than stages."""

import re

import pytest
import torch

from tile_kernels import knobs, mhc
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.launch import forced_config, on_gpu
from tile_kernels.core.op import ops
from tile_kernels.mhc.norm_fn import _make_bwd, norm_fn_bwd
from tile_kernels.mhc.norm_fn_bwd_kernels import norm_fn_bwd_kernel
from tile_kernels.reference import mhc as twin
from tile_kernels.testing import contract

CASE = dict(lead=(330,), hidden=64, num_streams=2)
CASES = {
    'mhc.norm_fn_bwd': CASE | dict(num_mixes=5),
    'mhc.norm_fn_bwd_': CASE | dict(num_mixes=5),
    'mhc.pre_bwd': CASE,
    'mhc.post_pre_bwd': CASE,
}


@pytest.mark.parametrize('op', CASES)
@pytest.mark.parametrize(('parts', 'num_stages'), [(1, 2), (1, 3), (2, 3), (4, 3)])
def test_a_block_may_have_many_tiles(op, parts, num_stages):
    with forced_config(norm_fn_bwd_kernel, parts=parts, num_stages=num_stages), knobs(checks='all'):
        contract.check_kernel(ops[op], CASES[op])


@pytest.mark.parametrize(('parts', 'exact'), [(2, True), (3, True), (4, False)])
def test_parts_of_dfn_are_summed_by_pairs_of_blocks_or_by_a_kernel(parts, exact):
    """Two parts, or three, have one order; four are summed in pairs where there are clusters."""
    torch.manual_seed(0)
    given = _make_bwd(**CASES['mhc.norm_fn_bwd'])
    found, names = {}, {}
    for arch in ('sm_80', 'sm_90a'):
        with forced_config(norm_fn_bwd_kernel, parts=parts, num_stages=3), knobs(interpret=True), on_gpu(arch):
            names[arch] = [launch.kernel.name for launch in norm_fn_bwd.trace(**given)]
            found[arch] = norm_fn_bwd(**given)
    assert ('sum_dfn_kernel' in names['sm_90a']) == (parts == 3)
    assert 'sum_dfn_kernel' in names['sm_80']
    for one, other in zip(found['sm_80'], found['sm_90a'], strict=True):
        torch.testing.assert_close(one, other, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-5)


def test_a_pair_of_blocks_waits_before_it_writes_and_before_it_reads():
    """The interpreter does not see that shared memory is reused."""
    source = norm_fn_bwd_kernel.source((1024, 24, '', 0, True), 4096, parts=4, num_stages=3)
    end = source[source.rindex('tl::cluster_arrive()') :].replace('send_four((&(((float*)sent_shared)[', 'send(')
    places = [end.index(step) for step in ('tl::cluster_wait()', 'send(', 'all_sent[0].wait(0)', 'sent_shared)[')]
    assert places == sorted(places)


def test_products_see_what_was_copied_and_dfn_waits_for_them():
    """The interpreter does not see that wgmma needs a fence, nor that dfn reuses the memory of tiles."""
    source = norm_fn_bwd_kernel.source((1024, 24, '', 0, True), 4096, parts=4, num_stages=3)
    loop = source[source.index('cp_async_wait<') :]
    assert re.match(r'cp_async_wait<\d+>\(\);\s+tl::fence_proxy_async\(\);\s+__syncthreads\(\);', loop)
    before_dfn = loop[: loop.index('((float*)dfn_shared)[')]
    assert before_dfn.rindex('x_shared') < before_dfn.rindex('__syncthreads();')


@pytest.mark.parametrize('hidden', [320, 704])  # low parts of fn in registers, and encoded
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


def shifted(x):
    """The same numbers, two bytes behind a multiple of 16."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(
    ('op', 'name'),
    [
        ('norm_fn', 'residual'),
        ('norm_fn', 'fn'),
        ('norm_fn_bwd_', 'dresidual'),
        ('pre_bwd', 'dlayer_input'),
        ('post_pre_bwd', 'dy'),
        ('post_pre_bwd', 'dlayer_input'),
    ],
)
def test_misaligned_views_are_refused(op, name):
    found = ops[f'mhc.{op}']
    case = next(case for case in found.case_set.smoke if 0 not in case['lead'])
    arguments = found.case_set.make(**case)
    arguments[name] = shifted(arguments[name])
    with pytest.raises(ArgumentError, match='must start at a multiple of 16 bytes'):
        found(**arguments)
