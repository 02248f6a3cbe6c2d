"""Tables of tuned configs, which `Kernel.decide` asks before `choose`.

    tile_kernels/tuned/<device>/<kernel>.json    shipped; an entry holds for one version of the kernel
    <cache>/tuned/<device>/<kernel>.json         the user's; an entry holds for the code of the kernel

An entry holds for static arguments, a size class and a TileLang version. `tile_kernels.tuning.tables` writes them. This
module reads a table once; a change of the settings makes it read them again.
"""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tile_kernels.core import cache
from tile_kernels.core.gpus import GPUS, Gpu
from tile_kernels.core.knobs import cache_dir, knobs, overrides
from tile_kernels.core.nvcc import tilelang_version

if TYPE_CHECKING:
    from tile_kernels.core.jit import Config, Kernel

log = logging.getLogger('tile_kernels')

Entry = dict[str, Any]

SHIPPED = Path(__file__).parents[1] / 'tuned'

#: What `explain` calls the two kinds of tables, in the order in which launches ask them.
WHO = {'user': 'your table', 'shipped': 'shipped table'}

#: Names of the kernels that have a table for any GPU, by cache directory.
_names: dict[Path | None, frozenset[str]] = {}
_read: dict[Path, list[Entry]] = {}
_found: dict[tuple, list[tuple[Entry, str]]] = {}


def _forget() -> None:
    for known in (_names, _read, _found):
        known.clear()


knobs.listeners.append(_forget)


def overridden() -> bool:
    """Whether a block of this thread chooses the tables; bound functions are then neither used nor kept."""
    return any(name == 'tuned' for name, _ in overrides())


def word(value: Any) -> str:
    """A static argument as text."""
    return str(value).removeprefix('torch.') if isinstance(value, torch.dtype) else str(value)


def size_class(size: int) -> int:
    """The smallest power of two that is not below the size."""
    return 1 << max(size - 1, 0).bit_length()


def known_name(gpu: Gpu) -> str | None:
    """The name in `GPUS` of the model of a GPU; another number of SMs is another model."""
    words = re.sub('[^a-z0-9]', '', gpu.name.lower())
    return next(
        (key for key, known in GPUS.items() if key in words and (known.arch, known.sms) == (gpu.arch, gpu.sms)), None
    )


def device_name(gpu: Gpu) -> str:
    """The folder of the tables of a GPU: `h200`, or for an unknown model `h100-pcie-114`."""
    return known_name(gpu) or re.sub('[^a-z0-9]+', '-', f'{gpu.name}-{gpu.sms}'.lower())


def table(store: str, device: str, name: str) -> Path:
    """The file of a table."""
    return (SHIPPED if store == 'shipped' else cache_dir() / 'tuned') / device / f'{name}.json'


def stamp(kernel: Kernel, static: tuple, store: str) -> str:
    """The code for which an entry holds: a digest for the user's tables, a version for shipped ones."""
    if store == 'shipped':
        return str(kernel.version)
    return cache.code_digest(cache_dir(), kernel.builder, static)


def read(path: Path) -> list[Entry]:
    """The entries of a table; none if it is missing or damaged."""
    try:
        entries = json.loads(path.read_text())['entries']
        return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry['config'], dict)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning('%s holds no tuned configs that can be read (%s); it is ignored', path, error)
        return []


def find(kernel: Kernel, static: tuple, size: int, gpu: Gpu, chosen: Config) -> tuple[Config, str] | None:
    """The tuned config of a launch and the kind of its table, or None.

    An entry serves only where `choose` takes the same fixed entries as when it was tuned.
    """
    mode, folder = knobs.tuned, knobs.cache_dir
    if mode == 'off' or kernel.name not in _with_tables(folder):
        return None
    key = (kernel, static, size_class(size), gpu, mode, folder)
    entries = _found.get(key)
    if entries is None:
        entries = _found[key] = [
            (entry, WHO[store])
            for store in (('shipped',) if mode == 'shipped' else ('user', 'shipped'))
            for entry in _entries(kernel, static, size, gpu, store)
        ]
    for entry, who in entries:
        if all(entry['config'][name] == chosen.get(name) for name in kernel.fixed):
            return {name: entry['config'][name] for name in kernel.space}, who
    return None


def _with_tables(folder: Path | None) -> frozenset[str]:
    """Names of kernels with tables. Most have none, and their configs then do not depend on the name of the GPU."""
    names = _names.get(folder)
    if names is None:
        found = (*SHIPPED.glob('*/*.json'), *(cache_dir() / 'tuned').glob('*/*.json'))
        names = _names[folder] = frozenset(path.stem for path in found)
    return names


def _entries(kernel: Kernel, static: tuple, size: int, gpu: Gpu, store: str) -> list[Entry]:
    """The entries of one table for these arguments whose values are in the space of the kernel."""
    path = table(store, device_name(gpu), kernel.name)
    known = _read.get(path)
    if known is None:
        known = _read[path] = read(path)
    words, extent = [word(s) for s in static], size_class(size)
    near = [e for e in known if e.get('static') == words and e.get('size') == extent]
    if not near or any(e.get('tilelang') != tilelang_version() for e in near):
        return []
    current = stamp(kernel, static, store)
    return [
        entry
        for entry in near
        if entry.get('code') == current
        and entry['config'].keys() == kernel.space.keys()
        and all(value in kernel.space[name] for name, value in entry['config'].items())
    ]
