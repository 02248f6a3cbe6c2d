"""Compile kernels ahead of time, for any architecture, on a machine that needs no GPU.

The launches of a case are found by running the op body on fake tensors, so what is compiled is exactly what those calls
will look for. Kernels are traced one after another (TileLang's tracer is not reentrant) and compiled in parallel, most
of the time being spent in nvcc.
"""

from __future__ import annotations

import importlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tile_kernels.core.compiler import require_tilelang
from tile_kernels.core.device import arch_number
from tile_kernels.core.errors import ArgumentError, CompileError, TileKernelsError
from tile_kernels.core.jit import Kernel, cache_dir, compile_count
from tile_kernels.core.knobs import knobs

if TYPE_CHECKING:
    from tile_kernels.core.op import Op


@dataclass(frozen=True)
class Variant:
    """One kernel with its static arguments, config and architecture: what becomes one library."""

    kernel: Kernel
    static: tuple
    config: tuple[tuple[str, Any], ...]
    arch: str

    def stored(self) -> bool:
        """Whether the cache directory holds the library."""
        try:
            with knobs(disable_jit=True):
                self.compile()
        except CompileError:
            return False
        return True

    def trace(self) -> None:
        """Build the tile program, kept for `compile`."""
        self.kernel.tir(*self.static, **dict(self.config))

    def compile(self) -> None:
        """Put the library into the cache directory."""
        self.kernel.library(self.static, dict(self.config), self.arch)

    @property
    def words(self) -> str:
        """The kernel as errors name it: `cast_kernel(7168, bfloat16; block_m=4)`."""
        static = ', '.join(str(value).removeprefix('torch.') for value in self.static)
        config = ', '.join(f'{name}={value}' for name, value in self.config)
        return f'{self.kernel.name}({static}; {config})' if config else f'{self.kernel.name}({static})'

    def __str__(self) -> str:
        return f'{self.words} for {self.arch}'


@dataclass(frozen=True)
class Precompiled:
    """What `precompile` did; prints as one sentence."""

    folder: Path
    num_compiled: int
    num_found: int
    seconds: float
    failures: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        counts = f'{self.num_compiled} kernels compiled, {self.num_found} already there'
        failed = f', {len(self.failures)} failed' if self.failures else ''
        return f'{counts}{failed}, in {self.seconds:.1f} s: {self.folder}'


def precompile(
    ops: Mapping[str, Iterable[Mapping[str, Any]]] | Iterable[str] | None = None,
    archs: Sequence[str] = ('sm_90a',),
    out: str | Path | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Precompiled:
    """Compile the kernels that calls will need, without making them.

    Args:
        ops: names of ops or families to compile for their benchmark and smoke cases (default: all ops), or the cases
            themselves: `{'quant.per_token_cast': [dict(num_tokens=64, hidden=7168)]}`. What a case leaves out is that
            of the op's first benchmark case. A backward is an op of its own.
        archs: architectures to compile for, e.g. `('sm_90a', 'sm_100a')`.
        out: directory to fill, to be named in `TK_CACHE_DIR` where the kernels run (default: the cache directory).
        jobs: compilations at a time (default: one per CPU core).
        progress: show a progress bar when stderr is a terminal.

    Returns:
        How many kernels were compiled and found, and those that failed with the reason.
    """
    folder = _writable(Path(out) if out is not None else cache_dir())
    if jobs is not None and jobs < 1:
        raise ArgumentError(f'precompile: jobs must be at least 1, got {jobs}')
    start, before = time.perf_counter(), compile_count()
    variants = find_variants(ops, archs)
    with knobs(cache_dir=folder, disable_jit=False):
        failures = compile_variants(variants, jobs, progress)
    compiled = compile_count() - before
    found = len(variants) - compiled - len(failures)
    return Precompiled(
        folder, compiled, found, time.perf_counter() - start, {str(v): reason for v, reason in failures.items()}
    )


def find_variants(
    ops: Mapping[str, Iterable[Mapping[str, Any]]] | Iterable[str] | None, archs: Sequence[str]
) -> list[Variant]:
    """The distinct kernels that the cases of `ops` launch, on the architectures they support."""
    from tile_kernels.cli.selection import find_op, find_ops, typical_case

    _check_archs(archs)
    if isinstance(ops, str):
        ops = [ops]
    cases: list[tuple[Op, Any]] = []
    if isinstance(ops, Mapping):
        for name, given in ops.items():
            op = find_op(name)
            cases += [(op, typical_case(op, case)) for case in given]
    else:
        for op in find_ops(ops or ()):
            if op.case_set is not None:
                cases += [(op, case) for case in op.case_set.bench + op.case_set.smoke]
    launches = [launch for op, case in cases for launch in op.trace_case(case)]
    variants = [
        Variant(launch.kernel, launch.static, tuple(launch.config.items()), arch)
        for launch in launches
        for arch in archs
        if launch.kernel.supports(arch)
    ]
    return list(dict.fromkeys(variants))


def compile_variants(variants: Sequence[Variant], jobs: int | None, progress: bool) -> dict[Variant, str]:
    """Compile into the cache directory in force, in parallel; those that failed, with the reason."""
    failures: dict[Variant, str] = {}
    ready: list[Variant] = []
    missing = [variant for variant in variants if not variant.stored()]
    if not missing:
        return failures
    with _quiet(), _bar(progress) as bar:
        task = bar.add_task('tracing', total=len(missing))
        for variant in missing:
            if _attempt(variant.trace, variant, failures):
                ready.append(variant)
            bar.advance(task)
        bar.reset(task, description='compiling', total=len(ready))
        with ThreadPoolExecutor(jobs or os.cpu_count()) as pool:
            running = [pool.submit(_attempt, variant.compile, variant, failures) for variant in ready]
            for done in as_completed(running):
                done.result()
                bar.advance(task)
    return failures


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep TileLang from announcing every library and from printing the program of every failure we report."""
    require_tilelang()
    importlib.import_module('tilelang')  # its import sets the level
    logger = logging.getLogger('tilelang')
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _attempt(step: Callable[[], None], variant: Variant, failures: dict[Variant, str]) -> bool:
    try:
        step()
    except TileKernelsError as error:
        failures[variant] = str(error).removeprefix(f'{variant.words}: ')
        return False
    return True


def _bar(progress: bool) -> Any:
    from tile_kernels.cli import console

    bar = console.progress()
    bar.disable = bar.disable or not progress
    return bar


def _check_archs(archs: Sequence[str]) -> None:
    for arch in archs:
        try:
            arch_number(arch)
        except ValueError as error:
            raise ArgumentError(f'precompile: arch must be a name like sm_90a, got {arch!r}') from error


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f'precompile: out must be a directory that can be made, got {folder} ({error.strerror})'
        ) from error
    if not os.access(folder, os.W_OK):
        raise ArgumentError(f'precompile: out must be a writable directory, got {folder}')
    return folder
