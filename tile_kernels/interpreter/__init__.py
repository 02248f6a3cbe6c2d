"""Run TileLang kernels on a CPU from their real source, and find their memory errors."""

from __future__ import annotations

from typing import Any

from tile_kernels.interpreter.api import Branch, Report, interpret
from tile_kernels.interpreter.errors import (
    AssertionFailed,
    AsyncReadBeforeWait,
    BarrierDivergence,
    DataRace,
    Deadlock,
    InterpreterError,
    LayoutDependent,
    LoweringFailed,
    MisalignedAccess,
    OutOfBounds,
    ReducerMisuse,
    RemoteOutOfBounds,
    RemoteRace,
    ResourceLimit,
    SignalReused,
    StaleRead,
    TypeMismatch,
    UninitializedRead,
    UnsupportedConstruct,
    UnwrittenOutput,
)
from tile_kernels.interpreter.meaning.extern import Pointer, extern
from tile_kernels.interpreter.observe import AccessEvent, Counter, Observer, Touch
from tile_kernels.interpreter.session import LineTime, PostMortem

__all__ = [
    'AccessEvent',
    'AssertionFailed',
    'AsyncReadBeforeWait',
    'BarrierDivergence',
    'Branch',
    'Counter',
    'DataRace',
    'Deadlock',
    'InterpreterError',
    'LayoutDependent',
    'LineTime',
    'LoweringFailed',
    'MisalignedAccess',
    'Observer',
    'OutOfBounds',
    'Pointer',
    'PostMortem',
    'ReducerMisuse',
    'RemoteOutOfBounds',
    'RemoteRace',
    'Report',
    'ResourceLimit',
    'SignalReused',
    'StaleRead',
    'Touch',
    'TypeMismatch',
    'UninitializedRead',
    'UnsupportedConstruct',
    'UnwrittenOutput',
    'extern',
    'fake_cuda',
    'interpret',
    'interpreting',
    'unknown_constructs',
]


def __dir__() -> list[str]:
    return __all__


def fake_cuda(capability: tuple[int, int] = (9, 0), num_sms: int = 132) -> Any:
    """A context in which `device='cuda'` tensors are on the CPU, and queries about SMs and the target work.

    Args:
        capability: Compute capability of the simulated GPU.
        num_sms: Number of its streaming multiprocessors.

    Returns:
        A context manager.
    """
    from tile_kernels.interpreter.cuda_device import fake_cuda as context

    return context(capability, num_sms)


def interpreting(checks: str = 'memory', **settings: Any) -> Any:
    """A context in which `@tilelang.jit` functions run on CPU tensors through the interpreter.

    Args:
        checks: 'none', 'memory', 'races', 'all' or 'collect', as for `interpret`.
        **settings: Further keyword arguments for `interpret`, such as `strict`, `watch` or `on_error`.

    Returns:
        A context manager.
    """
    from tile_kernels.interpreter.jit_hook import interpreting as context

    return context(checks, **settings)


def unknown_constructs(prim_func: Any) -> list[str]:
    """Names of the operators, nodes and annotations of a kernel that the interpreter does not support.

    Args:
        prim_func: The kernel.

    Returns:
        One line per unsupported construct; empty if the whole kernel is supported.
    """
    from tile_kernels.interpreter.engine.dialect import unknown_constructs as scan

    return scan(prim_func)
