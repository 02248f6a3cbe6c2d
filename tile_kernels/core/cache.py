"""The directory of compiled kernels: names, manifests, checks, locks.

    <cache>/<arch>/<kernel>-<digest>-cu<nvcc>.so     a library
    <cache>/<arch>/<kernel>-<digest>-cu<nvcc>.json   its manifest: what it is, its size and checksum
    <cache>/.locks/                                  one lock per kernel, so that processes compile it once
    <cache>/.code/                                   digests of code, and the texts they follow from

The digest covers code, arguments, TileLang, tvm-ffi and host architecture, so a library that differs in any of these is
never found. The nvcc release is a separate part of the file name. A process prefers libraries of its own nvcc release.
It loads a library of another release if it has no nvcc, may not compile, or cannot write. So kernels built on one
machine also run on a machine that has no CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tile_kernels.core.code_digest import Node, code
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import default_cache_dir, environment, knobs, set_environment

log = logging.getLogger('tile_kernels')

Toolkit = tuple[int, int]

#: After this many seconds, an unfinished file or a lock counts as abandoned.
_ABANDONED = 3600.0


# This machine -------------------------------------------------------------------------------


@functools.cache
def runtime() -> dict[str, str]:
    """Versions that a library must match to be loaded here, besides the GPU architecture."""
    try:
        ffi = importlib.metadata.version('apache-tvm-ffi')
    except importlib.metadata.PackageNotFoundError:
        ffi = 'none'
    return {'tvm_ffi': ffi, 'host': platform.machine()}


@functools.cache
def toolkit() -> Toolkit | None:
    """The nvcc release, read from the toolkit's files without running nvcc; None if unknown."""
    home = environment('CUDA_HOME') or environment('CUDA_PATH')
    if home is None:
        found = shutil.which('nvcc')
        if found is None:
            home = '/usr/local/cuda'
        else:
            visible, real = Path(found).parent.parent, Path(found).resolve().parent.parent
            home = str(visible if (visible / 'include' / 'cuda_runtime.h').exists() else real)
    try:
        about = json.loads((Path(home) / 'version.json').read_text())
        major, minor, *_ = about['cuda_nvcc']['version'].split('.')
        return int(major), int(minor)
    except (OSError, ValueError, KeyError, TypeError):
        return None


@functools.cache
def move_tilelang_cache() -> None:
    """Move TileLang's own cache next to ours if the user moved ours or TileLang's folder is not writable.

    TileLang writes there as soon as it is imported, so this function must run before the import.
    """
    chosen = knobs.of_process.get('cache_dir')
    if environment('TILELANG_CACHE_DIR') is not None:
        return
    ours = (chosen if isinstance(chosen, Path) else default_cache_dir()).absolute() / 'tilelang'
    if not isinstance(chosen, Path) and _can_be_made(Path.home() / '.tilelang' / 'cache'):
        return
    set_environment('TILELANG_CACHE_DIR', str(ours if _can_be_made(ours) else _process_folder().name))


@functools.cache
def _process_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder that is deleted when this process ends."""
    return tempfile.TemporaryDirectory(prefix='tile_kernels-')


def writable(folder: Path) -> bool:
    """Whether a directory, or the parent in which it would be created, is writable."""
    existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), None)
    return existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _can_be_made(folder: Path) -> bool:
    """Create a directory and return whether it is writable."""
    try:
        _make_folder(folder)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


def check_folder(folder: Path) -> None:
    """Reject a directory into which other users could put libraries that this process would run."""
    try:
        about = folder.stat()
    except OSError:  # it does not exist; creating it is a separate step
        return
    if about.st_uid not in (os.geteuid(), 0):
        raise ArgumentError(
            f'cache: {folder} belongs to user {about.st_uid}, who could put code there that runs as you; '
            'set TK_CACHE_DIR to a directory of your own'
        )
    if about.st_mode & stat.S_IWOTH:
        raise ArgumentError(
            f'cache: every user can write to {folder}, and put code there that runs as you; '
            'run: chmod o-w on it, or set TK_CACHE_DIR to a directory of your own'
        )


_digests: dict[tuple[Callable, tuple[Node, ...]], str] = {}


def code_digest(folder: Path, builder: Callable, static: tuple) -> str:
    """Digest of the code of a kernel.

    A cache directory stores the digest of each kernel of the package and the source texts it was computed from.
    Comparing these texts is faster than parsing them.
    """
    types = code().types(static)
    key = (builder, types)
    if key not in _digests:
        path = _record(folder, builder, types)
        recorded: Any = None
        if path is not None:
            check_folder(folder)
            check_folder(path.parent)
            with contextlib.suppress(OSError, ValueError):
                recorded = json.loads(path.read_text())
        if code().holds(recorded):
            return _digests.setdefault(key, recorded['digest'])
        _digests[key] = code().digest(builder, types)
        if folder.is_dir():
            record_digest(folder, builder, static)
    return _digests[key]


def record_digest(folder: Path, builder: Callable, static: tuple) -> None:
    """Store the digest of a kernel in a cache directory, if it has none yet and is writable."""
    types = code().types(static)
    path = _record(folder, builder, types)
    if path is None:
        return
    with contextlib.suppress(OSError, ValueError):
        if path.exists() and code().holds(json.loads(path.read_text())):
            return
    with contextlib.suppress(OSError):
        _make_folder(path.parent)
        write(path, json.dumps(code().record(builder, types)).encode(), 0o644)


def _record(folder: Path, builder: Callable, types: tuple[Node, ...]) -> Path | None:
    """The file that stores the digest of a kernel; None for a kernel outside the package or with captured values."""
    ours = builder.__module__.startswith('tile_kernels.') and builder.__qualname__ == builder.__name__
    if not ours or builder.__closure__:
        return None
    suffix = hashlib.sha256(repr(types).encode()).hexdigest()[:8]
    return folder / '.code' / f'{builder.__module__}.{builder.__name__}-{suffix}.json'


# Entries ------------------------------------------------------------------------------------


def _manifest(path: Path) -> Path:
    return path.with_suffix('.json')


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a library; None if it is missing or unreadable."""
    try:
        about = json.loads(_manifest(path).read_text())
    except (OSError, ValueError):
        return None
    return about if isinstance(about, dict) else None


def damage(path: Path) -> str | None:
    """Why a library cannot be loaded, or None. This check runs before the dynamic loader maps the file."""
    about = read_manifest(path)
    if about is None:
        return 'has no readable manifest'
    for name, here in runtime().items():
        if about.get(name) != here:
            return f'was built for {name} {about.get(name)}, this is {here}'
    try:
        content = path.read_bytes()
    except OSError as error:
        return f'cannot be read ({error.strerror})'
    if not content:
        return 'is empty'
    if len(content) != about.get('size'):
        return f'has {len(content)} bytes instead of {about.get("size")}'
    if hashlib.sha256(content).hexdigest() != about.get('sha256'):
        return 'has another checksum than its manifest'
    return None


@dataclass(frozen=True)
class Entry:
    """The cache location of one kernel with its static arguments and config."""

    folder: Path
    arch: str
    stem: str

    def path(self, release: Toolkit) -> Path:
        """The path of the library that an nvcc of this release would write."""
        return self.folder / self.arch / f'{self.stem}-cu{release[0]}.{release[1]}.so'

    def find(self, may_compile: bool) -> tuple[Path | None, str | None]:
        """A library that can be loaded, or the reason why the stored ones cannot."""
        check_folder(self.folder)
        check_folder(self.folder / self.arch)
        here = toolkit()
        problem = None
        if here is not None:
            own = self.path(here)
            if own.exists():
                reason = damage(own)
                if reason is None:
                    return own, None
                problem = f'{own} {reason}'
            if may_compile and writable(self.folder / self.arch):
                return None, problem
        for path in self._any():
            reason = damage(path)
            if reason is None:
                return path, None
            problem = f'{path} {reason}'
        return None, problem

    def _any(self) -> list[Path]:
        """Libraries of every nvcc release, the newest release first."""

        def release(path: Path) -> list[int]:
            return [int(n) for n in re.findall(r'\d+', path.stem.rpartition('-cu')[2])]

        return sorted((self.folder / self.arch).glob(f'{self.stem}-cu*.so'), key=release, reverse=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Let one process at a time compile this kernel; without a writable lock file, every process may compile."""
        import filelock

        path = self.folder / '.locks' / f'{self.arch}-{self.stem}.lock'
        try:
            _make_folder(path.parent)
            held = filelock.FileLock(path, mode=0o644)
            try:
                held.acquire(timeout=0)
            except filelock.Timeout:
                log.info('waiting for another process that compiles %s for %s', self.stem, self.arch)
                held.acquire()
        except (OSError, NotImplementedError):
            yield
            return
        try:
            yield
        finally:
            held.release()


def _make_folder(folder: Path) -> None:
    """Create a directory that only its owner can write to, whatever the umask."""
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    folder.mkdir(exist_ok=True, mode=0o755)


def store(built: Path, path: Path, about: dict[str, Any]) -> None:
    """Store a library and its manifest atomically; after an OSError no partial file is left."""
    content = built.read_bytes()
    about = {**about, **runtime(), 'size': len(content), 'sha256': hashlib.sha256(content).hexdigest()}
    _make_folder(path.parent)
    check_folder(path.parent)
    write(_manifest(path), json.dumps(about, default=str).encode(), 0o644)
    write(path, content, 0o755)


def write(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix='.', suffix='.tmp')
    try:
        with os.fdopen(handle, 'wb') as file:
            file.write(content)
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


# Housekeeping -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """A library in the cache; `problem` is the reason why it cannot be loaded."""

    path: Path
    about: dict[str, Any]
    num_bytes: int
    problem: str | None

    def remove(self) -> None:
        """Delete the library and its manifest."""
        self.path.unlink(missing_ok=True)
        _manifest(self.path).unlink(missing_ok=True)


def stored(folder: Path) -> list[Stored]:
    """Every library in a cache directory, by architecture and name."""
    found = []
    for path in sorted(folder.glob('sm_*/*.so')):
        with contextlib.suppress(FileNotFoundError):  # another process may remove it now
            found.append(Stored(path, read_manifest(path) or {}, path.stat().st_size, damage(path)))
    return found


def leftovers(folder: Path, age: float = _ABANDONED) -> list[Path]:
    """Files that interrupted processes left: unfinished files, manifests without a library, old locks."""
    patterns = 'sm_*/.*.tmp', '.code/.*.tmp', 'tuned/*/.*.tmp', '.locks/*.lock'
    found = [path for pattern in patterns for path in folder.glob(pattern)]
    found += [path for path in folder.glob('sm_*/*.json') if not path.with_suffix('.so').exists()]
    old = []
    for path in found:
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime >= age:
                old.append(path)
    return sorted(old)
