"""Give TileLang the names that guides to it use and that it lacks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tile_kernels.core.errors import ArgumentError

_before: list[tuple[Any, str, Any]] = []
_MISSING = object()


def extend_tilelang(undo: bool = False) -> list[str]:
    """Add to `tilelang` what guides to it describe and it lacks; existing names stay, `tilelang.jit` takes more.

    Added are `tilelang.profiler.start`, `stop` and `summary`, and `tilelang.utils.plot_layout`. `tilelang.jit` also
    takes `options={'fastMath': True, 'maxRegisters': 128}`, and `target='cpu'` for the interpreter. Traces of
    `torch.profiler` name the ops of this package.

    Args:
        undo: remove them again.

    Returns:
        The names.
    """
    import tilelang
    import tilelang.profiler
    import tilelang.utils
    from torch.autograd import profiler as torch_profiler

    if undo:
        for owner, name, value in reversed(_before):
            delattr(owner, name) if value is _MISSING else setattr(owner, name, value)
        _before.clear()
        return list(_NAMES)
    if _before:
        return list(_NAMES)
    from tile_kernels import profiler

    for name in ('start', 'stop', 'summary'):
        _set(tilelang.profiler, name, getattr(profiler, name))
    _set(tilelang.utils, 'plot_layout', _plot_layout)
    _set(tilelang, 'jit', _extended_jit(tilelang.jit), wrap=True)
    naming = profiler.Naming()
    for name, also in (('_run_on_profiler_start', naming.install), ('_run_on_profiler_stop', naming.remove)):
        _set(torch_profiler, name, _both(getattr(torch_profiler, name), also), wrap=True)
    return list(_NAMES)


_NAMES = (
    'tilelang.profiler.start',
    'tilelang.profiler.stop',
    'tilelang.profiler.summary',
    'tilelang.utils.plot_layout',
    'tilelang.jit',
    'torch.profiler',
)


def _set(owner: Any, name: str, value: Any, wrap: bool = False) -> None:
    """Set an attribute, but keep one that exists, unless the new one wraps it."""
    existing = getattr(owner, name, _MISSING)
    if existing is _MISSING or wrap:
        _before.append((owner, name, existing))
        setattr(owner, name, value)


def _both(first: Callable[[], Any], second: Callable[[], Any]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


def _plot_layout(*args: Any, **kwargs: Any) -> Any:
    """`tile_kernels.sight.plot_layout`."""
    from tile_kernels import sight

    return sight.plot_layout(*args, **kwargs)


def _extended_jit(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tilelang.jit` that also takes `options` and `target='cpu'`, and explains errors of a kernel."""
    from tilelang.jit import JITImpl

    from tile_kernels.sight.errors import explaining

    class ExtendedJIT(JITImpl):
        """A jit function whose known errors are one sentence."""

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            with explaining():
                return super().__call__(*args, **kwargs)

    class InterpretedJIT(ExtendedJIT):
        """A jit function for the target `cpu`: the interpreter runs its kernels."""

        def compile(self, *args: Any, **kwargs: Any) -> Any:
            from tile_kernels.core.knobs import knobs
            from tile_kernels.interpreter.jit_hook import InterpretedKernel

            return InterpretedKernel(self.get_tir(*args, **kwargs), self.out_idx, self.pass_configs, knobs.checks)

    @functools.wraps(original)
    def jit(func: Any = None, *, options: Mapping[str, Any] | None = None, target: Any = None, **others: Any) -> Any:
        kind = InterpretedJIT if target == 'cpu' else ExtendedJIT
        decorator = original(target=None if target == 'cpu' else target, **_with_options(others, options or {}))

        def decorate(function: Callable[..., Any]) -> Any:
            made = decorator(function)
            made.__class__ = kind
            return made

        return decorate if func is None else decorate(func)

    return jit


def _with_options(others: dict[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `tilelang.jit` with the options as pass configs and compiler flags."""
    from tilelang import PassConfigKey

    configs, flags = dict(others.get('pass_configs') or {}), others.get('compile_flags') or []
    flags = [flags] if isinstance(flags, str) else list(flags)
    for name, value in options.items():
        if name == 'fastMath' and isinstance(value, bool):
            configs[PassConfigKey.TL_ENABLE_FAST_MATH] = value
        elif name == 'maxRegisters' and isinstance(value, int) and 16 <= value <= 255:
            flags.append(f'-maxrregcount={value}')
        else:
            known = 'fastMath (True or False) and maxRegisters (16 to 255)'
            raise ArgumentError(f'tilelang.jit: options are {known}, got {name}={value!r}')
    given = {'pass_configs': configs} if configs else {}
    return others | given | ({'compile_flags': flags} if flags else {})
