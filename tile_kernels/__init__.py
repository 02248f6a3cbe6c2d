"""GPU kernels for large language models, written in TileLang for PyTorch.

Importing this package neither imports TileLang nor touches CUDA; both happen at the first kernel.
"""

from __future__ import annotations

import importlib
from typing import Any

from tile_kernels.core.errors import ArgumentError, CompileError, LaunchError, TileKernelsError, UnsupportedError
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.jit import compile_count
from tile_kernels.core.knobs import knobs
from tile_kernels.precompile import precompile

__version__ = '0.1.0'

#: Subpackages that hold ops.
FAMILIES = ('moe', 'quant', 'transpose')

_MODULES = (*FAMILIES, 'config', 'utils', 'torch', 'testing', 'interpreter')

__all__ = [
    'FAMILIES',
    'ArgumentError',
    'CompileError',
    'LaunchError',
    'QuantFormat',
    'QuantTensor',
    'TileKernelsError',
    'UnsupportedError',
    'compile_count',
    'explain',
    'knobs',
    'precompile',
    *_MODULES,
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f'tile_kernels.{name}')
    if name == 'explain':
        return importlib.import_module('tile_kernels.cli.explain').explain
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
