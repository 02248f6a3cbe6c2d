"""Compile kernels ahead of time, for any architecture, on a machine without a GPU.

Running the op body on fake tensors finds the launches of a case. So the compiled kernels are exactly those that the
calls will look for. Worker processes compile the kernels (`workers`).
"""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tile_kernels.core.errors import ArgumentError, CompileError, TileKernelsError, UnsupportedError
from tile_kernels.core.gpus import gpu_named
from tile_kernels.core.jit import Kernel, cache_dir
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import on_gpu
from tile_kernels.core.nvcc import quiet

if TYPE_CHECKING:
    from tile_kernels.core.op import Op

#: Importing TileLang takes a worker some seconds, so workers save time from this many kernels on.
_KERNELS_PER_WORKER = 4


@dataclass(frozen=True)
class Variant:
    """One kernel with its static arguments, config and architecture; it compiles to one library."""

    kernel: Kernel
    static: tuple
    config: tuple[tuple[str, Any], ...]
    arch: str

    def stored(self) -> bool:
        """Whether the cache directory contains the library."""
        try:
            with knobs(disable_jit=True):
                self.compile()
        except CompileError:
            return False
        return True

    def compile(self) -> None:
        """Compile the library into the cache directory."""
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
    """The result of `precompile`; prints as one sentence."""

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
    archs: str | Sequence[str] = ('sm_90a',),
    out: str | Path | None = None,
    jobs: int | None = None,
    progress: bool = True,
) -> Precompiled:
    """Compile the kernels that calls will need, without running them.

    Args:
        ops: names of ops or families to compile for their benchmark and smoke cases (default: all ops), or the cases
            themselves: `{'quant.per_token_cast': [dict(num_tokens=64, hidden=7168)]}`. Missing entries of a case are
            those of the op's first benchmark case. A backward is a separate op.
        archs: targets: architectures like `sm_90a` (`sm_90` means the same), or GPUs like `h100`. The first known GPU
            of an architecture represents it.
        out: directory to fill (default: the cache directory). Set `TK_CACHE_DIR` to it where the kernels run.
        jobs: number of parallel compilations (default: one per CPU core).
        progress: show a progress bar on stderr, or a line every 10 s if it is no terminal.

    Returns:
        How many kernels were compiled and found, and the failed ones with the reasons.
    """
    return compile_into(out, lambda: find_variants(ops, archs), jobs, progress)


def compile_into(
    out: str | Path | None, find: Callable[[], Sequence[Variant]], jobs: int | None, progress: bool
) -> Precompiled:
    """Compile the variants that `find` returns into the directory `out`, or into the cache directory."""
    folder = _writable(Path(out) if out is not None else cache_dir())
    if jobs is not None and jobs < 1:
        raise ArgumentError(f'precompile: jobs must be at least 1, got {jobs}')
    start = time.perf_counter()
    variants = find()
    with knobs(cache_dir=folder, disable_jit=False):
        found = sum(variant.stored() for variant in variants)
        failures = compile_variants(variants, jobs, progress)
    tables = cache_dir() / 'tuned'
    if tables.is_dir() and folder.resolve() != cache_dir().resolve():  # else calls would look for other configs there
        shutil.copytree(tables, folder / 'tuned', dirs_exist_ok=True)
    compiled = len(variants) - found - len(failures)
    return Precompiled(
        folder, compiled, found, time.perf_counter() - start, {str(v): reason for v, reason in failures.items()}
    )


def find_variants(
    ops: Mapping[str, Iterable[Mapping[str, Any]]] | Iterable[str] | None, archs: str | Sequence[str]
) -> list[Variant]:
    """The distinct kernels that the cases of `ops` launch on these GPUs."""
    from tile_kernels.core.registry import find_op, find_ops, launches_of, typical_case

    targets = list(dict.fromkeys(gpu_named(arch) for arch in ([archs] if isinstance(archs, str) else archs)))
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
    variants = []
    for gpu in targets:
        for op, case in cases:
            with on_gpu(gpu), suppress(UnsupportedError):
                variants += [
                    Variant(launch.kernel, launch.static, tuple(launch.config.items()), gpu.target)
                    for launch in launches_of(op, case)
                ]
    return list(dict.fromkeys(variants))


def compile_variants(variants: Sequence[Variant], jobs: int | None, progress: bool) -> dict[Variant, str]:
    """Compile into the current cache directory, in parallel; returns the failed kernels with the reasons."""
    from tile_kernels.core.progress import progress_of
    from tile_kernels.core.workers import spread

    failures: dict[Variant, str] = {}
    missing = [variant for variant in variants if not variant.stored()]
    if not missing:
        return failures
    ours = [variant for variant in missing if variant.kernel.__module__.startswith('tile_kernels.')]
    others = [variant for variant in missing if variant not in set(ours)]  # no worker could import these
    with quiet(), progress_of(progress) as bar:
        task = bar.add_task('compiling', total=len(missing))
        for part, workers in ((ours, jobs), (others, 1)):
            makers = [functools.partial(tuple, (variant,)) for variant in part]
            reasons = spread(attempt, makers, workers, lambda: bar.advance(task), each=_KERNELS_PER_WORKER)
            failures |= {v: str(reason) for v, reason in zip(part, reasons, strict=True) if reason is not None}
    return failures


def attempt(variant: Variant) -> str | None:
    """Compile a kernel; returns the reason if that failed."""
    try:
        with quiet(), knobs(disable_jit=False):
            variant.compile()
    except TileKernelsError as error:
        return str(error).removeprefix(f'{variant.words}: ')
    return None


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
