"""Replay: a call that looks like an earlier one repeats its allocations and launches, and nothing else.

The body of an op is a function of shapes, strides, dtypes, alignments and options, never of values. So its second run
with the same ones is recorded, and from then on a generated function of a few lines stands in for it:

    def replay(t0):
        if not guard(t0) or t0.data_ptr() & 15:
            return MISS
        o0 = empty_strided((4096, 7168), (7168, 1), dtype=float8_e4m3fn, device=cuda0)
        o1 = empty_strided((4096, 56), (56, 1), dtype=float32, device=cuda0)
        f0(t0, o0, o1, 0.0001)
        return QuantTensor(o0, o1, fmt)

This keeps host time at that of the allocations and the launch, however much a body checks. The guard is the one that
`torch.compile` puts before its graphs: one call compares types, dtypes, devices, shapes and strides of all tensors. A
body that does anything with tensors besides allocating, viewing and launching is not replayed: a dispatch mode watches
while it is recorded, and the function answers BODY.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.utils._python_dispatch import TorchDispatchMode

from tile_kernels.core.formats import QuantTensor
from tile_kernels.core.launch import recording

aten = torch.ops.aten

#: What a replaying function answers to tensors it was not written for, ...
MISS = object()
#: ... and to those it was written for if only the body can do what the body does.
BODY = object()

#: What a replayed body may ask PyTorch for: memory, ...
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
}
#: ... and other views of it.
_VIEWS = {
    aten.as_strided.default,
    aten.detach.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.view.dtype,
    aten._unsafe_view.default,
}


class _Watch(TorchDispatchMode):
    """Notes what is allocated, and whether anything but memory and views was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[Tensor] = []
        self.harmless = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self.allocated.append(result)
        elif func not in _VIEWS:
            self.harmless = False
        return result


def record(body: Callable, args: tuple, kwargs: dict[str, Any], inputs: list[Tensor]) -> tuple[Any, Callable]:
    """Run `body` once; its result, and a function that repeats the call for tensors like `inputs`."""
    with recording() as launches, _Watch() as watch:
        result = body(*args, **kwargs)
    results = () if result is None else result if isinstance(result, tuple) else (result,)
    repeatable = watch.harmless and all(isinstance(r, Tensor) for r in results)
    writer = _Writer(inputs, results if repeatable else (), watch.allocated)
    return result, writer.function(launches if repeatable else None, result)


class _Writer:
    """Writes the replaying function: names for inputs (t), outputs (o) and workspaces (w), lines for what they met."""

    def __init__(self, inputs: list[Tensor], outputs: tuple[Tensor, ...], allocated: list[Tensor]) -> None:
        self.inputs = {f't{i}': t for i, t in enumerate(inputs)}
        self.outputs = {f'o{i}': t for i, t in enumerate(outputs)}
        taken = {_storage(t) for t in outputs}
        workspaces = [t for t in allocated if t.numel() and _storage(t) not in taken]
        self.workspaces = {f'w{i}': t for i, t in enumerate(workspaces)}
        self.constants: dict[str, Any] = {
            'empty_strided': torch.empty_strided,
            'empty': torch.empty,
            'guard': _guard(inputs),
            'MISS': MISS,
            'BODY': BODY,
        }

    def function(self, launches: list[tuple[Callable, tuple]] | None, result: Any) -> Callable:
        """The function; without `launches`, or if a tensor of the call cannot be named, it answers BODY."""
        work = None if launches is None else self._work(launches, result)
        lines = [
            f'def replay({", ".join(self.inputs)}):',
            f'    if not guard({", ".join(self.inputs)}) or {self._misaligned()}:',
            '        return MISS',
            *(work or ['    return BODY']),
        ]
        exec('\n'.join(lines), self.constants)
        return self.constants['replay']

    def _misaligned(self) -> str:
        """True where an address is not as far from a multiple of 16 bytes as that of the recorded call."""
        offsets = {name: t.data_ptr() & 15 for name, t in self.inputs.items()}
        if not any(offsets.values()):
            return f'({" | ".join(f"{name}.data_ptr()" for name in offsets)}) & 15'
        return ' or '.join(f'{name}.data_ptr() & 15 != {offset}' for name, offset in offsets.items())

    def _work(self, launches: list[tuple[Callable, tuple]], result: Any) -> list[str] | None:
        """Lines that allocate, launch and return."""
        given = {_storage(t) for t in self.inputs.values() if t.numel()}
        made = [_storage(t) for t in self.outputs.values() if t.numel()]
        if len(set(made)) < len(made) or given.intersection(made):
            return None  # an output that shares memory is no fresh allocation
        lines = [self._allocation(name, t) for name, t in (self.outputs | self.workspaces).items()]
        for i, (bound, args) in enumerate(launches):
            words = [word for value in args if (word := self._argument(value)) is not None]
            if len(words) < len(args):
                return None
            lines.append(f'    {self._constant(bound, f"f{i}")}({", ".join(words)})')
        return [*lines, f'    return {self._result(result)}']

    def _constant(self, value: Any, name: str | None = None) -> str:
        name = name or f'c{len(self.constants)}'
        self.constants[name] = value
        return name

    def _allocation(self, name: str, output: Tensor) -> str:
        """Memory of the same extent, so that padding behind strided outputs is there as well."""
        options = f'dtype={self._constant(output.dtype)}, device={self._constant(output.device)}'
        layout = f'{tuple(output.shape)}, {output.stride()}'
        held, needed = output.untyped_storage().nbytes() // output.element_size(), _extent(output)
        if held <= needed and output.storage_offset() == 0:
            return f'    {name} = empty_strided({layout}, {options})'
        return f'    {name} = empty({held}, {options}).as_strided({layout}, {output.storage_offset()})'

    def _argument(self, value: Any) -> str | None:
        """An argument of a launch as an expression of the names."""
        if not isinstance(value, Tensor):
            return self._constant(value)
        named = self.inputs | self.outputs | self.workspaces
        for name, tensor in named.items():
            if value is tensor:
                return name
        layout = f'{tuple(value.shape)}, {value.stride()}'
        for name, tensor in named.items():
            if tensor.numel() == 0 or _storage(value) != _storage(tensor):
                continue
            same_start = value.data_ptr() == tensor.data_ptr()
            if value.dtype == tensor.dtype and name not in self.inputs:
                return f'{name}.as_strided({layout}, {value.storage_offset()})'
            if value.dtype == tensor.dtype and same_start:  # where an input starts in its memory is not part of a call
                return f'{name}.as_strided({layout})'
            if same_start and value.shape == tensor.shape and value.stride() == tensor.stride():
                return f'{name}.view({self._constant(value.dtype)})'
        return None

    def _result(self, result: Any) -> str:
        names = [f'o{i}' for i in range(len(self.outputs))]
        if type(result) is QuantTensor:
            return f'{self._constant(QuantTensor)}({names[0]}, {names[1]}, {self._constant(result.fmt)})'
        if isinstance(result, tuple):
            return f'({", ".join(names)},)'
        return names[0] if names else 'None'


def _guard(tensors: list[Tensor]) -> Callable[..., bool]:
    """Whether tensors have the types, dtypes, devices, shapes and strides of these and need gradients as they do."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards: Any = TensorGuards  # its stub names one list where it takes one for each tensor
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _extent(x: Tensor) -> int:
    """Elements from the first to the last of `x` in memory."""
    if x.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
