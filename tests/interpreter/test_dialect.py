"""Every kernel of the library is written in the dialect the interpreter knows."""

import pytest

import tile_kernels
from tests.sampling import a_few_of_each
from tile_kernels.core.jit import kernels
from tile_kernels.core.op import ops
from tile_kernels.interpreter import unknown_constructs

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)


def launches_of_every_kernel() -> dict[str, object]:
    """Distinct (kernel, static arguments) of the smoke cases, and of the bench cases for kernels these leave out."""
    found, seen = {}, set()
    for level in ('smoke', 'bench'):
        covered = set(seen)
        for op in ops.values():
            for case in getattr(op.case_set, level, ()):
                for launch in op.trace_case(case):
                    if launch.kernel.name not in covered:
                        seen.add(launch.kernel.name)
                        static = ','.join(str(part).removeprefix('torch.') for part in launch.static)
                        found.setdefault(f'{launch.kernel.name}({static})', launch)
    return found


LAUNCHES = launches_of_every_kernel()


def test_every_kernel_is_scanned():
    own = {name for name, kernel in kernels.items() if kernel.__module__.startswith('tile_kernels.')}
    assert {launch.kernel.name for launch in LAUNCHES.values()} == own


@pytest.mark.parametrize('name', a_few_of_each(LAUNCHES, lambda name: LAUNCHES[name].kernel.name, 1))
def test_the_interpreter_knows_every_construct(name):
    launch = LAUNCHES[name]
    assert unknown_constructs(launch.kernel.tir(*launch.static, **launch.config)) == []
