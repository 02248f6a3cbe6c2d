"""Check the environment: versions, GPU, toolkit, cache and settings; explain what is wrong and what to do.

The facts are collected once; every diagnosis is a pure function of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import tile_kernels
from tile_kernels.cli import console
from tile_kernels.core import distribution, nvcc
from tile_kernels.core.cache import check_folder, move_tilelang_cache, stored, writable
from tile_kernels.core.errors import TileKernelsError
from tile_kernels.core.gpus import MIN_ARCH
from tile_kernels.core.jit import cache_dir
from tile_kernels.core.knobs import KNOBS, Knobs, knobs, misspelled
from tile_kernels.core.registry import cases_of, load_ops

PYTHON_MIN, TORCH_MIN = (3, 10), (2, 10)

#: First CUDA toolkit that supports an architecture, if newer than the general minimum.
TOOLKIT_FOR_ARCH = {103: (12, 9), 121: (12, 9), 110: (13, 0)}

_INSTALL_TILELANG = 'run: pip install "tilelang>=0.1.15,<0.2"'
_INSTALL_TOOLKIT = 'install CUDA 12.8 or newer, or set CUDA_HOME to where it is'

#: A source that compiles with any toolkit that supports FP8.
_FP8_PROBE = '#include <cuda_fp8.h>\n__global__ void probe(__nv_fp8_e4m3* x, float y) { *x = __nv_fp8_e4m3(y); }\n'


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    capability: int
    memory_gib: float

    @property
    def arch(self) -> str:
        """`sm_90`."""
        return f'sm_{self.capability}'


@dataclass(frozen=True)
class Cache:
    """The directory of compiled kernels."""

    folder: str
    num_kernels: int = 0
    num_bytes: int = 0
    writable: bool = True
    #: Why the directory is rejected.
    refused: str | None = None
    #: Libraries that cannot be loaded, with the reasons.
    damaged: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """The inputs of all diagnoses. `..._error` is the message of a failed attempt, None if there was no failure."""

    python: tuple[int, int]
    torch: str
    torch_cuda: str | None
    tilelang: str | None
    tilelang_error: str | None
    toolkit: tuple[int, int] | None
    toolkit_path: str | None
    fp8_error: str | None
    driver: str | None
    driver_cuda: tuple[int, int] | None
    gpus: tuple[Gpu, ...]
    cache: Cache
    settings: dict[str, str]
    settings_error: str | None
    misspelled: tuple[str, ...]
    probe_error: str | None
    other_distribution: str | None = None

    @property
    def disable_jit(self) -> bool:
        """Whether compilation is disabled."""
        return 'TK_DISABLE_JIT' in self.settings


@dataclass(frozen=True)
class Diagnosis:
    """One finding: an `error` prevents kernels from running, a `warning` costs time, a `note` is information."""

    level: str
    cause: str
    action: str


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r'\d+', version)[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return '.'.join(map(str, version))


# Diagnoses ----------------------------------------------------------------------------------


def python_too_old(facts: Facts) -> Diagnosis | None:
    """The interpreter is older than the package supports."""
    if facts.python >= PYTHON_MIN:
        return None
    return Diagnosis(
        'error', f'Python {_dotted(facts.python)} is too old', f'use Python {_dotted(PYTHON_MIN)} or newer'
    )


def other_distribution_installed(facts: Facts) -> Diagnosis | None:
    """Another project has overwritten our files, or ours have overwritten its files."""
    if facts.other_distribution is None:
        return None
    cause = f'tile-kernels {facts.other_distribution}, another project, is installed over the files of this package'
    return Diagnosis('error', cause, distribution.ADVICE)


def torch_too_old(facts: Facts) -> Diagnosis | None:
    """PyTorch is older than the package supports."""
    if _numbers(facts.torch) >= TORCH_MIN:
        return None
    return Diagnosis('error', f'torch {facts.torch} is too old', 'run: pip install "torch>=2.10"')


def tilelang_missing(facts: Facts) -> Diagnosis | None:
    """TileLang is not installed, or its import fails."""
    if facts.tilelang is None:
        return Diagnosis('error', 'tilelang is not installed', _INSTALL_TILELANG)
    if facts.tilelang_error is not None:
        cause = f'tilelang {facts.tilelang} does not load ({facts.tilelang_error})'
        return Diagnosis('error', cause, f'reinstall it; {_INSTALL_TILELANG}')
    return None


def tilelang_untested(facts: Facts) -> Diagnosis | None:
    """TileLang is outside the tested range."""
    if facts.tilelang is None or nvcc.TILELANG_MIN <= _numbers(facts.tilelang) < nvcc.TILELANG_END:
        return None
    return Diagnosis('error', f'tilelang {facts.tilelang} is outside the tested range >=0.1.15,<0.2', _INSTALL_TILELANG)


def no_gpu(facts: Facts) -> Diagnosis | None:
    """A machine without a GPU is supported; a GPU that torch cannot see is an error."""
    if facts.gpus:
        return None
    if facts.driver is None:
        return Diagnosis(
            'note',
            'no GPU: on CPU tensors every op computes with plain PyTorch',
            'set TK_INTERPRET=1 to run the real kernels in the interpreter; precompile, show and explain need no GPU',
        )
    if facts.torch_cuda is None:
        cause = f'there is an NVIDIA driver ({facts.driver}) but torch {facts.torch} is built without CUDA'
        return Diagnosis('error', cause, 'install a CUDA build of torch, see pytorch.org/get-started')
    cause = f'torch is built for CUDA {facts.torch_cuda} and sees no GPU through driver {facts.driver}'
    return Diagnosis('error', cause, 'update the driver, or check that nvidia-smi lists a GPU this process may use')


def gpu_too_old(facts: Facts) -> Diagnosis | None:
    """A GPU of an unsupported architecture."""
    old = next((gpu for gpu in facts.gpus if gpu.capability < MIN_ARCH), None)
    if old is None:
        return None
    return Diagnosis(
        'error',
        f'{old.name} ({old.arch}) is not supported',
        f'use a GPU of compute capability {MIN_ARCH / 10:.1f} (Ampere) or newer; ops still run on CPU tensors',
    )


def toolkit_missing(facts: Facts) -> Diagnosis | None:
    """No nvcc: only cached kernels can run. (TileLang searches for nvcc.)"""
    if facts.toolkit is not None or facts.tilelang is None or facts.tilelang_error is not None:
        return None
    needed = bool(facts.gpus) and not facts.disable_jit
    return Diagnosis(
        'error' if needed else 'note', 'no CUDA toolkit found (nvcc): no kernel can be compiled here', _INSTALL_TOOLKIT
    )


def toolkit_too_old(facts: Facts) -> Diagnosis | None:
    """An nvcc that lacks support for the kernels or the GPU."""
    if facts.toolkit is None:
        return None
    needs = [(nvcc.CUDA_MIN, 'the kernels')]
    needs += [(TOOLKIT_FOR_ARCH[gpu.capability], gpu.arch) for gpu in facts.gpus if gpu.capability in TOOLKIT_FOR_ARCH]
    need, who = max(needs)
    if facts.toolkit >= need:
        return None
    cause = f'CUDA toolkit {_dotted(facts.toolkit)} ({facts.toolkit_path}) is too old for {who}'
    return Diagnosis('error', cause, f'install CUDA {_dotted(need)} or newer, or set CUDA_HOME to where it is')


def fp8_unknown(facts: Facts) -> Diagnosis | None:
    """The compiler lacks the FP8 types: the toolkit is old, or its headers are not installed."""
    if facts.fp8_error is None:
        return None
    return Diagnosis(
        'error',
        f'the compiler {facts.toolkit_path} does not know the FP8 types ({facts.fp8_error})',
        'install a complete CUDA 12.8 or newer, with cuda_fp8.h beside nvcc',
    )


def driver_too_old(facts: Facts) -> Diagnosis | None:
    """Code of a newer major CUDA release than that of the driver does not load."""
    if facts.toolkit is None or facts.driver_cuda is None or facts.toolkit[0] <= facts.driver_cuda[0]:
        return None
    return Diagnosis(
        'error',
        f'driver {facts.driver} runs CUDA {_dotted(facts.driver_cuda)}, the toolkit is {_dotted(facts.toolkit)}',
        f'update the driver, or set CUDA_HOME to a CUDA {facts.driver_cuda[0]} toolkit',
    )


def cache_unusable(facts: Facts) -> Diagnosis | None:
    """Kernels that can neither be stored nor compiled."""
    cache = facts.cache
    if facts.disable_jit and cache.num_kernels == 0:
        cause = f'TK_DISABLE_JIT is set and {cache.folder} holds no kernel'
        return Diagnosis('error', cause, f'run: tile-kernels precompile --out {cache.folder}, or unset TK_DISABLE_JIT')
    if cache.writable or facts.disable_jit:
        return None
    if cache.num_kernels:
        cause = f'{cache.folder} is read-only: a kernel it does not hold is compiled again in every process'
        return Diagnosis('note', cause, 'precompile for your shapes, or set TK_CACHE_DIR to a writable directory')
    cause = f'{cache.folder} is not writable: every process compiles its kernels again'
    return Diagnosis('warning', cause, 'set TK_CACHE_DIR to a writable directory')


def cache_refused(facts: Facts) -> Diagnosis | None:
    """Other users can write to the cache directory."""
    if facts.cache.refused is None:
        return None
    cause, _, action = facts.cache.refused.removeprefix('cache: ').partition('; ')
    return Diagnosis('error', cause, action)


def cache_damaged(facts: Facts) -> Diagnosis | None:
    """Libraries that are truncated, changed, or built for another machine."""
    damaged = facts.cache.damaged
    if not damaged:
        return None
    more = f' (and {len(damaged) - 1} more)' if len(damaged) > 1 else ''
    if facts.disable_jit:
        action = f'run: tile-kernels precompile --out {facts.cache.folder}, or unset TK_DISABLE_JIT'
        return Diagnosis('error', f'{damaged[0]}{more}', action)
    action = 'it is compiled again when it is needed; tile-kernels cache prune removes it'
    return Diagnosis('warning', f'{damaged[0]}{more}', action)


def setting_wrong(facts: Facts) -> Diagnosis | None:
    """An environment variable has an invalid value."""
    if facts.settings_error is None:
        return None
    return Diagnosis('error', facts.settings_error.removeprefix('knobs: '), 'correct or unset it')


def setting_misspelled(facts: Facts) -> Diagnosis | None:
    """An environment variable is nearly the name of a setting."""
    return Diagnosis('warning', '; '.join(facts.misspelled), 'rename or unset it') if facts.misspelled else None


def probe_failed(facts: Facts) -> Diagnosis | None:
    """An op failed in a trial run on the GPU: shared memory, resources, compiler or result."""
    if facts.probe_error is None:
        return None
    cause = f'a kernel tried on the GPU failed: {nvcc.explain(facts.probe_error)}'
    return Diagnosis('error', cause, 'solve what stands above first; if nothing does, report it with this output')


DIAGNOSES: tuple[Callable[[Facts], Diagnosis | None], ...] = (
    python_too_old,
    other_distribution_installed,
    torch_too_old,
    tilelang_missing,
    tilelang_untested,
    no_gpu,
    gpu_too_old,
    toolkit_missing,
    toolkit_too_old,
    fp8_unknown,
    driver_too_old,
    cache_unusable,
    cache_refused,
    cache_damaged,
    setting_wrong,
    setting_misspelled,
    probe_failed,
)


def diagnose(facts: Facts) -> list[Diagnosis]:
    """All diagnoses of the facts."""
    return [found for check in DIAGNOSES if (found := check(facts)) is not None]


# Facts --------------------------------------------------------------------------------------


def gather() -> Facts:
    """The facts of this machine and process."""
    version, tilelang_error = _tilelang()
    toolkit, path = _toolkit() if version is not None and tilelang_error is None else (None, None)
    driver, driver_cuda = _driver()
    gpus = _gpus()
    healthy = toolkit is not None and toolkit >= nvcc.CUDA_MIN
    return Facts(
        python=sys.version_info[:2],
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        tilelang=version,
        tilelang_error=tilelang_error,
        toolkit=toolkit,
        toolkit_path=path,
        fp8_error=_error_of(lambda: nvcc.ptx(_FP8_PROBE, 'sm_90a')) if toolkit is not None else None,
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
        cache=_cache(cache_dir()),
        settings=_settings(),
        settings_error=_error_of(_read_settings),
        misspelled=tuple(misspelled()),
        other_distribution=distribution.other_distribution(),
        probe_error=_error_of(_probe) if gpus and (healthy or knobs.disable_jit) else None,
    )


def _tilelang() -> tuple[str | None, str | None]:
    """Installed version, and the reason if the import fails."""
    try:
        version = importlib.metadata.version('tilelang')
    except importlib.metadata.PackageNotFoundError:
        return None, None
    move_tilelang_cache()
    return version, _error_of(lambda: importlib.import_module('tilelang'))


def _toolkit() -> tuple[tuple[int, int] | None, str | None]:
    try:
        return nvcc.nvcc_version(), str(nvcc.nvcc())
    except TileKernelsError:
        return None, None


def _driver() -> tuple[str | None, tuple[int, int] | None]:
    """Version of the NVIDIA driver and its CUDA release."""
    try:
        text = subprocess.run(['nvidia-smi'], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    driver, cuda = re.search(r'Driver Version: ([\d.]+)', text), re.search(r'CUDA Version: (\d+)\.(\d+)', text)
    return driver[1] if driver else None, (int(cuda[1]), int(cuda[2])) if cuda else None


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(p.name, 10 * p.major + p.minor, p.total_memory / 2**30) for p in properties)


def _cache(folder: Path) -> Cache:
    refused = _error_of(lambda: check_folder(folder))
    libraries = [] if refused else stored(folder)
    return Cache(
        str(folder),
        len(libraries),
        sum(library.num_bytes for library in libraries),
        writable(folder),
        refused,
        tuple(f'{library.path} {library.problem}' for library in libraries if library.problem is not None),
    )


def _settings() -> dict[str, str]:
    """Settings that differ from their default, by environment variable."""
    found = {}
    for name, knob in KNOBS.items():
        with suppress(TileKernelsError):  # an invalid value, which `settings_error` reports
            value = getattr(knobs, name)
            if value != knob.default:
                found[knob.env] = str(value)
    return found


def _read_settings() -> None:
    """Read every setting from the environment, like a new process."""
    fresh = Knobs()
    for name in KNOBS:
        getattr(fresh, name)


def _probe() -> None:
    """Run the smallest case of the first op on the GPU and compare it with its twin."""
    from tile_kernels.testing.contract import check_kernel

    op = next(op for op in load_ops().values() if op.case_set is not None and op.case_set.smoke)
    case = next(case for case in cases_of(op).smoke if op.trace_case(case))
    check_kernel(op, case, 'cuda')


def _error_of(action: Callable[[], object]) -> str | None:
    """The message of any exception that an action raises: the doctor reports it and continues."""
    try:
        action()
    except Exception as error:
        return str(error) or type(error).__name__
    return None


# Command ------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `doctor`."""
    parser.add_argument('--json', action='store_true', help='print everything as JSON, for a bug report')


def run(args: argparse.Namespace) -> int:
    """Print facts and diagnoses; returns 1 if something is wrong."""
    with console.waiting('looking at Python, GPU, compiler and cache'):
        facts = gather()
    if args.json:
        found = diagnose(facts)
        sys.stdout.write(json.dumps(report(facts, found), indent=2, default=str) + '\n')
        return 1 if any(diagnosis.level == 'error' for diagnosis in found) else 0
    out = console.output()
    out.print(console.table(('', '~'), rows(facts), header=False))
    out.print()
    found = diagnose(facts)
    for diagnosis in found:
        out.print(
            f'{diagnosis.level}: {diagnosis.cause};\n    {diagnosis.action}.',
            style=STYLES[diagnosis.level],
            markup=False,
        )
    errors = sum(diagnosis.level == 'error' for diagnosis in found)
    out.print(f'{errors} thing(s) to fix.' if errors else 'Nothing is wrong.', style='bold')
    return 1 if errors else 0


def report(facts: Facts, found: list[Diagnosis]) -> dict[str, Any]:
    """Facts, versions and diagnoses, as `doctor --json` prints them."""
    packages = ('open-tile-kernels', 'tilelang', 'apache-tvm-ffi', 'triton', 'numpy', 'transformers')
    versions = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        'version': tile_kernels.__version__,
        'os': platform.platform(),
        'cpu': {'machine': platform.machine(), 'cores': os.cpu_count()},
        'packages': versions,
        **asdict(facts),
        'diagnoses': [asdict(diagnosis) for diagnosis in found],
    }


STYLES = {'error': 'red', 'warning': 'yellow', 'note': 'cyan'}


def rows(facts: Facts) -> list[tuple[str, str]]:
    """The facts as rows of a table."""
    cache = facts.cache
    gpus = [f'{gpu.name}, {gpu.arch}, {gpu.memory_gib:.0f} GiB' for gpu in facts.gpus]
    toolkit = f'{_dotted(facts.toolkit)} ({facts.toolkit_path})' if facts.toolkit else 'not found'
    return [
        ('tile_kernels', f'{tile_kernels.__version__} ({os.path.dirname(tile_kernels.__file__)})'),
        ('Python', _dotted(facts.python)),
        ('torch', f'{facts.torch} ({"CUDA " + facts.torch_cuda if facts.torch_cuda else "no CUDA"})'),
        ('TileLang', facts.tilelang or 'not installed'),
        ('CUDA toolkit', toolkit),
        ('NVIDIA driver', facts.driver or 'not found'),
        ('GPU', '; '.join(gpus) or 'none'),
        (
            'kernel cache',
            f'{cache.folder}: {cache.num_kernels} kernels, {console.size(cache.num_bytes)}, '
            f'{"writable" if cache.writable else "read-only"}',
        ),
        ('settings', ', '.join(f'{name}={value}' for name, value in facts.settings.items()) or 'all default'),
    ]
