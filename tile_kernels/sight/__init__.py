"""Examine any TileLang kernel without a GPU: counts, resources, layouts, passes, error texts.

Every tool takes a kernel and its arguments in the forms that `tile_kernels.sight.subject.resolve` knows. The parts load
when they are first used.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

#: Public names, and the module of this package that defines each.
_MODULES = {
    'resources': 'limits',
    'fits': 'limits',
    'predict': 'model',
    'compare': 'model',
    'Prediction': 'model',
    'roofline': 'roofline',
    'mix': 'sass',
    'layouts': 'layouts',
    'passes': 'passes',
    'plot_layout': 'draw',
    'Layout': 'draw',
    'annotate': 'annotate',
    'lint': 'lint',
    'explain_error': 'errors',
    'explaining': 'errors',
    'Diagnosis': 'errors',
}

__all__ = list(_MODULES)


def __dir__() -> list[str]:
    return sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    found = getattr(importlib.import_module(f'{__name__}.{_MODULES[name]}'), name)
    globals()[name] = found
    return found


class _Package(ModuleType):
    """Keeps the functions of this package visible: importing the submodule `layouts` must not hide `layouts`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _MODULES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
