"""Fused ops have the bits of their parts, and low-level functions write what the ops return."""

from dataclasses import replace

import pytest
import torch

from tile_kernels import mhc
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.gpus import GPUS
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config, on_gpu
from tile_kernels.core.op import ops
from tile_kernels.mhc import pre_kernels
from tile_kernels.mhc.apply_mix import apply_mix_bwd
from tile_kernels.mhc.big_fuse import big_fuse
from tile_kernels.mhc.norm_fn import norm_fn_bwd
from tile_kernels.mhc.post import post_bwd
from tile_kernels.mhc.pre import pre_bwd
from tile_kernels.mhc.pre_kernels import goes_in_one_pass, pre_streams_kernel
from tile_kernels.mhc.recompute import mhc_multilayer_recompute
from tile_kernels.mhc.reduce_parts import reduce_parts_bwd_kernel, reduce_parts_kernel
from tile_kernels.mhc.sinkhorn import sinkhorn_bwd
from tile_kernels.mhc.split_mixes import split_mixes_bwd
from tile_kernels.testing.numeric import assert_equal
from tile_kernels.testing.poison import poisoned

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def kernels():
    torch.manual_seed(0)
    with knobs(interpret=True), poisoned():
        yield


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def assert_all_equal(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert_equal(one, other)


def pre_inputs(num_tokens, hidden, n):
    width, k = n * (2 + n), n * hidden
    residual, fn = randn(num_tokens, n, hidden, dtype=BF16), randn(width, k) * k**-0.5
    return residual, fn, randn(3).abs() + 0.5, randn(width) * 0.1


@pytest.mark.parametrize(
    ('num_tokens', 'hidden', 'n'), [(70, 64, 2), (5, 192, 4), (9, 576, 4), (9, 704, 4), (9, 1088, 4), (33, 128, 8)]
)
def test_big_fuse_has_the_bits_of_its_parts(num_tokens, hidden, n):
    residual, fn, scale, base = pre_inputs(num_tokens, hidden, n)
    mixes, _ = mhc.norm_fn(residual, fn, 1e-6)
    pre, post_mix, z = mhc.split_mixes(mixes, scale, base, n, 2.0, 1e-6)
    comb = mhc.sinkhorn(z, 7, 1e-6)
    found = big_fuse(residual, fn, scale, base, 7, 1e-6, 1e-6, 1e-6, 2.0)
    for actual, expected in zip(found, (post_mix, comb, mhc.apply_mix(residual, pre)), strict=True):
        assert_equal(actual, expected)


@pytest.mark.parametrize(
    ('num_tokens', 'hidden', 'n'), [(35, 64, 2), (270, 64, 2), (40, 256, 4), (70, 576, 4), (70, 704, 4), (3, 64, 8)]
)
def test_post_pre_has_the_bits_of_its_parts(num_tokens, hidden, n):
    residual, fn, scale, base = pre_inputs(num_tokens, hidden, n)
    layer = randn(num_tokens, hidden, dtype=BF16), residual, randn(num_tokens, n, 1), randn(num_tokens, n, n)
    y, layer_input, post_mix, comb, pre, mixes, rstd = mhc.post_pre(*layer, fn, scale, base, 7, post_mult=2.0)
    assert_equal(y, mhc.post(*layer))
    assert_all_equal((mixes, rstd), mhc.norm_fn(y, fn, 1e-6))
    parts = mhc.split_mixes(mixes, scale, base, n, 2.0, 1e-6)
    assert_all_equal((pre, post_mix), parts[:2])
    assert_equal(comb, mhc.sinkhorn(parts[2], 7, 1e-6))
    assert_equal(layer_input, mhc.apply_mix(y, pre))


@pytest.mark.parametrize(('num_tokens', 'hidden', 'n'), [(1, 64, 2), (37, 64, 4), (9, 192, 4), (19, 64, 8)])
def test_gradients_of_pre_are_those_of_its_parts(num_tokens, hidden, n):
    residual, fn, scale, base = pre_inputs(num_tokens, hidden, n)
    upstream = randn(num_tokens, hidden, dtype=BF16), randn(num_tokens, n, 1), randn(num_tokens, n, n)
    *_, pre, mixes, rstd = mhc.pre(residual, fn, scale, base, 7, post_mult=2.0)
    saved = dict(repeat=7, sinkhorn_eps=1e-6, post_mult=2.0)
    _, dfn, dscale, dbase = pre_bwd(*upstream, residual, fn, scale, base, pre, mixes, rstd, **saved)

    _, dpre = apply_mix_bwd(upstream[0], residual, pre)
    z = mhc.split_mixes(mixes, scale, base, n, 2.0, 1e-6)[2]
    dz = sinkhorn_bwd(upstream[2], z, 7, 1e-6)
    dmixes, *expected = split_mixes_bwd(dpre, upstream[1], dz, mixes, scale, base, 2.0)
    assert_equal(dfn, norm_fn_bwd(dmixes, residual, fn, mixes, rstd)[1])
    for actual, wanted in zip((dscale, dbase), expected, strict=True):  # sums in another order
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ('changed', 'sentence'),
    [
        (dict(repeat=0), 'repeat must be at least 1'),
        (dict(repeat=2000), 'repeat must be at most'),
        (dict(dpost=torch.zeros(4, 4, 1)), 'dpost must be'),
        (dict(mixes=torch.zeros(4, 24)), 'mixes must be'),
        (dict(dlayer_input=torch.zeros(5, 32, dtype=BF16)), 'dlayer_input must be'),
    ],
)
def test_gradients_of_pre_refuse_what_does_not_fit(changed, sentence):
    residual, fn, scale, base = pre_inputs(5, 64, 4)
    layer_input, post_mix, comb, pre, mixes, rstd = mhc.pre(residual, fn, scale, base)
    given = dict(dlayer_input=layer_input, dpost=post_mix, dcomb=comb, residual=residual, fn=fn, scale=scale, base=base)
    changed = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in changed.items()}
    with pytest.raises(ArgumentError, match=sentence):
        pre_bwd(**given | dict(pre=pre, mixes=mixes, rstd=rstd) | changed)


def test_gradients_of_pre_take_misaligned_coefficients():
    residual, fn, scale, base = pre_inputs(5, 64, 4)
    upstream = randn(5, 64, dtype=BF16), randn(5, 4, 1), randn(5, 4, 4)
    saved = mhc.pre(residual, fn, scale, base)[3:]
    expected = pre_bwd(*upstream, residual, fn, scale, base, *saved)
    shifted = torch.empty(5 * 16 + 1, device=DEVICE)[1:].view(5, 4, 4).copy_(upstream[2])
    assert_all_equal(pre_bwd(*upstream[:2], shifted, residual, fn, scale, base, *saved), expected)


@pytest.mark.parametrize('name', ['pre', 'pre_bwd', 'post_pre', 'post_pre_bwd'])
def test_four_streams_fit_gpus_with_99_kb_of_shared_memory(name):
    op = ops[f'mhc.{name}']
    with on_gpu('sm_120a'):
        widest = op.case_set.bench if knobs.full_test else [max(op.case_set.bench, key=lambda case: case['hidden'])]
        launches = [launch for case in widest for launch in op.trace_case(case)]
    variants = {(launch.kernel, launch.static, tuple(launch.config.items())) for launch in launches}
    for kernel, static, config in variants:
        assert kernel._lower(static, dict(config), 'sm_120a')[1] <= 99 << 10, (kernel.name, static)


def test_wide_slices_over_more_tiles_than_there_is_room_for():
    residual, fn, scale, base = pre_inputs(1100, 704, 4)
    with forced_config(pre_streams_kernel, tile=8, stages=2):
        found = mhc.pre(residual, fn, scale, base)
        assert_all_equal(found[4:], mhc.norm_fn(residual, fn))
    assert_all_equal(mhc.pre(residual, fn, scale, base), found)


@pytest.mark.parametrize('stages', [3, 4])
def test_clusters_that_take_more_tiles_than_they_have_room_for(stages):
    residual, fn, scale, base = pre_inputs(500, 2560, 2)  # seven clusters
    layer = randn(500, 2560, dtype=BF16), residual, randn(500, 2, 1), randn(500, 2, 2)
    with forced_config(pre_streams_kernel, tile=16, stages=stages):
        found = mhc.post_pre(*layer, fn, scale, base)
        again = mhc.pre(found[0], fn, scale, base)
        mixes_only = mhc.norm_fn(found[0], fn)
    assert_equal(found[0], mhc.post(*layer))
    assert_all_equal(found[1:], again)
    assert_all_equal(found[5:], mixes_only)
    with on_gpu('sm_80'):
        assert_all_equal(found[5:], mhc.norm_fn(found[0], fn))


@pytest.mark.parametrize(('shape', 'tile', 'kept'), [((300, 64, 2), 64, 1), ((331, 4096, 2), 8, 2)])
def test_chains_of_tokens_that_are_too_many_to_be_kept(monkeypatch, shape, tile, kept):
    inputs = [x.cpu() for x in pre_inputs(*shape)]  # on a GPU the cache of libraries would keep the changed kernel
    expected = mhc.pre(*inputs)
    monkeypatch.setattr(pre_kernels, 'KEPT', kept)
    with forced_config(pre_streams_kernel, tile=tile, stages=5):  # a config that no other test builds
        assert_all_equal(mhc.pre(*inputs), expected)


def test_a_gpu_without_large_clusters_takes_two_passes():
    inputs = [x.cpu() for x in pre_inputs(5, 64, 4)]  # on a GPU that GPU would count
    names = {}
    for arch in ('sm_80', 'sm_90a', 'sm_100a', 'sm_120a'):
        with on_gpu(arch):
            names[arch] = [launch.kernel.name for launch in big_fuse.trace(*inputs)]
    assert names['sm_90a'] == names['sm_100a'] == ['pre_streams_kernel']
    assert names['sm_80'] == names['sm_120a'] == ['project_slices_kernel', 'mix_and_apply_kernel']


@pytest.mark.parametrize(('num_sms', 'hidden', 'one_pass'), [(132, 4096, True), (78, 4096, False), (78, 2048, True)])
def test_a_part_of_a_gpu_takes_clusters_it_can_place(num_sms, hidden, one_pass):
    residual, fn = torch.empty(5, 4, hidden, dtype=BF16), torch.empty(24, 4 * hidden)
    with on_gpu(replace(GPUS['h200'], sms=num_sms)):
        assert goes_in_one_pass(residual, fn) == one_pass


def test_post_pre_of_misaligned_views_takes_the_kernels_of_both_ops():
    residual, fn, scale, base = pre_inputs(5, 64, 4)
    x, mixes = randn(5, 64, dtype=BF16), (randn(5, 4, 1), randn(5, 4, 4))
    shifted = torch.empty(5 * 64 + 1, dtype=BF16, device=DEVICE)[1:].view(5, 64).copy_(x)
    for expected, layer in (('pre_streams_kernel', x), ('post_kernel', shifted)):
        launches = mhc.post_pre.trace(layer, residual, *mixes, fn, scale, base)
        assert launches[0].kernel.name == expected
    assert_equal(mhc.post_pre(shifted, residual, *mixes, fn, scale, base)[0], mhc.post(x, residual, *mixes))


def test_a_token_has_the_same_bits_in_every_batch():
    residual, fn, scale, base = pre_inputs(40, 192, 4)
    together = mhc.pre(residual, fn, scale, base)
    for actual, expected in zip(mhc.pre(residual[17:19].clone(), fn, scale, base), together, strict=True):
        assert_equal(actual, expected[17:19].clone())


@pytest.mark.parametrize(('num_layers', 'num_posts'), [(1, 0), (3, 2), (8, 8)])
def test_recompute_has_the_bits_of_its_parts(num_layers, num_posts):
    lead, n, hidden = (2, 3), 4, 128
    initial = randn(*lead, n, hidden, dtype=BF16)
    pre = [randn(*lead, n, 1).sigmoid() for _ in range(num_layers)]
    outputs = [randn(*lead, hidden, dtype=BF16) for _ in range(num_posts)]
    post_mix = [randn(*lead, n, 1).sigmoid() for _ in range(num_posts)]
    comb = [randn(*lead, n, n).softmax(-1) for _ in range(num_posts)]
    inputs = [torch.empty(*lead, hidden, dtype=BF16, device=DEVICE) for _ in range(num_layers)]
    residuals = [torch.empty_like(initial) for _ in range(num_posts)]
    mhc_multilayer_recompute(initial, pre, outputs, post_mix, comb, inputs, residuals)
    residual = initial
    for layer in range(num_layers):
        assert_equal(inputs[layer], mhc.apply_mix(residual, pre[layer]))
        if layer < num_posts:
            residual = mhc.post(outputs[layer], residual, post_mix[layer], comb[layer])
            assert_equal(residuals[layer], residual)


def test_recompute_counts_its_lists():
    x = randn(2, 4, 64, dtype=BF16)
    with pytest.raises(
        ArgumentError, match=r'mhc\.mhc_multilayer_recompute: the length of pre_mix_list must be at least 1'
    ):
        mhc_multilayer_recompute(x, [], [], [], [], [], [])
    with pytest.raises(ArgumentError, match='the length of layer_input_list must be 1, got 0'):
        mhc_multilayer_recompute(x, [randn(2, 4, 1)], [], [], [], [], [])


def test_low_level_forms_write_what_the_ops_return():
    n, hidden, num_tokens = 4, 64, 5
    x, residual = randn(num_tokens, hidden, dtype=BF16), randn(num_tokens, n, hidden, dtype=BF16)

    out = torch.empty_like(residual)
    mhc.expand_to_mhc_fwd(x, out)
    assert_equal(out, mhc.expand(x, n))
    back = torch.empty_like(x)
    mhc.expand_to_mhc_bwd(residual, back)
    torch.testing.assert_close(back, residual.float().sum(1).to(BF16))

    mix = randn(num_tokens, n)
    mhc.mhc_pre_apply_mix_fwd(residual, mix, back)
    assert_equal(back, mhc.mhc_mix_apply(residual, mix.unsqueeze(-1)))
    grad = randn(num_tokens, n, hidden, dtype=BF16)
    before = grad.clone()
    dmix = mhc.mhc_pre_apply_mix_bwd(x, residual, mix, grad)
    dx, expected = apply_mix_bwd(x, residual, mix.unsqueeze(-1))
    assert_equal(dmix, expected.squeeze(-1))
    torch.testing.assert_close(grad.float(), before.float() + dx.float(), atol=2e-2, rtol=2e-2)

    post_mix, comb = randn(num_tokens, n, 1), randn(num_tokens, n, n)
    assert mhc.mhc_post_fwd(x, residual, post_mix, comb, out) is out
    assert_equal(out, mhc.post(x, residual, post_mix, comb))
    for actual, expected in zip(
        mhc.mhc_post_bwd(x, residual, post_mix, comb, out),
        post_bwd(out, x, residual, post_mix, comb),
        strict=True,
    ):
        assert_equal(actual, expected)

    z, z_out = randn(num_tokens, n, n), torch.empty(num_tokens, n, n, device=DEVICE)
    mhc.mhc_sinkhorn_fwd(z, z_out, 5, 1e-6)
    assert_equal(z_out, mhc.sinkhorn_normalize(z, 5))
    mhc.mhc_sinkhorn_bwd(z, z, z_out, 5, 1e-6)
    assert torch.isfinite(z_out).all()


X, Z = torch.zeros(3, 64, dtype=BF16), torch.zeros(3, 4, 4)
STREAMS, MIX = torch.zeros(3, 4, 64, dtype=BF16), torch.zeros(3, 4, 1)
REFUSED = {
    r'mhc\.expand_to_mhc_fwd: o must be \(3, 4, 64\) bfloat16': lambda: mhc.expand_to_mhc_fwd(X, STREAMS[:2]),
    r'mhc\.expand_to_mhc_fwd: o must be \(..., n, hidden\)': lambda: mhc.expand_to_mhc_fwd(X, X[0]),
    r'mhc\.mhc_post_fwd: out must be \(3, 4, 64\) bfloat16': lambda: mhc.mhc_post_fwd(X, STREAMS, MIX, Z, X + 0),
    r'mhc\.mhc_sinkhorn_fwd: out must be \(3, 4, 4\) float32': lambda: mhc.mhc_sinkhorn_fwd(Z, Z[:2], 3, 1e-6),
    r'mhc\.mhc_multilayer_recompute: pre_mix_list\[0\] must be a tensor, got None': lambda: mhc_multilayer_recompute(
        STREAMS, [None], [X], [MIX], [Z], [X], [STREAMS]
    ),
    r'mhc\.mhc_multilayer_recompute: layer_input_list\[0\] must be \(..., hidden\)': lambda: mhc_multilayer_recompute(
        STREAMS, [MIX], [X], [MIX], [Z], [X[:1]], [STREAMS]
    ),
}


@pytest.mark.parametrize(('sentence', 'call'), REFUSED.items(), ids=range(len(REFUSED)))
def test_low_level_forms_name_the_argument_that_is_wrong(sentence, call):
    with pytest.raises(ArgumentError, match=f'^{sentence}'):
        call()


def test_recompute_compiles_into_one_graph():
    inputs, residuals = torch.empty_like(X), torch.empty_like(STREAMS)
    lists = [torch.ones(3, 4, 1)], [X + 1], [torch.ones(3, 4, 1)], [Z], [inputs], [residuals]
    with knobs(interpret=False):
        torch.compile(mhc_multilayer_recompute, fullgraph=True, backend='aot_eager')(STREAMS + 1, *lists)
    assert (inputs == 4).all() and (residuals == 1).all()


def test_mixes_in_memory_of_the_caller():
    n, num_tokens = 4, 6
    mixes, scale, base = randn(num_tokens, 24), randn(3), randn(24)
    pre, post_mix, comb = (torch.empty(num_tokens, width, device=DEVICE) for width in (n, n, n * n))
    mhc.mhc_pre_split_mixes_fwd(mixes, scale, base, pre, post_mix, comb, 2.0, 1e-6)
    expected = mhc.mhc_mix_split(mixes, scale, base, n, post_mult=2.0)
    for actual, value in zip((pre, post_mix, comb), expected, strict=True):
        assert_equal(actual, value.reshape(actual.shape))
    leaves = [t.clone().requires_grad_() for t in (mixes, scale, base)]
    upstream = [torch.randn_like(value) for value in expected]
    torch.autograd.backward(mhc.mhc_mix_split(*leaves, n, post_mult=2.0), upstream)
    grads = [torch.empty_like(t) for t in leaves]
    mhc.mhc_pre_split_mixes_bwd(*upstream, mixes, post_mix, scale, base, *grads, 2.0)
    for actual, leaf in zip(grads, leaves, strict=True):
        assert_equal(actual, leaf.grad)

    mix, head_scale, head_base = randn(num_tokens, n), randn(1), randn(n)
    out = torch.empty_like(mix)
    mhc.mhc_head_compute_mix_fwd(mix, head_scale, head_base, out, 1e-6)
    assert_equal(out, mhc.head_mix(mix, head_scale, head_base, 1e-6))
    dmix, parts = torch.empty_like(mix), (torch.empty(7, 1, device=DEVICE), torch.empty(7, n, device=DEVICE))
    mhc.mhc_head_compute_mix_bwd(out, mix, head_scale, head_base, dmix, *parts, 7)
    leaves = [t.clone().requires_grad_() for t in (mix, head_scale, head_base)]
    mhc.head_mix(*leaves).backward(out)
    assert_equal(dmix, leaves[0].grad)
    torch.testing.assert_close(parts[0].sum(0), leaves[1].grad)
    torch.testing.assert_close(parts[1].sum(0), leaves[2].grad)


def test_a_projection_from_outside_continues_in_big_fuse():
    n, hidden, num_tokens = 4, 192, 33  # 1 / (n hidden) is not a float
    residual, fn, scale, base = pre_inputs(num_tokens, hidden, n)
    from tile_kernels.reference import mhc_pre_norm_fn_partials_ref

    mul, square = (t.contiguous() for t in mhc_pre_norm_fn_partials_ref(residual, fn, 4))
    post_mix, comb = torch.empty(num_tokens, n, device=DEVICE), torch.empty(num_tokens, n * n, device=DEVICE)
    layer_input = torch.empty(num_tokens, hidden, dtype=BF16, device=DEVICE)
    mhc.mhc_pre_big_fuse_fwd(
        mul, square, scale, base, residual, post_mix, comb, layer_input, 1e-6, 1e-6, 1e-6, 1.0, 10, 4
    )
    expected = big_fuse(residual, fn, scale, base)
    for actual, value in zip((post_mix, comb, layer_input), expected, strict=True):
        torch.testing.assert_close(actual, value.reshape(actual.shape), rtol=1e-2, atol=1e-2)

    out_mul, sqrsum = torch.empty(num_tokens, 1, 24, device=DEVICE), torch.empty(num_tokens, 1, device=DEVICE)
    out = torch.empty(num_tokens, 24, device=DEVICE)
    mhc.mhc_reduce_partials_and_rmsnorm_fwd(
        mul.unsqueeze(2).contiguous(),
        square.unsqueeze(2).contiguous(),
        out_mul,
        sqrsum,
        out,
        n * hidden,
        1e-6,
        4,
    )
    torch.testing.assert_close(out, mhc.norm_fn(residual, fn)[0], rtol=1e-3, atol=2e-3)
    pre, post_alone, z = mhc.split_mixes(out, scale, base, n, 1.0, 1e-6)
    assert_equal(post_mix, post_alone.squeeze(-1))
    assert_equal(comb, mhc.sinkhorn(z, 10, 1e-6).flatten(1))
    assert_equal(layer_input, mhc.apply_mix(residual, pre))
    dmul, dsquare = torch.empty_like(out_mul), torch.empty_like(sqrsum)
    mhc.mhc_reduce_partials_and_rmsnorm_bwd(out, out_mul, sqrsum, dmul, dsquare, n * hidden, 1e-6)
    assert torch.isfinite(dmul).all() and torch.isfinite(dsquare).all()

    weight, merged = randn(n * hidden), torch.empty_like(fn)
    mhc.mhc_fn_normw_merge_fwd(fn, weight, merged)
    assert_equal(merged, fn * weight)
    dfn, dweight = torch.zeros_like(fn), torch.zeros_like(weight)
    mhc.mhc_fn_normw_merge_bwd(fn, weight, merged, dfn, dweight)
    torch.testing.assert_close(dweight, (merged * fn).sum(0))


def test_no_compiler_rounds_the_norm_of_parts_differently():
    """The interpreter does not fuse a product with a sum; nvcc would."""
    for kernel in (reduce_parts_kernel, reduce_parts_bwd_kernel):
        assert 'rsqrtf(__fadd_rn(__fmul_rn(' in kernel.source((1, 24))


def test_equal_calls_give_equal_bits():
    residual, fn, _, _ = pre_inputs(130, 64, 4)
    mixes, rstd = mhc.norm_fn(residual, fn)
    dmixes = randn(130, 24)
    first = norm_fn_bwd(dmixes, residual, fn, mixes, rstd)
    for _ in range(50 if DEVICE == 'cuda' else 2):
        for actual, expected in zip(norm_fn_bwd(dmixes, residual, fn, mixes, rstd), first, strict=True):
            assert_equal(actual, expected)
    inputs = randn(130, 64, dtype=BF16), *pre_inputs(130, 64, 4)
    coefficients = randn(130, 4, 1), randn(130, 4, 4)
    fused = mhc.post_pre(*inputs[:2], *coefficients, *inputs[2:])
    for _ in range(50 if DEVICE == 'cuda' else 1):
        assert_all_equal(mhc.post_pre(*inputs[:2], *coefficients, *inputs[2:]), fused)


@pytest.mark.parametrize(('hidden', 'kind'), [(5120, 'post_pre'), (7168, 'pre'), (704, 'pre')])
def test_the_fullest_blocks_fit(hidden, kind):
    used = pre_streams_kernel.resources((hidden, 4, 24, kind))
    assert used['dynamic_shared'] + used['static_shared'] <= 227 << 10


@pytest.mark.parametrize(('kind', 'barrier'), [('pre', 'fn_used'), ('post_pre', 'fn_used'), ('post_pre', 'in_place')])
def test_what_threads_used_is_fenced_before_a_copy_may_come_there(kind, barrier):
    source = pre_streams_kernel.source((256, 4, 24, kind)).splitlines()
    arrivals = [number for number, line in enumerate(source) if barrier in line and '.arrive()' in line]
    assert arrivals
    assert all('fence_proxy_async' in source[number - 1] for number in arrivals)
