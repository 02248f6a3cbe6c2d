"""Run kernels: `interpret`, its report, and what it accepts as a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tile_kernels.interpreter.errors import Site

CHECKS = ('none', 'memory', 'races', 'all')


@dataclass(frozen=True)
class Branch:
    """One side of an `if` of the kernel."""

    file: str
    line: int
    side: str
    ran: bool


@dataclass(frozen=True)
class Report:
    """What a run of a kernel showed.

    Attributes:
        kernel: Name of the kernel.
        seconds: Time the run took.
        branches: Every side of every `if`, and whether any lane took it.
        guarded: (line, buffer) of accesses that needed TileLang's bounds guard.
    """

    kernel: str
    seconds: float
    branches: tuple[Branch, ...] = ()
    guarded: tuple[tuple[int, str], ...] = ()

    @property
    def findings(self) -> tuple[str, ...]:
        """What is legal but worth knowing, one sentence each (what is wrong is raised instead)."""
        return tuple(
            f'{self.kernel}: {buffer} is accessed outside its shape at line {line}, where its guard steps in'
            for line, buffer in self.guarded
        )

    @property
    def uncovered(self) -> tuple[Branch, ...]:
        """Branches no lane took."""
        return tuple(branch for branch in self.branches if not branch.ran)


def interpret(
    kernel: Any,
    *tensors: Any,
    checks: str = 'memory',
    pass_configs: dict[Any, Any] | None = None,
    lower: bool | str = False,
) -> Report:
    """Run a TileLang kernel on CPU tensors, from its own source.

    Args:
        kernel: A PrimFunc, or an object with a `prim_func` attribute (a compiled kernel).
        *tensors: The kernel's arguments in order, outputs included; outputs are written in place. A tensor the
            kernel does not touch may be None.
        checks: 'none', 'memory' (bounds, uninitialised reads, waits), 'races' (these too) or 'all' (also outputs that
            were not written).
        pass_configs: Compiler switches of the kernel that change its meaning.
        lower: Also lower the kernel, for sm_90a or the architecture named here, and report what TileLang refuses.

    Returns:
        A report: time, branch coverage, guards that were needed.

    Raises:
        InterpreterError: The kernel does something wrong; the subclass says what.
    """
    from tile_kernels.interpreter.engine.program import compiled

    if checks not in CHECKS:
        raise ValueError(f'interpret: checks must be one of {CHECKS}, got {checks!r}')
    prim_func = getattr(kernel, 'prim_func', kernel)
    if not hasattr(prim_func, 'buffer_map'):
        words = getattr(kernel, '__name__', None) or type(kernel).__name__
        hint = ', which may build one' if callable(kernel) else ''
        raise TypeError(f'interpret: kernel must be a T.prim_func or a compiled kernel, got {words}{hint}')
    if lower:
        from tile_kernels.interpreter.checks.resources import check_lowering

        arch = 'sm_90a' if lower is True else str(lower)
        check_lowering(prim_func, _switches(kernel, prim_func, pass_configs), arch)
    program = compiled(prim_func, options_of(kernel, pass_configs, checks))
    shared, seconds = program.run(tensors)
    branches = tuple(
        Branch(site.file, site.line, side, number in shared.covered)
        for number, (site, side) in enumerate(program.branches)
    )
    guarded = tuple(sorted({(_line(site), buffer) for site, buffer in shared.guarded}))
    return Report(program.name, seconds, branches, guarded)


def options_of(kernel: Any, pass_configs: dict[Any, Any] | None, checks: str) -> Any:
    """How to compile a kernel: the checks wanted and the compiler switches that change its meaning."""
    from tile_kernels.interpreter.engine.translate import Options

    prim_func = getattr(kernel, 'prim_func', kernel)
    switches = _switches(kernel, prim_func, pass_configs)
    attrs = getattr(prim_func, 'attrs', None) or {}
    declared = tuple(int(index) for index in attrs['tilelang_out_idx']) if 'tilelang_out_idx' in attrs else ()
    return Options(
        checks=checks,
        guards=not switches.get('tl.disable_safe_memory_legalize', False),
        auto_sync=not switches.get('tl.disable_thread_storage_sync', False),
        outputs=declared or tuple(getattr(kernel, 'out_idx', None) or ()),
    )


def _line(site: Site) -> int:
    return site.line


def _switches(kernel: Any, prim_func: Any, given: dict[Any, Any] | None) -> dict[str, Any]:
    """Compiler switches by name, from the kernel, its attributes and the caller."""
    attrs = prim_func.attrs if getattr(prim_func, 'attrs', None) is not None else {}
    stored = attrs.get('tilelang_pass_configs', {})
    merged: dict[str, Any] = {}
    for source in (stored, getattr(kernel, 'pass_configs', None) or {}, given or {}):
        for key, value in source.items():
            merged[str(getattr(key, 'value', key))] = bool(value) if isinstance(value, (bool, int)) else value
    return merged
