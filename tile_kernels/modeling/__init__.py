"""Layers made of the ops of this package."""

from __future__ import annotations

import importlib
from typing import Any

#: Where each layer lives; a module is loaded with its first layer.
_HOMES = {'MoELayer': 'moe'}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f'tile_kernels.modeling.{_HOMES[name]}'), name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
