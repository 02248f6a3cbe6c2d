"""GPU kernels for large language models, written in TileLang for PyTorch.

Importing this package neither imports TileLang nor touches CUDA; both happen at the first kernel.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from tile_kernels.core.errors import ArgumentError, CompileError, LaunchError, TileKernelsError, UnsupportedError
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import compile_count
from tile_kernels.core.knobs import knobs

__version__ = '0.1.0'

#: Subpackages that hold ops.
FAMILIES = ('moe', 'quant', 'transpose')

_MODULES = (*FAMILIES, 'config', 'utils', 'torch', 'testing', 'interpreter')


def __getattr__(name: str) -> ModuleType:
    if name in _MODULES:
        return importlib.import_module(f'tile_kernels.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
