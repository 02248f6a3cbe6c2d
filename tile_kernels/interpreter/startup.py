"""`TK_INTERPRET=1` applies to a user's own `@tilelang.jit` kernels once TileLang is imported."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any


def hook_tilelang() -> None:
    """Interpret kernels from now on if TileLang is loaded, or as soon as it is imported."""
    if 'tilelang' in sys.modules:
        from tile_kernels.interpreter.jit_hook import install

        install()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Detects the first import of TileLang."""

    asked = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != 'tilelang' or self.asked:
            return None
        self.asked = True  # the other finders handle the call below
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asked = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads TileLang as usual, then replaces its compiler by the interpreter."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: Any) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        from tile_kernels.interpreter.jit_hook import install

        install()
