"""Every kernel lowers to CUDA for every architecture it claims; a sample of each is compiled and must not spill."""

import itertools
import re

import pytest
import torch

import tile_kernels
from tests.sampling import ran_on_a_gpu
from tile_kernels import knobs
from tile_kernels.core import nvcc
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
    for op, arch in itertools.product(ops.values(), ('sm_90a', 'sm_80')):
        if op.case_set is None:
            continue
        for case in op.case_set.bench:
            for few_rows in (False, True) if op.family == 'gemm' else (False,):
                with on_gpu(arch), knobs(few_rows=few_rows):
                    launches = op.trace_case(case)
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


def unfenced_products(source: str) -> list[str]:
    """Asynchronous products that may not see tiles of cp.async: a fence has to stand between the wait and them."""
    found, waiting = [], False
    for line in source.splitlines():
        if 'cp_async_wait' in line:
            waiting = True
        elif 'fence_proxy_async' in line:
            waiting = False
        elif 'tl::wgmma_' in line and waiting:
            found.append(line.strip())
    return found


def touched_early(source: str) -> list[str]:
    """What a kernel touches or starts before it waits for the one before, if it may be launched before that ends."""
    first = source.split('__launch_bounds__')[1]  # others of the same launch follow it
    before, wait, _ = first.partition('cudaGridDependencySynchronize();')
    if not wait:
        return []
    signature, body = re.split(r'\) \{\n', before, maxsplit=1)
    pointers = re.findall(r'\* (?:__restrict__ )?(\w+)', signature)
    starts = ['tma_load', 'cudaTriggerProgrammaticLaunchCompletion']
    return [name for name in pointers + starts if re.search(rf'\b{name}\b', body)]


BENCH, FIRST = bench_variants()


def check_order(launch, source: str) -> None:
    """Products see their tiles, and an op begins when all before it has ended.

    Inputs of later launches of the op are then as they should be, too: they may be read before the wait.
    """
    assert unfenced_products(source) == []
    if launch.kernel.name in FIRST:
        assert touched_early(source) == []


def test_every_kernel_has_a_bench_case():
    own = {name for name, kernel in kernels.items() if kernel.__module__.startswith('tile_kernels.')}
    assert {launch.kernel.name for launch in BENCH.values()} == own


@pytest.mark.parametrize('launch', BENCH.values() if knobs.full_test else (), ids=name)
def test_lowers_for_hopper(launch):
    """All variants with `TK_FULL_TEST=1`; one of each kernel is lowered and compiled below."""
    source, dynamic_shared = launch.kernel._lower(launch.static, launch.config, 'sm_90a')
    assert launch.kernel.name in source
    assert dynamic_shared < SHARED_BYTES
    check_order(launch, source)


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
    source = launch.kernel.source(launch.static, arch=arch, **launch.config)
    assert launch.kernel.name in source
    if arch_number(arch) < 90:  # nvcc refuses it there
        assert 'fence_proxy_async' not in source


@pytest.mark.parametrize('launch', one_per_kernel(BENCH), ids=name)
def test_compiles_for_hopper_without_spills(launch):
    source, dynamic_shared = launch.kernel._lower(launch.static, launch.config, 'sm_90a')
    check_order(launch, source)
    assert dynamic_shared <= SHARED_BYTES
    chosen = sum(map(ord, launch.kernel.name)) % 3 == 0
    if ran_on_a_gpu(launch.kernel) and not chosen and not knobs.full_test:
        return  # nvcc compiled it before it ran; a third of these is compiled again
    used = nvcc.resources(source, 'sm_90a')
    assert dynamic_shared + used['static_shared'] <= SHARED_BYTES
    assert used['spill_stores'] == used['spill_loads'] == 0, used
    assert 0 < used['registers'] <= 255


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
