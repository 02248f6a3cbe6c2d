"""The only module that calls TileLang's compiler and nvcc: lower, compile, load, inspect, explain failures."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tile_kernels.core import cache, diagnoses
from tile_kernels.core.errors import CompileError, UnsupportedError
from tile_kernels.core.gpus import arch_number

log = logging.getLogger('tile_kernels')

#: TileLang releases that the kernels are written and tested for.
TILELANG_MIN, TILELANG_END = (0, 1, 15), (0, 2)

#: The first CUDA toolkit whose nvcc supports the fp8 types and architectures in use.
CUDA_MIN = (12, 8)

#: Calls that exist only from Hopper on: programmatic dependent launch (PDL), and the proxy fence before wgmma.
HOPPER_CALLS = ('tl.pdl_sync', 'tl.pdl_trigger', 'tl.fence_proxy_async')

#: Pass configs of every kernel: memory-bound code does not profit from an automatic producer warpgroup.
HOUSE_PASS_CONFIGS = {'TL_DISABLE_WARP_SPECIALIZED': True}


def tilelang_version() -> str:
    """Installed TileLang version, without importing it."""
    try:
        return importlib.metadata.version('tilelang')
    except importlib.metadata.PackageNotFoundError:
        raise UnsupportedError(
            'compiler: tilelang is not installed; run: pip install "tilelang>=0.1.15,<0.2"'
        ) from None


@functools.cache
def require_tilelang() -> str:
    """TileLang's version; raises if the kernels are not tested with it. After this call TileLang may be imported."""
    version = tilelang_version()
    numbers = tuple(int(n) for n in re.findall(r'\d+', version)[:3])
    if not TILELANG_MIN <= numbers < TILELANG_END:
        raise UnsupportedError(
            f'compiler: tilelang {version} is outside the tested range >=0.1.15,<0.2; '
            'run: pip install "tilelang>=0.1.15,<0.2"'
        )
    cache.move_tilelang_cache()
    return version


@functools.cache
def nvcc() -> Path:
    """Path of nvcc as TileLang finds it."""
    require_tilelang()
    import tilelang.env

    home = tilelang.env.CUDA_HOME
    candidate = Path(home) / 'bin' / 'nvcc' if home else None
    found = candidate if candidate is not None and candidate.exists() else shutil.which('nvcc')
    if not found:
        raise UnsupportedError('compiler: no CUDA toolkit found (nvcc); install CUDA 12.8 or newer, or set CUDA_HOME')
    return Path(found)


@functools.cache
def nvcc_version() -> tuple[int, int]:
    """Release of nvcc."""
    text = subprocess.run([str(nvcc()), '--version'], capture_output=True, text=True, check=False).stdout
    match = re.search(r'release (\d+)\.(\d+)', text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _pass_configs(extra: dict[str, Any]) -> dict[Any, Any]:
    from tilelang.transform import PassConfigKey

    return {PassConfigKey[name]: value for name, value in {**HOUSE_PASS_CONFIGS, **extra}.items()}


def interpreter_pass_configs(extra: dict[str, Any]) -> dict[str, Any]:
    """The pass configs, with the names that TileLang uses in the IR."""
    return {key.value: value for key, value in _pass_configs(extra).items()}


def _for_arch(prim_func: Any, arch: str) -> Any:
    """The kernel without the calls that an architecture before Hopper lacks."""
    if arch_number(arch) >= 90:
        return prim_func
    from tilelang import tvm

    def drop(node: Any) -> Any:
        name = getattr(getattr(node.value, 'op', None), 'name', '')
        return tvm.tirx.Evaluate(tvm.tirx.const(0)) if name in HOPPER_CALLS else None

    return prim_func.with_body(tvm.tirx.stmt_functor.ir_transform(prim_func.body, None, drop, ['tirx.Evaluate']))


def lower(prim_func: Any, pass_configs: dict[str, Any], arch: str) -> tuple[str, int]:
    """CUDA source of a PrimFunc for an architecture (HIP source for gfx), and the dynamic shared memory of its launch.

    Needs no GPU and no nvcc. If a PrimFunc holds several kernels, the largest shared memory counts.
    """
    return lower_with(prim_func, {key.value: value for key, value in _pass_configs(pass_configs).items()}, arch)


def lower_with(prim_func: Any, config: dict[str, Any], arch: str) -> tuple[str, int]:
    """Like `lower`, but with exactly these pass configs, whose names are those of TileLang's IR."""
    require_tilelang()
    import tilelang
    from tilelang import tvm

    if arch.startswith('gfx'):
        from tile_kernels.core import hip

        return hip.lower(prim_func, config, arch)
    target = tvm.target.Target({'kind': 'cuda', 'arch': arch})
    with target, tvm.transform.PassContext(opt_level=3, config=config):
        lowered = tilelang.lower(_for_arch(prim_func, arch), target=target, enable_device_compile=False)
    functions = lowered.device_mod.functions.values()
    return lowered.kernel_source, max(int(f.attrs.get('dyn_shared_memory_buf', 0)) for f in functions)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress TileLang's messages about kernels and its program dumps; we report failures ourselves."""
    require_tilelang()
    importlib.import_module('tilelang')  # its import sets the level
    logger = logging.getLogger('tilelang')
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def compile_library(prim_func: Any, pass_configs: dict[str, Any], arch: str, path: Path) -> None:
    """Compile a PrimFunc for an architecture into a shared library at `path`; needs nvcc but no GPU."""
    require_tilelang()
    import tilelang

    if nvcc_version() < CUDA_MIN:
        major, minor = nvcc_version()
        raise UnsupportedError(f'compiler: CUDA toolkit {major}.{minor} is too old; install CUDA 12.8 or newer')
    tilelang.env.TILELANG_PRINT_ON_COMPILATION = '0'
    with quiet():
        compiled = tilelang.compile(
            _for_arch(prim_func, arch),
            target={'kind': 'cuda', 'arch': arch},
            execution_backend='tvm_ffi',
            pass_configs=_pass_configs(pass_configs),
        )
        compiled.export_library(str(path))


@functools.cache
def _load_runtime(name: str) -> None:
    """Register the functions that compiled kernels call by loading TileLang's libraries, without importing TileLang."""
    if 'tilelang' in sys.modules:
        return
    spec = importlib.util.find_spec('tilelang')
    if spec is None or spec.origin is None:
        require_tilelang()
        return
    library = Path(spec.origin).parent / 'lib' / name
    if library.exists():
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    else:
        importlib.import_module('tilelang')


def load_function(path: Path) -> Callable[..., None]:
    """The host entry of a compiled library: it checks its arguments in C and launches on torch's current stream."""
    describes_tensors = b'__tvm_tensormap_create' in path.read_bytes()  # for TMA; the small runtime lacks it
    _load_runtime('libtilelang.so' if describes_tensors else 'libtvm_runtime.so')
    import tvm_ffi

    return tvm_ffi.load_module(str(path))['main']


def resources(source: str, arch: str) -> dict[str, int]:
    """Registers, spilled bytes, stack and static shared memory that ptxas reports for a CUDA source."""
    _, report = cubin(source, arch)
    patterns = {
        'registers': r'Used (\d+) registers',
        'spill_stores': r'(\d+) bytes spill stores',
        'spill_loads': r'(\d+) bytes spill loads',
        'stack': r'(\d+) bytes stack frame',
        'static_shared': r'(\d+) bytes smem',
    }
    # one PrimFunc may hold several kernels: the largest value counts
    return {name: max(map(int, re.findall(pattern, report)), default=0) for name, pattern in patterns.items()}


def cubin(source: str, arch: str) -> tuple[bytes, str]:
    """Machine code of a CUDA source, and the report of ptxas."""
    return _nvcc(source, arch, '-cubin', 'cubin')


def ptx(source: str, arch: str) -> str:
    """PTX of a CUDA source."""
    return _nvcc(source, arch, '-ptx', 'ptx')[0].decode()


def _nvcc(source: str, arch: str, mode: str, suffix: str) -> tuple[bytes, str]:
    import tilelang.env

    root = Path(tilelang.__file__).parent
    includes = [root / 'src', root / '3rdparty' / 'cutlass' / 'include']
    with tempfile.TemporaryDirectory() as folder:
        unit, result = Path(folder) / 'kernel.cu', Path(folder) / f'kernel.{suffix}'
        unit.write_text(source)
        command = [
            str(nvcc()),
            mode,
            f'-arch={arch}',
            '-std=c++20',
            '-Xptxas',
            '-v',
            *(f'-I{path}' for path in includes),
        ]
        done = subprocess.run([*command, '-o', str(result), str(unit)], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise CompileError(explain(done.stderr))
        return result.read_bytes(), done.stderr


def explain(text: str) -> str:
    """One sentence for a compiler failure: a known diagnosis, or the first line with an error."""
    found = diagnoses.find(text)
    if found is not None:
        return '; '.join(diagnoses.words(*found))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if 'error' in line.lower()), lines[-1] if lines else 'no message')
