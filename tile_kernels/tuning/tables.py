"""Write tables of tuned configs, so that concurrent and interrupted runs leave valid files."""

from __future__ import annotations

import json

import filelock

from tile_kernels.core import cache, tuned
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import cache_dir, knobs


def store(where: str, device: str, name: str, entry: tuned.Entry) -> None:
    """Put an entry into a table, in the place of one with the same static arguments and size class."""
    path, lock = tuned.table(where, device, name), cache_dir() / 'tuned' / device / f'.{name}.lock'
    try:
        for folder in (path.parent, lock.parent):
            folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock):
            others = [
                e for e in tuned.read(path) if (e.get('static'), e.get('size')) != (entry['static'], entry['size'])
            ]
            entries = sorted([*others, entry], key=lambda e: (e.get('static', []), e.get('size', 0)))
            lines = ',\n'.join(json.dumps(e) for e in entries)
            cache.write(path, f'{{"kernel": {json.dumps(name)}, "entries": [\n{lines}\n]}}\n'.encode(), 0o644)
    except OSError as error:
        raise ArgumentError(f'tune: cannot write {path} ({error.strerror})') from error
    knobs.touch()  # launches of this process ask the tables again
