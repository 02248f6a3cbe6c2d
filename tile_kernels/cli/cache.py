"""List, clear or prune the directory of compiled kernels."""

from __future__ import annotations

import argparse
import contextlib
import shutil
from pathlib import Path

from tile_kernels.cli import console
from tile_kernels.core import nvcc
from tile_kernels.core.cache import Stored, check_folder, leftovers, stored
from tile_kernels.core.code_digest import Node, code
from tile_kernels.core.errors import ArgumentError, UnsupportedError
from tile_kernels.core.jit import cache_dir, kernels


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `cache`."""
    actions = {
        'list': 'every library, with its arguments, size and what is wrong with it',
        'clear': 'delete every library',
        'prune': 'delete libraries that nothing loads any more: damaged, of older code or other versions',
    }
    commands = parser.add_subparsers(dest='action', required=True, metavar='ACTION')
    for name, headline in actions.items():
        command = commands.add_parser(name, help=headline, description=headline)
        command.add_argument('--dir', metavar='DIR', help='cache directory (default: TK_CACHE_DIR)')


def run(args: argparse.Namespace) -> int:
    """Print the libraries, or delete some and print how many."""
    folder = Path(args.dir) if args.dir else cache_dir()
    check_folder(folder)
    if args.action == 'list':
        return _list(folder)
    found = stored(folder)
    doomed = found if args.action == 'clear' else [library for library in found if is_stale(library)]
    try:
        for library in doomed:
            library.remove()
        for path in leftovers(folder, age=0.0) if args.action == 'clear' else leftovers(folder):
            path.unlink(missing_ok=True)
        if args.action == 'clear':
            for name in ('tilelang', '.code'):
                shutil.rmtree(folder / name, ignore_errors=True)
            for empty in (*folder.glob('sm_*'), folder / '.locks'):
                with contextlib.suppress(OSError):  # it contains files of others
                    empty.rmdir()
    except PermissionError as error:
        raise ArgumentError(f'cache: {folder} is read-only ({error.strerror}: {error.filename})') from error
    freed = sum(library.num_bytes for library in doomed)
    left = len(found) - len(doomed)
    print(f'{len(doomed)} kernels removed ({console.size(freed)}), {left} left: {folder}')
    return 0


def _list(folder: Path) -> int:
    found = stored(folder)
    columns = ('kernel', '~arguments', 'arch', 'nvcc', '>size', '~state')
    if found:
        out = console.output()
        out.print(console.wide_or_tall(out, columns, [_row(library) for library in found]))
    total = sum(library.num_bytes for library in found)
    print(f'{len(found)} kernels, {console.size(total)}: {folder}')
    return 0


def _row(library: Stored) -> tuple[str, ...]:
    about = library.about
    config = about.get('config')
    options = ', '.join(f'{name}={value}' for name, value in config.items()) if isinstance(config, dict) else ''
    arguments = ', '.join(map(str, about.get('static', ()))) + (f'; {options}' if options else '')
    return (
        str(about.get('kernel', library.path.stem)),
        arguments,
        library.path.parent.name,
        str(about.get('nvcc', '')),
        console.size(library.num_bytes),
        library.problem or 'ok',
    )


def is_stale(library: Stored) -> bool:
    """Whether no process with this code and these versions would load the library."""
    from tile_kernels.core.registry import load_ops

    about = library.about
    if library.problem is not None:
        return True
    with contextlib.suppress(UnsupportedError):
        if about.get('tilelang') != nvcc.tilelang_version():
            return True
    if not str(about.get('module', '')).startswith('tile_kernels.'):
        return False  # a user's own kernel: its code may not be available
    load_ops()
    kernel = kernels.get(str(about.get('kernel')))
    if kernel is None:
        return True
    types = tuple(Node(*node) for node in about.get('types', ()))
    return about.get('code') != code().digest(kernel.builder, types)
