"""Every kernel of the library is written in the dialect the interpreter knows; a TileLang upgrade breaks here first."""

import itertools

import torch

import tile_kernels
from tile_kernels import knobs
from tile_kernels.core.jit import kernels
from tile_kernels.core.launch import on_gpu
from tile_kernels.core.op import ops
from tile_kernels.interpreter import unknown_constructs

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)


def launches_of_every_kernel() -> dict[tuple, object]:
    """A launch of every kernel by smoke cases; all distinct ones with `TK_FULL_TEST=1`.

    Those of Hopper, and those of GPUs without wgmma and clusters.
    """
    found: dict[tuple, object] = {}
    for op, arch, few_rows in itertools.product(ops.values(), ('sm_90a', 'sm_80'), (False, True)):
        if few_rows and op.family != 'gemm':
            continue
        for case in op.case_set.smoke if op.case_set else ():
            with on_gpu(arch), knobs(few_rows=few_rows):
                launches = op.trace_case(case)
            for launch in launches:
                variant = (launch.static, tuple(launch.config.items())) if knobs.full_test else ()
                found.setdefault((launch.kernel.name, *variant), launch)
    return found


def test_the_interpreter_knows_every_construct_of_every_kernel():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # poisoned memory, in other tests, may have it on
    try:
        launches = launches_of_every_kernel()
    finally:
        torch.use_deterministic_algorithms(before)
    own = {name for name, kernel in kernels.items() if kernel.__module__.startswith('tile_kernels.')}
    assert {name for name, *_ in launches} == own
    unknown = {
        variant: found
        for variant, launch in launches.items()
        if (found := unknown_constructs(launch.kernel.tir(*launch.static, **launch.config)))
    }
    assert unknown == {}
