"""Run TileLang kernels on a CPU from their real source, and catch their memory errors."""

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
    ResourceLimit,
    TypeMismatch,
    UninitializedRead,
    UnsupportedConstruct,
    UnwrittenOutput,
)
from tile_kernels.interpreter.meaning.extern import Pointer, extern

__all__ = [
    'AssertionFailed',
    'AsyncReadBeforeWait',
    'BarrierDivergence',
    'Branch',
    'DataRace',
    'Deadlock',
    'InterpreterError',
    'LayoutDependent',
    'LoweringFailed',
    'MisalignedAccess',
    'OutOfBounds',
    'Pointer',
    'ReducerMisuse',
    'Report',
    'ResourceLimit',
    'TypeMismatch',
    'UninitializedRead',
    'UnsupportedConstruct',
    'UnwrittenOutput',
    'extern',
    'interpret',
    'interpreting',
    'unknown_constructs',
]


def __dir__() -> list[str]:
    return __all__


def interpreting(checks: str = 'memory') -> Any:
    """A context in which `@tilelang.jit` functions run on CPU tensors through the interpreter.

    Args:
        checks: 'none', 'memory', 'races' or 'all', as for `interpret`.

    Returns:
        A context manager.
    """
    from tile_kernels.interpreter.jit_hook import interpreting as context

    return context(checks)


def unknown_constructs(prim_func: Any) -> list[str]:
    """Names of the operators, nodes and annotations of a kernel that the interpreter does not know.

    Args:
        prim_func: The kernel.

    Returns:
        One line per unknown construct; empty if the whole kernel is understood.
    """
    from tile_kernels.interpreter.engine.dialect import unknown_constructs as scan

    return scan(prim_func)
