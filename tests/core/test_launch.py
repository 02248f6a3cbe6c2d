"""Which variant of a kernel runs, with which config, on which GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tile_kernels
from tile_kernels import knobs
from tile_kernels.core import gpus, jit, launch
from tile_kernels.core.errors import ArgumentError, LaunchError, UnsupportedError
from tile_kernels.core.gpus import GPUS, cuda_gpu, gpu_named
from tile_kernels.core.launch import config_for, on_gpu, tracing, variant_for
from tile_kernels.core.op import ops

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)

STATIC = (32, 4)


@pytest.fixture
def variants(sample):
    """Three kernels of one launch: for Hopper, for what is older with a wide row, and for all else."""

    def declare(name, serves, **options):
        def builder(hidden: int, mult: int, *, num_threads: int):
            return sample.spread_kernel.builder(hidden, mult, num_threads=num_threads)

        builder.__name__ = name
        choose = options.get('choose', lambda hidden, mult, size: {'num_threads': 64})
        return jit.Kernel(builder, choose, {'num_threads': (64, 128)}, {}, serves)

    return (
        declare('for_hopper', lambda static, gpu: gpu.has_wgmma),
        declare('for_wide_rows', lambda static, gpu: gpu.arch < 90 and static.hidden >= 64),
        declare('for_all', None, choose=lambda hidden, mult, size, gpu: {'num_threads': 128 if gpu.sms > 100 else 64}),
    )


@pytest.mark.parametrize(
    ('gpu', 'static', 'name'),
    [
        ('h200', (32, 4), 'for_hopper'),
        ('sm_90', (128, 4), 'for_hopper'),
        ('a100', (64, 4), 'for_wide_rows'),
        ('a100', (32, 4), 'for_all'),
        ('sm_120a', (64, 4), 'for_all'),
    ],
)
def test_the_variant_that_claims_a_call_runs(variants, gpu, static, name):
    for order in (variants, variants[::-1]):
        assert variant_for(order, static, gpu_named(gpu)).name == name
    x, y = torch.randn(3, static[0]), torch.empty(3, static[1], static[0])
    with on_gpu(gpu), tracing() as made:
        launch.launch(variants, static, x, y, 1.0)
    assert made[0].kernel.name == name
    with on_gpu(gpu), knobs(interpret=True):
        launch.launch(variants, static, x, y, 2.0)
    assert torch.equal(y, (2 * x).unsqueeze(1).expand_as(y))


def test_a_call_that_nobody_claims_is_a_sentence(variants):
    with pytest.raises(
        UnsupportedError, match=r'^for_hopper or for_wide_rows cannot run with \(32, 4\) on RTX 5090 \(sm_120a\)$'
    ):
        variant_for(variants[:2], STATIC, GPUS['rtx5090'])
    with on_gpu('a100'), knobs(interpret=True), pytest.raises(UnsupportedError, match=r'^for_hopper cannot run with'):
        launch.launch(variants[0], STATIC, torch.randn(3, 32), torch.empty(3, 4, 32), 1.0)


def test_two_variants_that_claim_a_call_are_an_error(variants):
    hopper, _, fallback = variants
    also = jit.Kernel(fallback.builder, None, {}, {}, lambda static, gpu: gpu.arch >= 90)
    with pytest.raises(LaunchError, match=r'for_hopper and for_all claim the same call, \(32, 4\) on H200 \(sm_90a\)'):
        variant_for((hopper, also), STATIC, GPUS['h200'])
    assert variant_for((hopper, also), STATIC, GPUS['b200']) is also
    with pytest.raises(LaunchError, match='claim the same call'):
        variant_for((fallback, fallback), STATIC, GPUS['h200'])


@pytest.mark.parametrize('gpu', GPUS if knobs.full_test else ('h200', 'a100', 'rtx4090', 'b200'))
def test_every_case_has_one_variant_on_every_gpu(gpu):
    """Two that claim one launch, or none, would raise."""
    with on_gpu(gpu):
        for op in ops.values():
            for case in (op.case_set.smoke + op.case_set.bench) if op.case_set else ():
                op.trace_case(case)


def test_choose_may_see_the_gpu(variants):
    x = torch.empty(3, 32)
    for gpu, num_threads in (('h200', 128), ('rtx3090', 64), (replace(GPUS['h200'], sms=60), 64)):
        with on_gpu(gpu):
            assert config_for(variants[2], STATIC, 3, x) == {'num_threads': num_threads}
    assert config_for(variants[2], STATIC, 3, x) == {'num_threads': 128}
    assert config_for(variants, STATIC, 3, x) == {'num_threads': 64}


def on_device(monkeypatch, **changes):
    """Let CUDA report a device."""
    device = dict(
        name='NVIDIA H200',
        multi_processor_count=132,
        shared_memory_per_block_optin=227 << 10,
        L2_cache_size=60 << 20,
    )
    monkeypatch.setattr('torch.cuda.get_device_properties', lambda index: SimpleNamespace(**device | changes))
    monkeypatch.setattr(gpus, 'arch_of', lambda index: changes.get('arch', 'sm_90a'))
    return cuda_gpu.__wrapped__(0)


def test_a_device_is_known_by_its_name_and_counted_by_cuda(monkeypatch):
    whole = on_device(monkeypatch)
    assert whole == replace(GPUS['h200'], l2_bytes=60 << 20)
    part = on_device(monkeypatch, name='NVIDIA H100 80GB HBM3 MIG 3g.40gb', multi_processor_count=66)
    assert (part.sms, part.has_wgmma, part.bandwidth) == (66, True, GPUS['h100'].bandwidth / 2)
    other = on_device(monkeypatch, name='NVIDIA GeForce RTX 5090', arch='sm_120a', multi_processor_count=170)
    assert (other.name, other.target, other.max_cluster) == ('GeForce RTX 5090', 'sm_120a', 8)
    unknown = on_device(monkeypatch, name='NVIDIA Thing', arch='sm_103a', multi_processor_count=148)
    assert (unknown.arch, unknown.peaks) == (103, GPUS['b200'].peaks)


def test_tensors_on_a_gpu_ask_that_gpu(variants, monkeypatch):
    monkeypatch.setattr(launch, 'cuda_gpu', {0: GPUS['h100'], 1: GPUS['a100']}.__getitem__)
    on = lambda index: SimpleNamespace(is_cuda=True, get_device=lambda: index)
    assert [launch.gpu_of(on(index)).name for index in (0, 1)] == ['H100', 'A100']
    with on_gpu('b200'):
        assert launch.gpu_of(on(0)).name == 'B200'
    with FakeTensorMode():
        assert launch.gpu_of(torch.empty(3)).name == 'H200'


def test_bound_functions_are_kept_by_variants(variants):
    x, y, calls = torch.randn(2, 32), torch.empty(2, 4, 32), []
    variants[0].bound[(variants, STATIC, 2, -1)] = lambda *args: calls.append(args)
    launch.launch(variants, STATIC, x, y, 1.0)
    assert len(calls) == 1
    with knobs(interpret=True):
        launch.launch(variants[0], STATIC, x, y, 1.0)  # alone it has another entry
        with on_gpu('a100'):  # and other GPUs have none
            launch.launch(variants, STATIC, x, y, 1.0)
    assert len(calls) == 1


def test_gpus_are_found_by_name_and_by_architecture():
    assert gpu_named('l40s') is gpu_named('sm_89') is GPUS['l40s']
    assert gpu_named('sm_90') is gpu_named('sm_90a') is GPUS['h200']
    assert gpu_named('sm_121') == replace(GPUS['rtx5090'], name='sm_121a', arch=121)
    assert len({gpu_named(name) for name in GPUS}) == len(GPUS)
    for name in ('k80', 'sm_70'):
        with pytest.raises(ArgumentError, match=f"arch must be a name like sm_90a, .*, got '{name}'; known GPUs"):
            gpu_named(name)


def test_a_forced_config_also_holds_for_a_kernel_that_is_bound(sample):
    x, y = torch.randn(2, 32), torch.empty(2, 4, 32)

    def bound(*args):
        raise AssertionError('the bound function has another config')

    sample.spread_kernel.bound[(STATIC, 2, -1)] = bound
    try:
        with knobs(interpret=True), launch.forced_config(num_threads=64):
            launch.launch(sample.spread_kernel, STATIC, x, y, 2.0)
        with knobs(interpret=True), on_gpu('a100'):
            launch.launch(sample.spread_kernel, STATIC, x, y, 3.0)
    finally:
        sample.spread_kernel.bound.clear()
    assert torch.equal(y, (3 * x).unsqueeze(1).expand_as(y))


def test_every_config_and_device_has_its_own_loaded_kernel(sample, monkeypatch):
    class Elsewhere(torch.Tensor):
        index = 0
        device = torch.device('cuda:0')
        get_device = lambda self: self.index

    monkeypatch.setattr(launch, 'gpu_of', lambda x: GPUS['h200'])
    monkeypatch.setattr(launch, 'arch_of', lambda index: 'sm_90a')
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)
    monkeypatch.setattr(torch.cuda, 'device_count', lambda: 1)
    kernel = jit.Kernel(sample.spread_kernel.builder, sample.choose, {'num_threads': (64, 128)}, {})
    monkeypatch.setattr(kernel, 'load', lambda static, config, arch: (static, dict(config), object()))
    x = Elsewhere()
    small, large = (launch._bind(kernel, STATIC, size, x, ()) for size in (1, 5))
    assert small[1] == {'num_threads': 64} and large[1] == {'num_threads': 128}
    assert launch._bind(kernel, STATIC, 7, x, ()) is large and launch._bind(kernel, (64, 4), 5, x, ())[0] == (64, 4)
    with launch.forced_config(num_threads=64):
        assert launch._bind(kernel, STATIC, 5, x, ()) is small
    x.index = 1
    assert launch._bind(kernel, STATIC, 5, x, ())[2] is not large[2]
