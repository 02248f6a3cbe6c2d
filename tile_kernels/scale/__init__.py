"""Distributed tile programs: one kernel source for several devices, simulated on a CPU or run on GPUs of one node."""

from tile_kernels.interpreter.errors import Deadlock, RemoteOutOfBounds, RemoteRace, SignalReused, StaleRead
from tile_kernels.scale.devices import empty, on_one_gpu, run
from tile_kernels.scale.language import Scale, Signals, Symmetric, barrier, copy, peer, signal, wait
from tile_kernels.scale.simulation import simulate

__all__ = [
    'Deadlock',
    'RemoteOutOfBounds',
    'RemoteRace',
    'Scale',
    'SignalReused',
    'Signals',
    'StaleRead',
    'Symmetric',
    'barrier',
    'copy',
    'empty',
    'on_one_gpu',
    'peer',
    'run',
    'signal',
    'simulate',
    'wait',
]


def __dir__() -> list[str]:
    return __all__
