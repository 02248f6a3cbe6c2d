"""Kernels: a builder is compiled once for each set of static arguments and config, and cached on disk.

    builder(*static, **config) -> PrimFunc -> shared library -> bound host function

Code, static arguments, config and architecture determine the library on disk. So loading it neither traces the kernel
nor imports TileLang. Several processes may use one directory; a read-only directory serves the libraries it holds (see
`cache`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import logging
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tile_kernels.core import cache, nvcc, tuned
from tile_kernels.core.code_digest import code
from tile_kernels.core.errors import ArgumentError, CompileError, TileKernelsError
from tile_kernels.core.gpus import DEFAULT_GPU, Gpu, gpu_named
from tile_kernels.core.knobs import cache_dir as cache_dir  # others import it from here
from tile_kernels.core.knobs import knobs

log = logging.getLogger('tile_kernels')

Config = dict[str, Any]

#: `(static, gpu) -> bool`; the static arguments have the names of the builder's parameters.
Serves = Callable[[Any, Gpu], bool]

#: Every kernel by name, in definition order.
kernels: dict[str, Kernel] = {}

_compilations = 0
#: Whether this process has logged a compilation at level WARNING.
_told = False
_compile_lock = threading.Lock()

#: Folders for libraries that could not be stored in the cache.
_kept: list[tempfile.TemporaryDirectory[str]] = []


def compile_count() -> int:
    """How many kernels this process has compiled; a load from the cache does not count."""
    return _compilations


#: For kernels that load tiles with cp.async. Here wgmma would need a fence after every wait, and TileLang omits this
#: fence if no other access to shared memory requires it.
PLAIN_PRODUCTS = {'TL_DISABLE_WGMMA': True}


def kernel(
    choose: Callable[..., Config] | None = None,
    space: dict[str, tuple] | None = None,
    pass_configs: dict[str, Any] | None = None,
    serves: Serves | None = None,
    flops: Callable[[tuple, tuple], int] | None = None,
    fixed: str = '',
    version: int = 1,
) -> Callable[[Callable], Kernel]:
    """Declare a kernel builder.

    Args:
        choose: pure function `(*static, size) -> config`; the caller may override its result. If it has a parameter
            `gpu`, it also receives the `Gpu`. Values that fix the order of a sum must not depend on the GPU.
        space: the values each config entry may take, for the tuner.
        pass_configs: names of `PassConfigKey` members, added to `HOUSE_PASS_CONFIGS`.
        serves: the calls this kernel claims, e.g. `lambda static, gpu: gpu.has_wgmma and static.k % 64 == 0`. Of the
            variants of a launch at most one may claim a call. A kernel without `serves` runs everywhere; among
            variants it is the fallback, which gets the calls that no other claims.
        flops: `(static, arguments) -> operations` of a kernel made of matrix products, for its floor.
        fixed: names of config entries that fix the order of a sum, or that the op itself depends on. The tuner leaves
            them as `choose` took them, so tuning changes no bits.
        version: shipped tables of tuned configs hold for one version. Raise it when other configs may become faster.
    """

    def declare(builder: Callable) -> Kernel:
        made = Kernel(builder, choose, space or {}, pass_configs or {}, serves, flops, fixed, version)
        kernels[made.name] = made
        return made

    return declare


class Kernel:
    """A kernel builder and everything that needs no GPU: IR, CUDA, PTX, resources, libraries."""

    def __init__(
        self,
        builder: Callable,
        choose: Callable[..., Config] | None,
        space: dict[str, tuple],
        pass_configs: dict[str, Any],
        serves: Serves | None = None,
        flops: Callable[[tuple, tuple], int] | None = None,
        fixed: str = '',
        version: int = 1,
    ) -> None:
        self.__doc__ = builder.__doc__
        self.__module__ = builder.__module__
        self.builder = builder
        self.choose = choose
        self.space = space
        self.pass_configs = pass_configs
        self.serves = serves
        self.flops = flops
        self.fixed = frozenset(fixed.split())
        self.version = version
        self.name = builder.__name__
        self._choose_sees_gpu = choose is not None and 'gpu' in inspect.signature(choose).parameters
        #: (static, size, device index) -> bound function, the table that `launch` reads. The first of several variants
        #: has the table for all of them; its keys start with the tuple of variants.
        self.bound: dict[tuple, Callable] = {}
        #: (static, config values, device index) -> bound function that has been launched at least once.
        self.loaded: dict[tuple, Callable] = {}

    def config(self, static: tuple, size: int, gpu: Gpu = DEFAULT_GPU) -> Config:
        """The config for these static arguments and this problem size on a GPU."""
        return self.decide(static, size, gpu)[0]

    def decide(self, static: tuple, size: int, gpu: Gpu = DEFAULT_GPU) -> tuple[Config, str]:
        """The config of a launch and its origin: a table of tuned configs, else `choose`."""
        chosen = self.chosen(static, size, gpu)
        found = tuned.find(self, static, size, gpu, chosen) if self.space else None
        return found or (chosen, 'choose' if self.choose else 'the kernel')

    def chosen(self, static: tuple, size: int, gpu: Gpu = DEFAULT_GPU) -> Config:
        """The config that `choose` returns."""
        seen = {'gpu': gpu} if self._choose_sees_gpu else {}
        chosen = self.choose(*static, size, **seen) if self.choose else {}
        for name, value in chosen.items():
            if value not in self.space.get(name, ()):
                raise ArgumentError(
                    f'{self.name}: {name} must be in {self.space.get(name, ())}, got {value} from choose'
                )
        return chosen

    def claims(self, static: tuple, gpu: Gpu) -> bool:
        """Whether the kernel runs with these static arguments on a GPU; always true without `serves`."""
        return self.serves is None or self.serves(self._named(*static), gpu)

    @functools.cached_property
    def _named(self) -> Callable[..., Any]:
        """A function that makes a named tuple of static arguments; the names are the builder's parameters."""
        parameters = inspect.signature(self.builder).parameters.values()
        return namedtuple('Static', [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD])

    def tir(self, *static: Any, **config: Any) -> Any:
        """The tile-level PrimFunc."""
        key = (static, tuple(sorted(config.items())))
        found = self._tir_cache.get(key)
        if found is None:
            with nvcc.quiet():
                found = self._tir_cache[key] = self._in_words(static, config, lambda: self.builder(*static, **config))
        return found

    @functools.cached_property
    def _tir_cache(self) -> dict[tuple, Any]:
        return {}

    def source(self, static: tuple, size: int = 4096, arch: str = 'sm_90a', **config: Any) -> str:
        """CUDA source for an architecture."""
        return self._lower(static, config or self.config(static, size, gpu_named(arch)), arch)[0]

    def resources(self, static: tuple, size: int = 4096, arch: str = 'sm_90a', **config: Any) -> dict[str, int]:
        """Registers, spills, stack and static shared memory from ptxas, and dynamic shared memory of the launch."""
        config = config or self.config(static, size, gpu_named(arch))
        source, dynamic_shared = self._lower(static, config, arch)
        return nvcc.resources(source, arch) | {'dynamic_shared': dynamic_shared}

    def _lower(self, static: tuple, config: Config, arch: str) -> tuple[str, int]:
        func = self.tir(*static, **config)
        return self._in_words(static, config, lambda: nvcc.lower(func, self.pass_configs, arch))

    def library(self, static: tuple, config: Config, arch: str) -> Path:
        """The path of the compiled library; compiles it if it is missing."""
        entry = self._entry(static, config, arch)
        found, problem = entry.find(may_compile=not knobs.disable_jit)
        found = found or self._unwritable.get(entry)
        if found is not None:
            return found
        if knobs.disable_jit:
            if problem is not None:
                raise CompileError(f'{problem} and TK_DISABLE_JIT is set; build it again with tile-kernels precompile')
            raise CompileError(
                f'{self.name}{_words(static, config)} for {arch} is not in {cache_dir()} and TK_DISABLE_JIT is set; '
                'build it with tile-kernels precompile'
            )
        if problem is not None:
            log.warning('%s; it is compiled again', problem)
        return self._in_words(static, config, lambda: self._compile(entry, static, config, arch))

    @functools.cached_property
    def _unwritable(self) -> dict[cache.Entry, Path]:
        """Libraries that could not be stored in the cache directory; this process keeps them in a temporary one."""
        return {}

    def load(self, static: tuple, config: Config, arch: str) -> Callable[..., None]:
        """The bound host function for an architecture; logs a compilation, because the user is waiting for it."""
        global _told
        start, before = time.perf_counter(), _compilations
        path = self.library(static, config, arch)
        if _compilations > before:
            words, seconds = f'{self.name}{_words(static, config)} for {arch}', time.perf_counter() - start
            advice = '' if _told else '; later ones are logged at level INFO; tile-kernels precompile avoids this'
            log.log(logging.INFO if _told else logging.WARNING, 'compiled %s in %.1f s%s', words, seconds, advice)
            _told = True
        return nvcc.load_function(path)

    def _compile(self, entry: cache.Entry, static: tuple, config: Config, arch: str) -> Path:
        """Compile the kernel, unless another process or thread just did; returns the library."""
        global _compilations
        release = nvcc.nvcc_version()
        path = entry.path(release)
        with entry.lock():
            if path.exists() and cache.damage(path) is None:
                return path
            func = self.tir(*static, **config)
            log.debug('compiling %s%s for %s', self.name, _words(static, config), arch)
            if knobs.print_source:
                log.warning('%s', nvcc.lower(func, self.pass_configs, arch)[0])
            folder = tempfile.TemporaryDirectory(prefix='tile_kernels-')  # deleted when the process ends, at the latest
            fresh = Path(folder.name) / path.name
            try:
                nvcc.compile_library(func, self.pass_configs, arch, fresh)
                with _compile_lock:
                    _compilations += 1
                try:
                    cache.store(fresh, path, self._about(static, config, arch, release))
                    cache.record_digest(entry.folder, self.builder, static)
                except OSError as error:
                    log.warning(
                        'cannot store kernels in %s (%s); set TK_CACHE_DIR to a writable directory', path.parent, error
                    )
                    _kept.append(folder)
                    return self._unwritable.setdefault(entry, fresh)
            finally:
                if folder not in _kept:
                    folder.cleanup()
        return path

    def _entry(self, static: tuple, config: Config, arch: str) -> cache.Entry:
        return cache.Entry(cache_dir(), arch, f'{self.name}-{self._digest(static, config, arch)}')

    def _about(self, static: tuple, config: Config, arch: str, release: cache.Toolkit) -> dict[str, Any]:
        """The contents of the manifest of a library."""
        types = code().types(static)
        return {
            'kernel': self.name,
            'module': self.builder.__module__,
            'arch': arch,
            'static': [tuned.word(s) for s in static],
            'config': config,
            'code': code().digest(self.builder, types),
            'types': types,
            'tilelang': nvcc.tilelang_version(),
            'nvcc': '.'.join(map(str, release)),
        }

    def _digest(self, static: tuple, config: Config, arch: str) -> str:
        parts = [
            cache.code_digest(cache_dir(), self.builder, static),
            nvcc.tilelang_version(),
            repr(sorted(cache.runtime().items())),
            self.name,
            repr([tuned.word(s) for s in static]),
            repr(sorted(config.items())),
            repr(sorted(self.pass_configs.items())),
            arch,
        ]
        return hashlib.sha256('\n'.join(parts).encode()).hexdigest()[:24]

    def _in_words(self, static: tuple, config: Config, action: Callable[[], Any]) -> Any:
        """Run a compiler step; its exceptions are raised again with kernel, static arguments and config in front."""
        try:
            return action()
        except TileKernelsError:
            raise
        except Exception as error:
            text = nvcc.explain(str(error) or type(error).__name__)
            raise CompileError(f'{self.name}{_words(static, config)}: {text}') from error

    def __reduce__(self) -> tuple:
        """Pickle a kernel by name, for other processes: there is one object per kernel."""
        return _kernel_named, (self.__module__, self.name)

    def __repr__(self) -> str:
        return f'<kernel {self.name}>'


def _kernel_named(module: str, name: str) -> Kernel:
    importlib.import_module(module)
    return kernels[name]


def _unbind() -> None:
    for made in kernels.values():
        made.bound.clear()


knobs.listeners.append(_unbind)


def _words(static: tuple, config: Config) -> str:
    """`(7168, e4m3_1x128_f32; block_m=4)`."""
    options = ', '.join(f'{name}={value}' for name, value in config.items())
    return f'({", ".join(tuned.word(s) for s in static)}' + (f'; {options})' if options else ')')
