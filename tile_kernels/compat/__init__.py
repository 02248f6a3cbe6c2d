"""Module paths of TileKernels: one file for each, which re-exports the names from where they are here.

A package finds these files through its `__path__`: `tile_kernels.quant.types` is `compat/quant/types.py`. Each file
loads at its first use, so `import tile_kernels` does not pay for them.
"""

from __future__ import annotations

import importlib
import os
from types import ModuleType
from typing import Any

_FOLDER = os.path.dirname(__file__)


def attach(package: ModuleType, *shadowed: str) -> None:
    """Let a package find its TileKernels modules, on import and as attributes.

    Args:
        package: `tile_kernels` or a module inside it; without a folder of its name here, nothing changes.
        shadowed: modules that have the name of a function of the package. They load now, and the name stays the
            function; a later import would replace the function by the module.
    """
    folder = os.path.join(_FOLDER, *package.__name__.split('.')[1:])
    if not os.path.isdir(folder):
        return
    path = list(getattr(package, '__path__', ()))
    if folder not in path:
        package.__path__ = [*path, folder]
    for name in shadowed:
        function = getattr(package, name)
        importlib.import_module(f'{package.__name__}.{name}')
        setattr(package, name, function)
    earlier = vars(package).get('__getattr__')

    def find(name: str) -> Any:
        if os.path.isfile(os.path.join(folder, f'{name}.py')) and name != '__init__':
            return importlib.import_module(f'{package.__name__}.{name}')
        if earlier is not None:
            return earlier(name)
        raise AttributeError(f'module {package.__name__!r} has no attribute {name!r}')

    vars(package)['__getattr__'] = find
