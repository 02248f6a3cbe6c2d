"""All settings of the library in one typed list; read from the environment once, changed by `with knobs(...)`.

No other file reads environment variables. `docs/settings.md` is generated from the list below.

The environment and assignments (`knobs.num_sms = 100`) apply to the process. A `with` block applies to its thread, like
those of PyTorch. It also applies to the threads in which autograd runs a `backward` that was called in the block.
"""

from __future__ import annotations

import ctypes
import difflib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from tile_kernels.core.errors import ArgumentError


@dataclass(frozen=True)
class Kind:
    """The type of a setting: its description, its parser and its validity check."""

    words: str
    parse: Callable[[str], Any]
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class Knob:
    """One setting: environment variable, type, default and the sentence printed in the docs."""

    env: str
    kind: Kind
    default: Any
    doc: str

    def value_of(self, given: Any, name: str) -> Any:
        """The given value, parsed if it is text; errors call the setting `name`."""
        if given is None and self.default is None:
            return None
        try:
            value = self.kind.parse(given) if isinstance(given, str) else given
            accepted = self.kind.accepts(value)
        except ValueError:
            accepted = False
        if not accepted:
            raise ArgumentError(f'knobs: {name} must be {self.kind.words}, got {given!r}')
        return value


_FLAGS = {'': False, '0': False, 'false': False, 'no': False, 'off': False}
_FLAGS |= {'1': True, 'true': True, 'yes': True, 'on': True}


def _flag(text: str) -> bool:
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise ValueError(text) from None


_LEVELS = ('debug', 'info', 'warning', 'error', 'critical')
_CHECKS = ('none', 'memory', 'races', 'all')
_TUNED = ('all', 'shipped', 'off')

FLAG = Kind('True or False', _flag, lambda value: isinstance(value, bool))
POSITIVE = Kind(
    'a positive integer',
    int,
    lambda value: isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0,
)
PATH = Kind('a path', Path, lambda value: isinstance(value, Path))
CHECKS = Kind(f'one of {", ".join(_CHECKS)}', str, lambda value: value in _CHECKS)
TUNED = Kind(f'one of {", ".join(_TUNED)}', str, lambda value: value in _TUNED)
LEVEL = Kind(f'one of {", ".join(_LEVELS)}', str.lower, lambda value: value in _LEVELS)


def default_cache_dir() -> Path:
    """The folder of compiled kernels if `TK_CACHE_DIR` is unset."""
    base = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    return Path(base) / 'tile_kernels'


def environment(name: str) -> str | None:
    """An environment variable of another tool; None if it is unset or empty."""
    return os.environ.get(name) or None


def set_environment(name: str, value: str) -> None:
    """Set an environment variable that another library reads, unless the user has set it."""
    os.environ.setdefault(name, value)


KNOBS: dict[str, Knob] = {
    'interpret': Knob(
        'TK_INTERPRET', FLAG, False, 'run kernels on CPU tensors through the interpreter instead of the twin'
    ),
    'checks': Knob('TK_CHECKS', CHECKS, 'memory', 'what the interpreter checks: none, memory, races or all'),
    'num_sms': Knob('TK_NUM_SMS', POSITIVE, None, 'upper bound on the blocks of persistent kernels (all SMs if unset)'),
    'token_alignment': Knob(
        'TK_TOKEN_ALIGNMENT', POSITIVE, 128, 'multiple at which the rows of an expert start in prefix-sum layouts'
    ),
    'cache_dir': Knob(
        'TK_CACHE_DIR', PATH, None, 'directory of compiled kernels; may be read-only (default ~/.cache/tile_kernels)'
    ),
    'disable_jit': Knob(
        'TK_DISABLE_JIT', FLAG, False, 'a kernel missing from the cache is an error instead of a compilation'
    ),
    'print_source': Knob('TK_PRINT_KERNEL_SOURCE', FLAG, False, 'log the CUDA source of every kernel that is compiled'),
    'few_rows': Knob(
        'TK_FEW_ROWS',
        FLAG,
        None,
        'split the sum over k of products of up to 16 rows; if unset, only in half precision without groups',
    ),
    'tuned': Knob(
        'TK_TUNED', TUNED, 'all', "tables of tuned configs that launches use: all, shipped (not the user's) or off"
    ),
    'log': Knob('TK_LOG', LEVEL, None, 'level of the logger `tile_kernels`: debug, info, warning, error or critical'),
    'full_test': Knob('TK_FULL_TEST', FLAG, False, 'tests also run the `full` cases'),
}


def _no_setting(name: str) -> str:
    close = difflib.get_close_matches(name, KNOBS, n=1)
    hint = f'did you mean {close[0]}?' if close else f'there are {", ".join(KNOBS)}'
    return f'knobs: no setting named {name!r}; {hint}'


def misspelled() -> list[str]:
    """One sentence for each environment variable that is nearly the name of a setting."""
    known = [knob.env for knob in KNOBS.values()]
    given = [name for name in os.environ if name.startswith('TK_') and name not in known]
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.75) for name in given}
    return [f'{name} is not a setting of tile_kernels; did you mean {near[0]}?' for name, near in close.items() if near]


#: The overrides of the active blocks, as pairs sorted by name.
Overrides = tuple[tuple[str, Any], ...]

#: PyTorch stores objects under such a name per thread and passes them to the threads of a backward pass.
_STASH = 'tile_kernels.knobs'


class _Stash:
    """The overrides of a thread, where the threads of its backward passes find them, too."""

    overrides: Overrides = ()


class _Thread(threading.local):
    def __init__(self) -> None:  # an attribute of the object: Dynamo guards a default of the class as absent
        self.overrides: Overrides = ()
        self.stash = _Stash()


_thread = _Thread()


def overrides() -> Overrides:
    """The overrides of the blocks around the caller."""
    if torch.compiler.is_compiling():
        return _thread.overrides  # the tracer can follow this and adds guards for it
    if not knobs.had_blocks or not torch._C._is_key_in_tls(_STASH):
        return ()
    return torch._C._get_obj_in_tls(_STASH).overrides


def _override(values: Overrides) -> None:
    _thread.overrides = values
    if torch.compiler.is_compiling():
        return
    stash = _thread.stash
    if not torch._C._is_key_in_tls(_STASH) or torch._C._get_obj_in_tls(_STASH) is not stash:
        # Up to PyTorch 2.11, `_stash_obj_in_tls` drops a reference later that it never took.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(stash))
        torch._C._stash_obj_in_tls(_STASH, stash)
    stash.overrides = values


class Knobs:
    """The current settings as attributes; a call returns a context manager that overrides some of them.

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
    few_rows: bool | None
    tuned: str
    log: str | None
    full_test: bool

    _own = ('epoch', 'had_blocks', 'listeners', 'of_process')

    def __init__(self) -> None:
        #: Changes with every setting of the process. Decisions made under an older epoch are invalid.
        self.epoch = 0
        #: Called at every change of `epoch`, to drop such decisions.
        self.listeners: list[Callable[[], None]] = []
        #: Whether any thread has ever entered a block. Until then there are no overrides to look up.
        self.had_blocks = False
        self.of_process: dict[str, Any] = {}
        self.reset()

    def touch(self) -> None:
        """Invalidate everything that was decided under the previous settings."""
        self.epoch += 1
        for listener in self.listeners:
            listener()

    def reset(self) -> None:
        """Read all settings from the environment again; an invalid one raises an error when it is used."""
        wrong: dict[str, str] = {}
        for name, knob in KNOBS.items():
            try:
                self.of_process[name] = knob.value_of(os.environ.get(knob.env) or knob.default, knob.env)
            except ArgumentError as error:
                wrong[name] = str(error).removeprefix('knobs: ')
        for name in wrong:  # raised on use: otherwise the import and `doctor` would fail
            self.of_process[name] = ArgumentError(f'knobs: {"; ".join(wrong.values())}')
        self._apply()

    def _apply(self) -> None:
        level = self.of_process['log']
        if isinstance(level, str):
            logging.getLogger('tile_kernels').setLevel(level.upper())
        self.touch()

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in KNOBS and name not in self._own:
            raise ArgumentError(_no_setting(name))
        super().__setattr__(name, value)

    def __call__(self, **values: Any) -> AbstractContextManager[Knobs]:
        """Override settings inside a `with` block."""
        unknown = set(values) - set(KNOBS)
        if unknown:
            raise ArgumentError(_no_setting(sorted(unknown)[0]))
        return self._block({name: KNOBS[name].value_of(value, name) for name, value in values.items()})

    @contextmanager
    def _block(self, values: dict[str, Any]) -> Iterator[Knobs]:
        self.had_blocks = True
        before = overrides()
        _override(tuple(sorted((dict(before) | values).items())))
        try:
            yield self
        finally:
            _override(before)


def _setting(name: str) -> property:
    def read(self: Knobs) -> Any:
        for overridden, value in overrides():
            if overridden == name:
                return value
        value = self.of_process[name]
        if isinstance(value, ArgumentError):
            raise value
        return value

    def assign(self: Knobs, value: Any) -> None:
        self.of_process[name] = KNOBS[name].value_of(value, name)
        self._apply()

    return property(read, assign, doc=KNOBS[name].doc)


for _name in KNOBS:
    setattr(Knobs, _name, _setting(_name))

knobs = Knobs()


def cache_dir() -> Path:
    """The current directory of compiled kernels and of the user's tuned configs."""
    return knobs.cache_dir or default_cache_dir()
