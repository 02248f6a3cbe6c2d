"""The operator of an op, `torch.ops.tile_kernels.<family>_<op>`: its schema and its flat arguments.

`torch.compile`, export and dispatch modes see the operator. Operators support neither `QuantTensor` nor `QuantFormat`.
So a `QuantTensor` becomes two tensors and a format name, and a `QuantFormat` becomes its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.params import Param

_library = torch.library.Library('tile_kernels', 'FRAGMENT')


class Operator:
    """Schema and flat arguments of one op."""

    def __init__(self, name: str, params: list[Param], outputs: tuple[str, ...]) -> None:
        self.name = name
        self.params = params
        self.outputs = outputs
        #: Names of the flat arguments.
        self.flat_names: list[str] = []
        for param in params:
            suffixes = ('', '_sf', '_fmt') if param.type is QuantTensor else ('',)
            self.flat_names += [param.name + suffix for suffix in suffixes]

    @property
    def schema(self) -> str:
        """Schema of the operator."""
        returns = {0: '()', 1: 'Tensor'}.get(len(self.outputs), f'({", ".join("Tensor" for _ in self.outputs)})')
        words = [param.schema for param in self.params]
        first = next((i for i, param in enumerate(self.params) if param.keyword_only and param.required), None)
        if first is not None:  # after options with defaults, required arguments of a schema must be keyword-only
            words.insert(first, '*')
        return f'{self.name}({", ".join(words)}) -> {returns}'

    @property
    def overload(self) -> torch._ops.OpOverload:
        """`torch.ops.tile_kernels.<family>_<op>.default`."""
        return getattr(torch.ops.tile_kernels, self.name).default

    def define(self, run: Callable, fake: Callable) -> None:
        """Register the operator: `run` for CPU and CUDA tensors, `fake` for fake ones, both with arguments by name."""
        _library.define(self.schema, tags=(torch.Tag.pt2_compliant_tag,))

        def run_flat(*flat: Any, **keywords: Any) -> Any:
            return plain(run(**self.unflatten(flat, keywords)))

        def fake_flat(*flat: Any, **keywords: Any) -> Any:
            return plain(fake(**self.unflatten(flat, keywords)))

        for key in ('CPU', 'CUDA'):
            _library.impl(self.name, run_flat, key)
        torch.library.register_fake(f'tile_kernels::{self.name}', fake_flat, lib=_library)

    def define_gradient(self, backward: Callable, setup_context: Callable) -> None:
        """Register the gradient of the operator."""
        name = f'tile_kernels::{self.name}'
        torch.library.register_autograd(name, backward, setup_context=setup_context, lib=_library)

    def define_no_gradient(self, check: Callable[[dict[str, Any]], None]) -> None:
        """Register results as not differentiable: autograd records nothing. `check` first gets the arguments."""

        def below_autograd(keyset: torch._C.DispatchKeySet, *flat: Any, **keywords: Any) -> Any:
            check(self.unflatten(flat, keywords))
            with torch._C._AutoDispatchBelowAutograd():
                return self.overload.redispatch(keyset & torch._C._after_autograd_keyset, *flat, **keywords)

        _library.impl(self.name, below_autograd, 'Autograd', with_keyset=True)

    def __call__(self, given: dict[str, Any]) -> Any:
        """Call the operator with arguments by name."""
        flat, keywords = self.arguments(given)
        return self.overload(*flat, **keywords)

    def arguments(self, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments of the operator."""
        flat = dict(zip(self.flat_names, self.flatten(given), strict=True))
        keywords = {p.name: flat.pop(p.name) for p in self.params if p.keyword_only and p.required}
        return tuple(flat.values()), keywords

    def flatten(self, given: dict[str, Any]) -> list[Any]:
        """The arguments of the operator: formats by name, a quantized tensor as data, factors and format name."""
        flat: list[Any] = []
        for param in self.params:
            value = given.get(param.name, param.default)
            if param.type is QuantTensor:
                flat.extend((None,) * 3 if value is None else (value.data, value.sf, value.fmt.name))
            elif param.type is QuantFormat and value is not None:
                flat.append(value.name)
            else:
                flat.append(value)
        return flat

    def unflatten(self, flat: Iterable[Any], keywords: dict[str, Any] | None = None) -> dict[str, Any]:
        """The inverse of `flatten`, by parameter name."""
        values, keywords = iter(flat), keywords or {}
        bound: dict[str, Any] = {}
        for param in self.params:
            value = keywords[param.name] if param.name in keywords else next(values, param.default)
            if param.type is QuantTensor:
                parts: Any = (value, next(values, None), next(values, None))
                value = None if value is None else QuantTensor(*parts)
            elif param.type is QuantFormat and value is not None:
                value = QuantFormat.parse(value)
            elif param.many and param.type is int:
                value = tuple(value)
            bound[param.name] = value
        return bound


def plain(result: Any) -> Any:
    """A result as the operator returns it."""
    return tuple(result) if isinstance(result, QuantTensor) else result
