"""Replay: a call with the same key as an earlier one repeats its allocations and launches, and nothing else.

The body of an op depends on shapes, strides, dtypes, alignments and options, never on values. So its second run with
the same properties is recorded. From then on, a generated function of a few lines replaces the body:

    def replay(t0):
        if not guard(t0) or t0.data_ptr() & 15:
            return MISS
        o0 = empty_strided((4096, 7168), (7168, 1), dtype=float8_e4m3fn, device=cuda0)
        o1 = empty_strided((4096, 56), (56, 1), dtype=float32, device=cuda0)
        f0(t0, o0, o1, 0.0001)
        return QuantTensor(o0, o1, fmt)

So host time is that of the allocations and the launch, however much a body checks. The guard is the one that
`torch.compile` puts before its graphs: one call compares types, dtypes, devices, shapes and strides of all tensors. A
body is not replayed if it does anything with tensors besides allocating, viewing and launching. A dispatch mode detects
this during recording, and the function then returns BODY.

A launch may use a tensor with another shape or dtype than its own. It then gets the address of a `DLTensor` struct
(DLPack) that describes the view, with the data pointer of this call. A view made by PyTorch costs several times as
much. So workspaces share one allocation: launches get structs that point into it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import TorchDispatchMode

from tile_kernels.core.formats import QuantTensor, quant_tensor
from tile_kernels.core.launch import recording

aten = torch.ops.aten

#: The result of a replay function for tensors it was not generated for.
MISS = object()
#: The result of a replay function for matching tensors if the call must run the body.
BODY = object()

#: PyTorch operators allowed in a replayed body: allocations.
_ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten.empty_like.default,
}
#: PyTorch operators allowed in a replayed body: views.
_VIEWS = {
    aten.alias.default,
    aten.as_strided.default,
    aten.detach.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unbind.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.view.dtype,
    aten._unsafe_view.default,
}

#: Workspaces share one allocation up to this size. For more bytes kernels take longer than Python, and large blocks
#: are harder to find in fragmented memory.
_SHARED_BYTES = 1 << 26
#: Alignment of workspaces, that of the allocator of PyTorch.
_ALIGNMENT = 512

#: Words of 8 bytes in a `DLTensor`: data, device, rank and dtype, shape, strides, offset.
_DL_WORDS = 6
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class _Watch(TorchDispatchMode):
    """Records allocations, and whether the body called any operator except allocations and views."""

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


def record(
    body: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    inputs: list[Tensor | None],
    written: Sequence[Tensor] | None = (),
) -> tuple[Any, Callable | None]:
    """Run `body` once; returns its result and a function that repeats the call for tensors like `inputs`.

    The function increments the autograd versions of the `written` inputs, as `body` itself must do. An absent optional
    tensor is None in `inputs`. With `written=None`, the versions say which inputs `body` wrote. No function is returned
    if one tensor was given twice, because a launch argument could then mean either of the two.
    """
    starts = [t.data_ptr() for t in inputs if t is not None and t.numel() > 0]
    if len(set(starts)) < len(starts):
        return body(*args, **kwargs), None
    before = [_version(t) for t in inputs]
    with recording() as launches, _Watch() as watch:
        result = body(*args, **kwargs)
    if written is None:
        written = [t for t, old in zip(inputs, before, strict=True) if t is not None and _version(t) != old]
    results = _leaves(result)
    repeatable = watch.harmless and results is not None
    fresh = [r for r in results or () if all(r is not t for t in inputs)]
    outputs = tuple({id(r): r for r in fresh}.values()) if repeatable else ()
    writer = _Writer(inputs, outputs, watch.allocated, written)
    return result, writer.function(launches if repeatable else None, result)


class _Writer:
    """Generates the replay function; it names inputs (t), outputs (o) and workspaces (w)."""

    def __init__(
        self,
        inputs: list[Tensor | None],
        outputs: tuple[Tensor, ...],
        allocated: list[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        self.parameters = [f't{i}' for i in range(len(inputs))]
        self.inputs = {f't{i}': t for i, t in enumerate(inputs) if t is not None}
        self.written = [name for name, t in self.inputs.items() if any(t is w for w in written)]
        self.outputs = {f'o{i}': t for i, t in enumerate(outputs)}
        taken = {_storage(t) for t in outputs}
        workspaces = [t for t in allocated if t.numel() and _storage(t) not in taken]
        self.workspaces = {f'w{i}': t for i, t in enumerate(workspaces)}
        #: Workspaces in the shared allocation `w`, and where they begin.
        self.shared: dict[str, int] = {}
        #: What launches get as a struct: its pointer by address, dtype and layout; data pointer in code, struct.
        self.pointers: dict[tuple, str] = {}
        self.views: list[tuple[str, list[int]]] = []
        self.constants: dict[str, Any] = {
            'empty_strided': torch.empty_strided,
            'empty': torch.empty,
            'empty_like': torch.empty_like,
            'guard': _guard(list(self.inputs.values())),
            'MISS': MISS,
            'BODY': BODY,
        }

    def function(self, launches: list[tuple[Callable, tuple]] | None, result: Any) -> Callable:
        """The function; without `launches`, or if a tensor of the call has no name, it returns BODY."""
        work = None if launches is None else self._work(launches, result)
        lines = [
            f'def replay({", ".join(self.parameters)}):',
            f'    if not guard({", ".join(self.inputs)}) or {self._misaligned()}{self._elsewhere()}:',
            '        return MISS',
            *(work or ['    return BODY']),
        ]
        exec('\n'.join(lines), self.constants)
        return self.constants['replay']

    def _misaligned(self) -> str:
        """An expression: true if an address modulo 16 differs from that of the recorded call."""
        offsets = {name: t.data_ptr() & 15 for name, t in self.inputs.items()}
        if not any(offsets.values()):
            return f'({" | ".join(f"{name}.data_ptr()" for name in offsets)}) & 15'
        return ' or '.join(f'{name}.data_ptr() & 15 != {offset}' for name, offset in offsets.items())

    def _elsewhere(self) -> str:
        """An expression: true if another device is current; empty if there is only one device."""
        device = next(iter(self.inputs.values())).device
        if device.type != 'cuda' or torch.cuda.device_count() == 1:
            return ''
        return f' or {self._constant(torch._C._cuda_getDevice)}() != {device.index}'

    def _work(self, launches: list[tuple[Callable, tuple]], result: Any) -> list[str] | None:
        """Lines that allocate, launch and return."""
        given = {_storage(t) for t in self.inputs.values() if t.numel()}
        made = [_storage(t) for t in self.outputs.values() if t.numel()]
        if len(set(made)) < len(made) or given.intersection(made):
            return None  # an output that aliases memory is no fresh allocation
        size = self._share(launches)
        own = {name: t for name, t in self.workspaces.items() if name not in self.shared}
        lines, known = [], dict(self.inputs)
        for name, t in (self.outputs | own).items():
            lines.append(self._allocation(name, t, known))
            known[name] = t
        if self.shared:
            device = self._constant(next(iter(self.inputs.values())).device)
            lines += [f'    w = empty({size}, dtype={self._constant(torch.uint8)}, device={device})']
            lines += ['    start = w.data_ptr()']
        calls = []
        for i, (bound, args) in enumerate(launches):
            words = self._arguments(args)
            if words is None:
                return None
            calls.append(f'    {self._constant(bound, f"f{i}")}({", ".join(words)})')
        back = ['    free.append(s)'] if self.views else []
        told = [f'    {self._constant(increment_version)}(({", ".join(self.written)},))'] if self.written else []
        return [*lines, *self._structs(), *calls, *back, *told, f'    return {self._result(result)}']

    def _structs(self) -> list[str]:
        """Lines that reserve the structs of all views for this call and set their data pointers."""
        if not self.views:
            return []
        words = [word for _, struct in self.views for word in struct]

        def new_structs() -> tuple:
            structs = (ctypes.c_uint64 * len(words))(*words)
            start = ctypes.addressof(structs)
            return structs, *(ctypes.c_void_p(start + 8 * i) for i in range(0, len(words), _DL_WORDS))

        self.constants |= {'free': [], 'new_structs': new_structs}
        pointers = ', '.join(f'p{i}' for i in range(len(self.views)))
        take = ['    try:', '        s = free.pop()', '    except IndexError:', '        s = new_structs()']
        return [*take, f'    d, {pointers} = s'] + [
            f'    d[{_DL_WORDS * i}] = {address}' for i, (address, _) in enumerate(self.views)
        ]

    def _share(self, launches: list[tuple[Callable, tuple]]) -> int:
        """Choose the workspaces that share an allocation; returns its size.

        A launch takes its stream from a tensor among its arguments. So one that has workspaces only keeps one of them.
        """
        kept: set[int] = set()
        for _, args in launches:
            tensors = [value for value in args if isinstance(value, Tensor)]
            names = [self._named(value) for value in tensors]
            if any(name is not None and name not in self.workspaces for name in names):
                continue
            whole = [_storage(value) for value, name in zip(tensors, names, strict=True) if name is not None]
            if not kept.intersection(whole):
                kept.update(whole[:1] or map(_storage, tensors))
        device, size, places = next(iter(self.inputs.values())).device, 0, {}
        for name, t in self.workspaces.items():
            if _storage(t) not in kept and t.device == device:
                places[name] = size
                size += -(-t.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        if len(places) > 1 and size <= _SHARED_BYTES:
            self.shared = places
        return size

    def _constant(self, value: Any, name: str | None = None) -> str:
        name = name or f'c{len(self.constants)}'
        self.constants[name] = value
        return name

    def _allocation(self, name: str, output: Tensor, known: dict[str, Tensor]) -> str:
        """A line that allocates the same extent, including the padding after strided outputs.

        A tensor like a `known` one takes a fifth less time, because no shape and no dtype is parsed.
        """
        options = f'dtype={self._constant(output.dtype)}, device={self._constant(output.device)}'
        layout = f'{tuple(output.shape)}, {output.stride()}'
        held, needed = output.untyped_storage().nbytes() // output.element_size(), _extent(output)
        if held <= needed and output.storage_offset() == 0:
            for other, t in known.items():
                same = (t.dtype, t.device, t.shape) == (output.dtype, output.device, output.shape)
                if same and t.is_contiguous() and output.is_contiguous():
                    return f'    {name} = empty_like({other})'
            return f'    {name} = empty_strided({layout}, {options})'
        return f'    {name} = empty({held}, {options}).as_strided({layout}, {output.storage_offset()})'

    def _arguments(self, args: tuple) -> list[str] | None:
        """The arguments of a launch as expressions of the names; None if a tensor has no name."""
        words = [self._named(value) if isinstance(value, Tensor) else self._constant(value) for value in args]
        # A launch takes its stream from a tensor among its arguments.
        has_tensor = any(isinstance(value, Tensor) and word for value, word in zip(args, words, strict=True))
        for i, value in enumerate(args):
            if words[i] is None:
                words[i] = self._pointer(value) if has_tensor else self._view(value)
                has_tensor = True
        return None if None in words else [word for word in words if word is not None]

    def _named(self, value: Tensor) -> str | None:
        """The name of the tensor that `value` is, or that has the same address, dtype, shape and strides."""
        for name, tensor in self._tensors.items():
            if name in self.shared:
                continue
            if value is tensor or (
                (value.data_ptr(), value.dtype, value.shape, value.stride())
                == (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
                and tensor.numel() > 0
            ):
                return name
        return None

    def _pointer(self, value: Tensor) -> str | None:
        """A workspace in the shared allocation, or a view of a named tensor, as the address of a struct."""
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if key in self.pointers:
            return self.pointers[key]
        owners = {
            n: value.data_ptr() - t.data_ptr() for n, t in self._tensors.items() if _storage(value) == _storage(t)
        }
        name = next((name for name, offset in owners.items() if offset == 0), min(owners, default=None))
        if name is None or (
            owners[name] != 0 and len(owners) > 1
        ):  # the distance between two inputs may change from call to call
            return None
        first, offset = f'{name}.data_ptr()', owners[name]
        if name in self.shared:
            first, offset = 'start', self.shared[name] + offset
        self.views.append((f'{first} + {offset}' if offset else first, self._struct(value)))
        self.pointers[key] = f'p{len(self.views) - 1}'
        return self.pointers[key]

    def _struct(self, value: Tensor) -> list[int]:
        """The 8-byte words of the `DLTensor` of a tensor."""
        capsule = torch.utils.dlpack.to_dlpack(value.detach())
        words = list((ctypes.c_uint64 * _DL_WORDS).from_address(_capsule_pointer(capsule, b'dltensor')))
        layout = (ctypes.c_int64 * (2 * value.dim()))(*value.shape, *value.stride())
        self._constant(layout)  # keeps the memory alive as long as the function
        words[3:] = ctypes.addressof(layout), ctypes.addressof(layout) + 8 * value.dim(), 0
        return words

    def _view(self, value: Tensor) -> str | None:
        """A view of a named tensor, made by PyTorch."""
        layout = f'{tuple(value.shape)}, {value.stride()}'
        for name, tensor in self._tensors.items():
            if tensor.numel() == 0 or _storage(value) != _storage(tensor):
                continue
            same_start = value.data_ptr() == tensor.data_ptr()
            if value.dtype == tensor.dtype and name not in self.inputs:
                return f'{name}.as_strided({layout}, {value.storage_offset()})'
            if value.dtype == tensor.dtype and same_start:  # the storage offset of an input may change
                return f'{name}.as_strided({layout})'
            if same_start and value.shape == tensor.shape and value.stride() == tensor.stride():
                return f'{name}.view({self._constant(value.dtype)})'
        return None

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return self.inputs | self.outputs | self.workspaces

    def _result(self, result: Any) -> str:
        if isinstance(result, Tensor):
            return next(name for name, t in (self.inputs | self.outputs).items() if t is result)
        if type(result) is QuantTensor:
            parts = ', '.join(self._result(part) for part in result)
            return f'{self._constant(quant_tensor)}(({parts}), {self._constant(result.fmt)})'
        return f'({"".join(f"{self._result(part)}, " for part in result)})' if result is not None else 'None'


def _leaves(result: Any) -> list[Tensor] | None:
    """The tensors of a result made of tuples, tensors and None; None if there is anything else."""
    if isinstance(result, Tensor) or result is None:
        return [] if result is None else [result]
    if type(result) not in (tuple, QuantTensor):
        return None
    parts = [_leaves(part) for part in result]
    return None if None in parts else [leaf for part in parts for leaf in part or ()]


def _version(x: Tensor | None) -> int:
    """The version of a tensor for autograd; those of inference mode have none."""
    return 0 if x is None or x.is_inference() else x._version


def _guard(tensors: list[Tensor]) -> Callable[..., bool]:
    """Checks whether tensors match these in type, dtype, device, shape, strides and requires_grad."""
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards: Any = TensorGuards  # the stub is wrong: it takes one list per tensor
    return guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _extent(x: Tensor) -> int:
    """The number of elements from the first to the last of `x` in memory."""
    if x.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
