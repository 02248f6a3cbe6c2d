"""Findings about a kernel: slow accesses, limits of the GPU, and traps of TileLang; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tile_kernels.core import nvcc
from tile_kernels.core.errors import CompileError, TileKernelsError
from tile_kernels.sight.count import Access, count
from tile_kernels.sight.lines import children, is_loop, places, written
from tile_kernels.sight.lower import Lowered, lower
from tile_kernels.sight.rules import RULES, Kernel
from tile_kernels.sight.subject import Subject, resolve


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        rule: the name of the rule.
        kernel: the kernel.
        line: `file:line`, or an empty string if the finding concerns the whole kernel.
        why: what is wrong.
        action: what to do.
    """

    rule: str
    kernel: str
    line: str
    why: str
    action: str

    def __str__(self) -> str:
        return f'{self.line or self.kernel}: {self.rule}: {self.why}; {self.action}'


class Findings(list[Finding]):
    """The findings about a kernel; `unchecked` has the rules that were not checked, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.unchecked: dict[str, str] = {}

    def __str__(self) -> str:
        lines = [str(finding) for finding in self] or ['no findings']
        for why in dict.fromkeys(self.unchecked.values()):
            rules = ', '.join(rule for rule, reason in self.unchecked.items() if reason == why)
            lines.append(f'not checked: {rules}: {why}')
        return '\n'.join(lines)


def lint(kernel: Any, *args: Any, device: str = 'h200', compile: bool = True, **named: Any) -> Findings:
    """Check a kernel against every rule.

    Args:
        kernel: a kernel, a builder or an op, as `tile_kernels.sight.subject.resolve` takes it.
        args: arguments of the kernel or the builder.
        device: the GPU to compile for.
        compile: whether to run nvcc, for the rules about registers.
        named: dynamic extents, arguments of the builder or entries of the case.
    """
    found = Findings()
    for subject in resolve(kernel, *args, device=device, **named):
        every = written(subject.prim_func)
        item = Kernel(subject, [w for w in every if not children(w.node)], [w for w in every if is_loop(w.node)])
        _check(found, 'source', item)
        try:
            lowered = lower(subject)
        except CompileError as error:
            _check(found, 'error', replace(item, error=str(error)))
            if not found:
                raise
            rules = [*RULES['lowered'], *RULES['compiled']]
            found.unchecked.update(dict.fromkeys(rules, f'the kernel does not compile: {error}'))
            continue
        resources = _resources(lowered, subject, found, compile)
        for part in _functions(item, lowered):
            _check(found, 'lowered', part)
            if resources:
                _check(found, 'compiled', replace(part, resources=resources))
    return found


def _check(found: Findings, needs: str, kernel: Kernel) -> None:
    for name, rule in RULES[needs].items():
        for (file, line), why, action in rule(kernel):
            finding = Finding(name, kernel.subject.name, f'{file}:{line}' if line else '', why, action)
            if finding not in found:
                found.append(finding)


def _functions(kernel: Kernel, lowered: Lowered) -> Iterator[Kernel]:
    """The kernel with each of its device functions."""
    subject, dense = kernel.subject, dict[int, bool]()

    def watch(access: Access, address: NDArray[np.int64], active: NDArray[np.bool_], weight: float) -> None:
        if access.space == 'global' and access.width < 16:
            dense[id(access)] = dense.get(id(access), True) and _in_vectors(address, active, access.width)

    for counts, function in zip(count(subject, lowered, watch), lowered.functions.values(), strict=True):
        found = places(subject.prim_func, function)
        yield replace(kernel, function=function, source=lowered.source, places=found, counts=counts, dense=dense)


def _in_vectors(address: NDArray[np.int64], active: NDArray[np.bool_], width: int) -> bool:
    """Whether the lanes of each warp fill vectors of 16 bytes."""
    for row, chosen in zip(address.reshape(-1, 32), active.reshape(-1, 32), strict=True):
        _, filled = np.unique(np.unique(row[chosen]) // 16, return_counts=True)
        if (filled * width != 16).any():
            return False
    return True


def _resources(lowered: Lowered, subject: Subject, found: Findings, compile: bool) -> dict[str, int]:
    """Registers and spills, or a note why the rules about them were not checked."""
    why = 'compile=False'
    try:
        if compile:
            return nvcc.resources(lowered.source, subject.gpu.target)
    except TileKernelsError as error:
        why = str(error)
    found.unchecked.update(dict.fromkeys(RULES['compiled'], why))
    return {}
