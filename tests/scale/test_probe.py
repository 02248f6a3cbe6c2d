"""The kernels of the probe run in the interpreter with all checks, and lower for Hopper."""

import torch

from tile_kernels.core import nvcc
from tile_kernels.interpreter import interpret
from tools import scale_probe


def integers(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def test_barriers_and_flags():
    done = integers(5)
    interpret(scale_probe.grid_barrier(5, 3), done, checks='all')
    assert done.eq(3).all()
    done, counter = integers(5), integers(1)
    interpret(scale_probe.counter_barrier(5, 3), counter, done, checks='all')
    assert done.eq(3).all() and counter.item() == 15
    done, flags = integers(2), integers(2, 32)
    interpret(scale_probe.hand_over(4), flags, done, checks='all')
    assert done.tolist() == [4, 4]


def test_chain_and_prefetch():
    for early in (False, True):
        x, y = torch.randn(128), torch.zeros(128)
        interpret(scale_probe.tiny(early), x, y, checks='all')
        assert torch.equal(y, x + 1)
    done = integers(3)
    interpret(scale_probe.prefetch(3, 1000), torch.zeros(1000, 32), done, checks='all')
    assert done.eq(1).all()


def test_they_lower_for_hopper():
    for kernel, text in (
        (scale_probe.grid_barrier(5, 3), 'sync'),
        (scale_probe.counter_barrier(5, 3), 'AtomicLoad'),
        (scale_probe.hand_over(4), 'AtomicStore'),
        (scale_probe.tiny(True), 'cudaGridDependencySynchronize'),
        (scale_probe.prefetch(3, 1000), 'prefetch_lines('),
    ):
        assert text in nvcc.lower(kernel, {}, 'sm_90a')[0]
