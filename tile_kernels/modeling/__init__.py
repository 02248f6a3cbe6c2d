"""Layers made of the ops of this package."""

from __future__ import annotations
"""Layers built from the ops: modules and autograd functions, loaded when first used. Nothing here is a kernel."""
"""Building blocks of models: modules and functions over the ops, with the gradients that training needs."""

from __future__ import annotations

import importlib
from typing import Any

#: Where each layer lives; a module is loaded with its first layer.
_HOMES = {'MoELayer': 'moe'}
#: Public name -> module that defines it.
_HOMES = {
    'Engram': 'engram',
    'EngramGateLayer': 'engram',
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f'tile_kernels.modeling.{_HOMES[name]}'), name)
    if name in _HOMES.values():
        return importlib.import_module(f'tile_kernels.modeling.{name}')
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
#: Public name -> module that defines it, loaded when first used.
_LAZY = {
    'mhc': 'tile_kernels.modeling.mhc',
    'MHCPipeline': 'tile_kernels.modeling.mhc.pipeline',
}

__all__ = [*_LAZY]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module = importlib.import_module(_LAZY[name])
    return getattr(module, name, module)
