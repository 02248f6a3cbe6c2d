"""Every setting of the library: one typed list, read from the environment once, changed in code by `with knobs(...)`.

This is the only file that reads environment variables; `docs/settings.md` is generated from the list below.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tile_kernels.core.errors import ArgumentError


@dataclass(frozen=True)
class Knob:
    """One setting: environment variable, parser, default and the sentence the docs print."""

    env: str
    parse: Callable[[str], Any]
    default: Any
    doc: str


def _flag(text: str) -> bool:
    return text.strip().lower() not in ('', '0', 'false', 'no', 'off')


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError('must be at least 1')
    return value


def default_cache_dir() -> Path:
    """Where compiled kernels live when `TK_CACHE_DIR` is unset."""
    base = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(base) / 'tile_kernels'


KNOBS: dict[str, Knob] = {
    'interpret': Knob(
        'TK_INTERPRET', _flag, False, 'run kernels on CPU tensors through the interpreter instead of the twin'
    ),
    'checks': Knob('TK_CHECKS', str, 'memory', 'what the interpreter checks: none, memory, races or all'),
    'num_sms': Knob(
        'TK_NUM_SMS', _positive, None, 'upper bound on the blocks of persistent kernels (all SMs if unset)'
    ),
    'token_alignment': Knob(
        'TK_TOKEN_ALIGNMENT', _positive, 128, 'multiple at which the rows of an expert start in prefix-sum layouts'
    ),
    'cache_dir': Knob(
        'TK_CACHE_DIR', Path, None, 'directory of compiled kernels; may be read-only (default ~/.cache/tile_kernels)'
    ),
    'disable_jit': Knob(
        'TK_DISABLE_JIT', _flag, False, 'a kernel missing from the cache is an error instead of a compilation'
    ),
    'print_source': Knob(
        'TK_PRINT_KERNEL_SOURCE', _flag, False, 'log the CUDA source of every kernel that is compiled'
    ),
    'full_test': Knob('TK_FULL_TEST', _flag, False, 'tests also run the `full` cases'),
}


class Knobs:
    """The current settings as attributes; calling it gives a context manager that overrides some of them.

    >>> from tile_kernels import knobs
    >>> with knobs(num_sms=100):
    ...     knobs.num_sms
    100
    """

    interpret: bool
    checks: str
    num_sms: int | None
    token_alignment: int
    cache_dir: Path | None
    disable_jit: bool
    print_source: bool
    full_test: bool

    #: Changes with every setting; what was decided under other settings is void.
    epoch: int = 0

    def __init__(self) -> None:
        self.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        self.touch()

    def touch(self) -> None:
        """Void what was decided under the settings so far."""
        object.__setattr__(self, 'epoch', self.epoch + 1)

    def reset(self) -> None:
        """Read every setting from the environment again."""
        for name, knob in KNOBS.items():
            text = os.environ.get(knob.env)
            if text is None or text == '':
                setattr(self, name, knob.default)
                continue
            try:
                setattr(self, name, knob.parse(text))
            except ValueError as error:
                raise ArgumentError(
                    f'knobs: {knob.env} must be {knob.parse.__name__.lstrip("_")}, got {text!r}'
                ) from error

    @contextmanager
    def __call__(self, **overrides: Any) -> Iterator[Knobs]:
        """Override settings inside a `with` block."""
        unknown = set(overrides) - set(KNOBS)
        if unknown:
            raise ArgumentError(f'knobs: no setting named {sorted(unknown)[0]!r}; there are {", ".join(KNOBS)}')
        before = {name: getattr(self, name) for name in overrides}
        try:
            for name, value in overrides.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in before.items():
                setattr(self, name, value)


knobs = Knobs()
