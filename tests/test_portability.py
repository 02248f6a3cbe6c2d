"""The committed support matrix is what lowering gives: a seeded sample of each target, all with `TK_FULL_TEST=1`."""

import functools
import json
import random

import pytest
import torch

from tile_kernels import knobs
from tile_kernels.core import hip
from tile_kernels.core.errors import UnsupportedError
from tools import portability

COMMITTED = json.loads(portability.RESULTS.read_text())

#: Kernels of a target that are lowered again.
SAMPLE = 1


@functools.cache
def launches(target: str) -> tuple:
    ordered = torch.are_deterministic_algorithms_enabled()  # the other tests ask for it, and it selects kernels
    torch.use_deterministic_algorithms(False)
    try:
        return portability.launches(target)
    finally:
        torch.use_deterministic_algorithms(ordered)


def sampled() -> list[tuple[str, str]]:
    chosen = []
    for target, own in COMMITTED['targets'].items():
        names = sorted(own['kernels'])
        names = names if knobs.full_test else random.Random(target).sample(names, SAMPLE)
        chosen += [(target, name) for name in names]
    return chosen


def test_every_target_is_there():
    assert tuple(COMMITTED['targets']) == portability.TARGETS


def test_every_op_is_there():
    """All ops and the kernels they launch, on one NVIDIA and one AMD target; on all with `TK_FULL_TEST=1`."""
    for target in portability.TARGETS if knobs.full_test else ('sm_90a', 'gfx942'):
        found, used, refused = launches(target)
        own = COMMITTED['targets'][target]
        advice = 'run: python -m tools.portability --work FOLDER'
        assert own['ops'] == used, advice
        assert own['refused'] == refused, advice
        assert set(found) == set(own['kernels']), advice


@pytest.mark.parametrize(('target', 'name'), sampled())
def test_lowering_agrees_with_the_matrix(target, name):
    launch = launches(target)[0][name]
    assert portability.lowered(launch, target) == COMMITTED['targets'][target]['kernels'][name]


def test_the_page_is_current():
    assert portability.PAGE.read_text() == portability.page(COMMITTED), 'run: python -m tools.portability'


def test_shared_memory_and_threads_of_a_source():
    source = 'void __launch_bounds__(256, 1) f() {\n  __shared__ uint64_t barrier[4];\n'
    assert portability.static_shared(source) == 32
    assert portability.threads_of(source) == 256
    assert portability.threads_of('') is None


def test_ptx_is_refused_by_its_name():
    hip._refuse_assembly('float y; y = __builtin_amdgcn_exp2f(x);')
    with pytest.raises(UnsupportedError, match=r'PTX instruction mapa\.shared::cluster\.u32'):
        hip._refuse_assembly('asm volatile("{\\n.reg .b32 there;\\n" "mapa.shared::cluster.u32 there, %0, %6;\\n}");')
