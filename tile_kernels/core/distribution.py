"""Detect another project that installs files into the folder of this package.

The package index has a project called `tile-kernels`, from release 1.0 on. It also has a folder `tile_kernels`, so pip
writes one project over the other. This project is distributed as `open-tile-kernels`.
"""

from __future__ import annotations

import importlib.metadata

#: Advice to the user about the other project.
ADVICE = 'run: pip uninstall tile-kernels open-tile-kernels, then install open-tile-kernels again'


def other_distribution() -> str | None:
    """Version of the other project, None if not installed; this reads folder names only, in under 1 ms."""
    try:
        version = str(importlib.metadata.version('tile-kernels'))
    except importlib.metadata.PackageNotFoundError:
        return None
    return None if version.startswith('0.') else version  # 0.x: this project under its earlier name


def warning() -> str | None:
    """One sentence about the other project if it is installed."""
    version = other_distribution()
    if version is None:
        return None
    return f'tile-kernels {version}, another project, is installed over the files of this package; {ADVICE}'
