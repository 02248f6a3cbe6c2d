"""How works are declared that `tools/peers.py` measures: inputs, our call, its meaning in PyTorch, the calls of peers.

An adapter gets the inputs of a case by name and returns the call that is timed. Imports, conversions of layouts, and
buffers that a user would keep belong to the adapter, not to the call. It raises if the peer is absent or refuses.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.cases import Case

OURS = 'tile_kernels'
BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn

#: The package that a peer needs, by the first word of its name; PyTorch's own calls need none.
PACKAGES = {
    'SGLang': 'sglang',
    'Liger': 'liger_kernel',
    'fla': 'fla',
    'TileOPs': 'tileops',
    'TransformerEngine': 'transformer_engine',
    'torchao': 'torchao',
}

Given = dict[str, Any]
Adapter = Callable[..., Any]


def same(found: Any) -> Any:
    """What it is given."""
    return found


@dataclass(frozen=True)
class Call:
    """What is timed, and how its result becomes the tensors that are compared."""

    run: Callable[[], Any]
    read: Callable[[Any], Any] = same


@dataclass(frozen=True)
class Work:
    """One task that we and others do.

    Attributes:
        op: our op; several works may name the same.
        make: draws the inputs of a case.
        ours: adapter of our call.
        truth: the result in plain PyTorch, of the inputs by name.
        peers: adapters by name.
        cases: the most important first.
        tiny: a case for a CPU.
        bound: largest relative error, |result - truth| / |truth| over all elements of a tensor.
        part: what of a result is compared, where the truth covers a part only.
        gradient: whether the call goes through autograd; such a call cannot be captured alone.
        name: what distinguishes works of the same op.
    """

    op: str
    make: Callable[..., Given]
    ours: Adapter
    truth: Callable[..., Any]
    peers: dict[str, Adapter]
    cases: list[Case]
    tiny: Case
    bound: float = 1e-2
    part: Callable[[Any], Any] = same
    gradient: bool = False
    name: str = ''

    @property
    def key(self) -> str:
        """The op and the name."""
        return f'{self.op}:{self.name}' if self.name else self.op


class Draw:
    """Random inputs from a generator of its own: a failed graph capture may break the default one."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, generator=self.generator, device=self.device).mul_(scale).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Numbers from 0 to 1 in float32."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def ints(self, high: int, *shape: int) -> Tensor:
        """Integers below `high`."""
        return torch.randint(high, shape, generator=self.generator, device=self.device)


def use(path: str) -> Any:
    """The object `module:name` of a peer."""
    module, _, name = path.partition(':')
    return getattr(importlib.import_module(module), name)


def direct(function: Callable[..., Any], read: Callable[[Any], Any] = same) -> Adapter:
    """An adapter whose call takes the inputs as they are."""
    return lambda **given: Call(partial(function, **given), read)


def compiled(function: Callable[..., Any], read: Callable[[Any], Any] = same) -> Adapter:
    """An adapter for a plain function that is compiled for the shape alone."""

    def adapter(**given: Any) -> Call:
        torch._dynamo.reset()  # otherwise the ninth shape would run uncompiled
        return Call(partial(torch.compile(function, dynamic=False, fullgraph=True), **given), read)

    return adapter


def peer(
    path: str, args: Callable[..., tuple] | None = None, read: Callable[[Any], Any] = same, **more: Any
) -> Adapter:
    """An adapter for a function of a peer: `args` makes its positional arguments, `more` are others."""

    def adapter(**given: Any) -> Call:
        positional = tuple(given.values()) if args is None else args(**given)
        return Call(partial(use(path), *positional, **more), read)

    return adapter


def tileops(
    path: str, options: Callable[..., dict] = lambda **_: {}, args: Any = None, read: Callable[[Any], Any] = same
) -> Adapter:
    """An adapter for an op of TileOPs, which is made from options before the call."""

    def adapter(**given: Any) -> Call:
        positional = tuple(given.values()) if args is None else args(**given)
        return Call(partial(use(f'tileops.{path}')(**options(**given)), *positional), read)

    return adapter


def rows(names: str, *lines: str) -> list[Case]:
    """Cases as a table: the names of the columns, and a line of values for each case."""
    return [dict(zip(names.split(), map(_value, line.split()), strict=True)) for line in lines]


def _value(word: str) -> Any:
    return tuple(map(int, word.split('x'))) if 'x' in word else word == 'yes' if word in ('yes', 'no') else int(word)


def first(found: Any) -> Any:
    """The first of several results."""
    return found[0]
