"""Every kernel lowers to CUDA for the architectures it claims; one variant of each is compiled and must not spill."""

import itertools

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tile_kernels
from tests.lowered import facts, touched_early, unfenced_products
from tests.sampling import ran_on_a_gpu
from tile_kernels import knobs
from tile_kernels.core.gpus import ARCHS, arch_number, gpu_named
from tile_kernels.core.jit import kernels
from tile_kernels.core.launch import on_gpu
from tile_kernels.core.op import ops

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)


#: Shared memory of a block on Hopper, at most.
SHARED_BYTES = 227 << 10


def bench_variants() -> tuple[dict[tuple, object], set[str]]:
    """Distinct (kernel, static arguments, config) of the bench cases, and the kernels an op launches first.

    Found by dry runs on fake tensors. Those of Hopper, and those of GPUs without wgmma and clusters.
    """
    found, first = {}, set()
    for op in ops.values():
        for case in op.case_set.bench if op.case_set is not None else ():
            with FakeTensorMode():
                given = op.case_set.arguments(op.name, case)
                for arch, few_rows in itertools.product(
                    ('sm_90a', 'sm_80'), (False, True)[: 1 + (op.family == 'gemm')]
                ):
                    with on_gpu(arch), knobs(few_rows=few_rows):
                        launches = op.trace(**given)
                    first.update(launch.kernel.name for launch in launches[:1])
                    for launch in launches:
                        key = (launch.kernel.name, launch.static, tuple(launch.config.items()))
                        found.setdefault(key, launch)
    return found, first


def name(launch) -> str:
    static = ','.join(str(s).removeprefix('torch.') for s in launch.static)
    return f'{launch.kernel.name}({static})-' + ','.join(map(str, launch.config.values()))


def one_per_kernel(launches: dict) -> list:
    sample = {}
    for launch in launches.values():
        sample.setdefault(launch.kernel.name, launch)
    return list(sample.values())


BENCH, FIRST = bench_variants()


def check_order(launch, found: dict) -> None:
    """Products see their tiles, and an op begins when all before it has ended.

    Inputs of later launches of the op are then as they should be, too: they may be read before the wait.
    """
    assert found['named'] and found['unfenced'] == []
    assert found.get('unguarded', []) == []  # older entries of the record do not have it
    if launch.kernel.name in FIRST:
        assert found['early'] == []


def test_every_kernel_has_a_bench_case():
    own = {name for name, kernel in kernels.items() if kernel.__module__.startswith('tile_kernels.')}
    assert {launch.kernel.name for launch in BENCH.values()} == own


@pytest.mark.parametrize('launch', BENCH.values() if knobs.full_test else (), ids=name)
def test_lowers_for_hopper(launch):
    """All variants with `TK_FULL_TEST=1`; one of each kernel is lowered and compiled below."""
    source, dynamic_shared = launch.kernel._lower(launch.static, launch.config, 'sm_90a')
    assert launch.kernel.name in source and unfenced_products(source) == []
    assert dynamic_shared < SHARED_BYTES


def other_architectures() -> list[tuple]:
    """A kernel with another architecture that it claims, in turn; with all of them if `TK_FULL_TEST=1`.

    Of the kernels that ran on a GPU, every second one.
    """
    others, found = [arch for arch in ARCHS if arch != 'sm_90a'], []
    for index, launch in enumerate(one_per_kernel(BENCH)):
        turned = [others[(index + step) % len(others)] for step in range(len(others))]
        claimed = [arch for arch in turned if launch.kernel.claims(launch.static, gpu_named(arch))]
        some = 0 if index % 2 and ran_on_a_gpu(launch.kernel) else 1
        lowered = claimed if knobs.full_test else claimed[:some]
        found += [pytest.param(launch, arch, id=f'{name(launch)}-{arch}') for arch in lowered]
    return found


@pytest.mark.parametrize(('launch', 'arch'), other_architectures())
def test_lowers_for_other_architectures(launch, arch):
    found = facts(launch.kernel, launch.static, launch.config, arch)
    assert found['named']
    if arch_number(arch) < 90:  # nvcc refuses it there
        assert not found['proxy_fence']


@pytest.mark.parametrize('launch', one_per_kernel(BENCH), ids=name)
def test_compiles_for_hopper_without_spills(launch):
    found = facts(launch.kernel, launch.static, launch.config)
    check_order(launch, found)
    assert found['shared'] + found['static_shared'] <= SHARED_BYTES
    assert found['spill_stores'] == found['spill_loads'] == 0, found
    assert 0 < found['registers'] <= 255


def test_what_begins_too_early_is_found():
    (first,) = ops['mhc.sinkhorn'].trace_case(ops['mhc.sinkhorn'].case_set.bench[0])
    source = first.kernel.source(first.static, arch='sm_90a', **first.config)
    wait, trigger = '  cudaGridDependencySynchronize();\n', '  cudaTriggerProgrammaticLaunchCompletion();\n'
    assert wait + trigger in source
    assert touched_early(source.replace(wait + trigger, trigger + wait)) == ['cudaTriggerProgrammaticLaunchCompletion']

    start = 'extern "C" __global__ void __launch_bounds__(32, 1) f(const float* x, float* y, int n) {\n  float a[4];\n'
    read = '  a[0] = *(float*)(x + n);\n'
    assert touched_early(start + wait + trigger + read) == []
    assert touched_early(start + read) == []
    assert touched_early(start + read + wait + trigger) == ['x']
    assert touched_early(start + trigger + wait + read) == ['cudaTriggerProgrammaticLaunchCompletion']


def test_a_product_without_its_fence_is_found():
    wait, fence, product = 'tl::cp_async_wait<0>();', 'tl::fence_proxy_async();', 'tl::wgmma_ss<1>();'
    assert unfenced_products('\n'.join([wait, fence, product, product])) == []
    assert unfenced_products('\n'.join([fence, wait, product])) == [product]


def test_dry_runs_leave_cuda_alone():
    assert not torch.cuda.is_initialized()
