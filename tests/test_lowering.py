"""Every kernel lowers to CUDA for every architecture it claims; a sample of each is compiled and must not spill."""

import pytest
import torch

import tile_kernels
from tests.sampling import a_few_of_each
from tile_kernels.core.device import ARCHS
from tile_kernels.core.jit import kernels
from tile_kernels.core.op import ops

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)


def variants(level: str) -> dict[tuple, object]:
    """Distinct (kernel, static arguments, config) of the given cases, found by dry runs on fake CUDA tensors."""
    found = {}
    for op in ops.values():
        if op.case_set is None:
            continue
        for case in getattr(op.case_set, level):
            for launch in op.trace_case(case):
                key = (launch.kernel.name, launch.static, tuple(launch.config.items()))
                found.setdefault(key, launch)
    return found


def name(launch) -> str:
    static = ','.join(str(s).removeprefix('torch.') for s in launch.static)
    return f'{launch.kernel.name}({static})-' + ','.join(map(str, launch.config.values()))


def one_per_kernel(launches: dict) -> list:
    sample = {}
    for launch in launches.values():
        sample.setdefault(launch.kernel.name, launch)
    return list(sample.values())


BENCH = variants('bench')


def test_every_kernel_has_a_bench_case():
    own = {name for name, kernel in kernels.items() if kernel.__module__.startswith('tile_kernels.')}
    assert {launch.kernel.name for launch in BENCH.values()} == own


@pytest.mark.parametrize('launch', a_few_of_each(BENCH.values(), lambda launch: launch.kernel.name, 1), ids=name)
def test_lowers_for_hopper(launch):
    source = launch.kernel.source(launch.static, arch='sm_90a', **launch.config)
    assert f'{launch.kernel.name}' in source


@pytest.mark.parametrize('arch', [a for a in ARCHS if a != 'sm_90a'])
@pytest.mark.parametrize('launch', one_per_kernel(BENCH), ids=name)
def test_lowers_for_other_architectures(launch, arch):
    if not launch.kernel.supports(arch):
        pytest.skip(f'needs sm_{launch.kernel.min_arch}')
    assert launch.kernel.name in launch.kernel.source(launch.static, arch=arch, **launch.config)


@pytest.mark.parametrize('launch', one_per_kernel(BENCH), ids=name)
def test_compiles_for_hopper_without_spills(launch):
    used = launch.kernel.resources(launch.static, arch='sm_90a', **launch.config)
    assert used['spill_stores'] == used['spill_loads'] == 0, used
    assert 0 < used['registers'] <= 255


def test_dry_runs_leave_cuda_alone():
    assert not torch.cuda.is_initialized()
