"""`TK_INTERPRET=1` reaches a user's own `@tilelang.jit` kernels as soon as TileLang is imported, and not before."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any


def hook_tilelang() -> None:
    """Interpret kernels from now on if TileLang is loaded, or from the moment it is."""
    if 'tilelang' in sys.modules:
        from tile_kernels.interpreter.jit_hook import install

        install()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Sees the first import of TileLang."""

    asked = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != 'tilelang' or self.asked:
            return None
        self.asked = True  # the other finders answer the question below
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asked = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads TileLang as usual, then puts the interpreter in the place of its compiler."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: Any) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        from tile_kernels.interpreter.jit_hook import install

        install()
