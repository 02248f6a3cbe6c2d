"""Explicit wgmma instructions: descriptors of shared memory, and the registers of a warpgroup.

Shared memory and fragments have no physical layout here. The layouts that the kernel annotates say which element a
descriptor or a register means.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads
from tile_kernels.interpreter.engine.lanes import Mask
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.errors import BarrierDivergence, OutOfBounds
from tile_kernels.interpreter.meaning.async_ops import groups_of
from tile_kernels.interpreter.memory.access import Access, Buffer, Dim
from tile_kernels.interpreter.memory.dtypes import rounder

_WARPGROUP, _ROWS = 128, 64
_UNIT = 16  # bytes; addresses and distances in a descriptor count these
_SWIZZLE_BITS = {0: 0, 1: 3, 2: 2, 3: 1}  # layout type of a descriptor -> address bits that are swizzled


@op('tl.initialize_wgmma_descriptor')
def _describe(compiler: Compiler, call: Any) -> Closure:
    """Set a descriptor: address within its buffer, layout, and two distances."""
    target, pointer = call.args[0], call.args[1]
    if pointer in compiler.pointers:
        data, offset = compiler.pointers[pointer], compiler.variable(pointer)
    elif type(pointer).__name__ == 'Call' and str(pointer.op.name) == 'tirx.tvm_access_ptr':
        data, offset = pointer.args[1], compiler.expr(pointer.args[2])
    else:
        raise compiler.unsupported(f'a wgmma descriptor of {pointer}')
    if compiler.described.setdefault(target.buffer.data, data) is not data:
        raise compiler.unsupported(f'a wgmma descriptor of several buffers, {target.buffer.name}')
    size = compiler.storages[data].dtype.storage.itemsize
    layout, leading, stride = (compiler.expr(part) for part in call.args[2:5])
    access = compiler.access(target.buffer, list(target.indices))

    def run(frame: Frame) -> None:
        start = np.asarray(offset(frame)).astype(np.uint64) * np.uint64(size) // np.uint64(_UNIT)
        packed = start
        for part, shift in ((leading, 16), (stride, 32), (layout, 62)):
            packed = packed | np.asarray(part(frame)).astype(np.uint64) << np.uint64(shift)
        access.store(frame, packed if packed.ndim else packed[()], frame.mask)

    return run


@op('tl.increase_descriptor_offset')
def _advance(compiler: Compiler, call: Any) -> Closure:
    """Move a descriptor by bytes."""
    load = call.args[0]
    access, offset = compiler.access(load.buffer, list(load.indices)), compiler.expr(call.args[1])

    def run(frame: Frame) -> None:
        step = np.asarray(offset(frame)).astype(np.uint64) // np.uint64(_UNIT)
        moved = np.asarray(access.load(frame, frame.mask)).astype(np.uint64) + step
        access.store(frame, moved if moved.ndim else moved[()], frame.mask)

    return run


@op('tl.warpgroup_commit_batch')
def _commit(compiler: Compiler, call: Any) -> Closure:
    """Close a group of products."""
    if compiler.options.checks == 'none':
        return lambda frame: None
    return lambda frame: groups_of(frame).commit(frame, 'gemm')


class _Operand:
    """A matrix in shared memory, found by a descriptor: (blocks, 1, warpgroups, rows or columns, K)."""

    def __init__(self, compiler: Compiler, descriptor: Any, offset: Any, k_major: bool, size: int, depth: int) -> None:
        data = compiler.described.get(descriptor)
        if data is None:
            raise compiler.unsupported(f'a wgmma with descriptor {descriptor}')
        storage = compiler.storages[data]
        self.logical = _inverse(compiler, data)
        held = compiler.storages[descriptor]
        self.word = Access(
            Buffer(held.name, held.slot, held.dtype, 'local', _one),
            [Dim(lambda frame: 0, (), 'none')],
            compiler.ndim,
            compiler.site,
            False,
        )
        self.offset = compiler.expr(offset)
        self.bytes = storage.dtype.storage.itemsize
        self.k_major, self.size, self.depth = k_major, size, depth
        self.access = _by_index(compiler, storage, size, depth)
        self.access.asynchronous, self.access.everyone = 'gemm', True
        self.access.path = compiler.path_number()

    def load(self, frame: Frame, mask: Mask) -> np.ndarray:
        """The values of the matrix."""
        words = _of_warpgroups(frame, np.asarray(self.word.load(frame, frame.mask)).astype(np.uint64))
        units = _of_warpgroups(frame, np.asarray(self.offset(frame)).astype(np.int64))
        start = ((words & np.uint64(0x3FFF)).astype(np.int64) + units) * _UNIT
        leading, stride = ((words >> np.uint64(shift)).astype(np.int64) & 0x3FFF for shift in (16, 32))
        kind = int(words.reshape(-1)[0] >> np.uint64(62))
        address = start + self._spread(leading * _UNIT, stride * _UNIT, kind)
        bits = _SWIZZLE_BITS[kind]
        address = address ^ ((address >> 7 & (1 << bits) - 1) << 4)
        place = address // self.bytes
        outside = (place < 0) | (place >= len(self.logical))
        if (outside if mask is None else outside & mask).any():
            text = f'a wgmma descriptor of {self.access.buffer.name} reaches beyond its end'
            raise frame.error(OutOfBounds, text, self.access.site, buffer=self.access.buffer.name)
        self.access.index = self.logical[np.where(outside, 0, place)]  # type: ignore[attr-defined]
        return self.access.load(frame, mask)

    def _spread(self, leading: np.ndarray, stride: np.ndarray, kind: int) -> np.ndarray:
        """Bytes from the start of the matrix to each element, before the swizzle."""
        row, k = np.arange(self.size)[:, None], np.arange(self.depth)[None, :]
        per_unit = _UNIT // self.bytes
        width = 1 << _SWIZZLE_BITS[kind]  # units in a row of the swizzle pattern
        if self.k_major:
            far = k // per_unit * (leading if width == 1 else _UNIT)
            return row % 8 * width * _UNIT + row // 8 * stride + k % per_unit * self.bytes + far
        if width == 1:
            return row % per_unit * self.bytes + row // per_unit * stride + k % 8 * _UNIT + k // 8 * leading
        inner = row % (width * per_unit) * self.bytes
        return inner + row // (width * per_unit) * leading + k % 8 * width * _UNIT + k // 8 * stride


def _one(frame: Frame) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (1,), (1,)


def _by_index(compiler: Compiler, storage: Any, rows: int, columns: int) -> Access:
    """An access to elements of a flat buffer that `index` of the access names: (blocks, 1, groups, rows, columns)."""
    fixed = ((int(storage.size),), (1,))
    view = Buffer(storage.name, storage.slot, storage.dtype, storage.scope, lambda frame: fixed, None, None, fixed)
    checked = compiler.options.checks != 'none'
    made: Any = Access(view, [], compiler.ndim + 3, compiler.site, checked)
    made.dims = [Dim(lambda frame: made.index, (), 'none')]
    made.extra = (lambda frame: frame.threads // _WARPGROUP, lambda frame: rows, lambda frame: columns)
    return made


def _inverse(compiler: Compiler, data: Any) -> np.ndarray:
    """Element number of every physical position of a buffer with an annotated layout."""
    layout, storage = compiler.layouts.get(data), compiler.storages[data]
    if layout is None:
        raise compiler.unsupported(f'a wgmma descriptor of {storage.name}, which has no annotated layout,')
    place = _evaluated(compiler, layout, [layout.get_linearized_forward_index()])[0]
    found = np.zeros(max(place.size, int(place.max()) + 1), np.intp)
    found[place.reshape(-1)] = np.arange(place.size)
    return found


def _evaluated(compiler: Compiler, layout: Any, wanted: list[Any]) -> list[np.ndarray]:
    """Expressions of a layout's variables, for every element of its buffer."""
    shape = [int(extent) for extent in layout.get_input_shape()]
    variables = list(layout.get_forward_vars())[: len(shape)]
    slots = [compiler.new_slot(variable) for variable in variables]
    closures = [compiler.expr(part) for part in wanted]
    frame = Frame(compiler.num_slots, 0, None)
    for slot, axis in zip(slots, np.indices(shape), strict=True):
        frame.env[slot] = axis.astype(np.int32).reshape(1, 1, -1)
    return [np.broadcast_to(np.asarray(closure(frame)).reshape(-1), (int(np.prod(shape)),)) for closure in closures]


def _of_warpgroups(frame: Frame, value: np.ndarray) -> np.ndarray:
    """A value of the first thread of every warpgroup, as (blocks, 1, warpgroups, 1, 1)."""
    value = value.reshape(value.shape + (1,) * (2 - value.ndim)) if value.ndim else value.reshape(1, 1)
    spread = np.broadcast_to(value, (frame.blocks, frame.threads))[:, ::_WARPGROUP]
    return spread.reshape(frame.blocks, 1, -1, 1, 1)


@op('tl.ptx_wgmma_ss')
def _wgmma(compiler: Compiler, call: Any) -> Closure:
    """`C = A @ B + C * scale_out` of a warpgroup: A has 64 rows, and both operands are in shared memory."""
    shape = str(call.args[0].value)
    columns, depth = (int(part) for part in shape.removeprefix('m64n').split('k'))
    if compiler.depth or any(int(part) != 1 for part in call.args[13:15]):
        raise compiler.unsupported(f'ptx_wgmma_ss {shape} in T.Parallel or with negated operands')
    left = _Operand(compiler, call.args[6], call.args[7], bool(call.args[1]), _ROWS, depth)
    right = _Operand(compiler, call.args[8], call.args[9], bool(call.args[2]), columns, depth)
    out = compiler.storages.get(call.args[10])
    layout = compiler.layouts.get(call.args[10])
    if out is None or layout is None or not hasattr(layout, 'thread'):
        raise compiler.unsupported(f'ptx_wgmma_ss into {call.args[10]} without an annotated layout')
    thread, register = _evaluated(compiler, layout, [layout.thread, layout.get_linearized_forward_index()])
    element = np.full((int(thread.max()) + 1, int(register.max()) + 1), -1, np.intp)
    element[thread, register] = np.arange(thread.size)
    first, accumulate = compiler.expr(call.args[11]), compiler.expr(call.args[12])
    access = _by_index(compiler, out, _ROWS, columns)
    access.may_be_in_flight = True
    row, column = np.arange(_ROWS)[:, None], np.arange(columns)[None, :]
    lane = row // 16 * 32 + row % 8 * 4 + column % 8 // 2  # thread of the warpgroup that holds an element
    held = column // 8 * 4 + row % 16 // 8 * 2 + column % 2  # and its register
    rounding, site = rounder(out.dtype), compiler.site
    watched = compiler.options.checks != 'none'

    def run(frame: Frame) -> None:
        active = active_threads(frame)
        if frame.threads % _WARPGROUP:
            raise frame.error(BarrierDivergence, f'ptx_wgmma_ss runs on {frame.threads} threads', site)
        groups = active.reshape(frame.blocks, -1, _WARPGROUP)
        if (groups.any(axis=2) != groups.all(axis=2)).any():
            frame.report(BarrierDivergence, 'ptx_wgmma_ss runs on a part of a warpgroup', site)
        taking = groups.any(axis=2)
        mask = None if taking.all() else taking.reshape(frame.blocks, 1, -1, 1, 1)
        a, b = (operand.load(frame, mask) for operand in (left, right))
        product = np.matmul(a.astype(np.float64), b.astype(np.float64).swapaxes(-1, -2))
        numbers = _of_warpgroups(frame, np.asarray(first(frame)).astype(np.int64)) + held
        group = np.arange(frame.threads // _WARPGROUP).reshape(1, 1, -1, 1, 1) * _WARPGROUP
        access.index = element[group + lane, numbers]  # type: ignore[attr-defined]
        keep = _of_warpgroups(frame, np.asarray(accumulate(frame)) != 0)
        old: Any = access.load(frame, keep if mask is None else keep & mask) if keep.any() else 0
        total = (product + np.where(keep, old, 0)).astype(out.dtype.value)
        access.store(frame, total if rounding is None else rounding(total), mask)
        if watched:
            groups_of(frame).launch(frame, access, mask, 'gemm', commit=False)

    return run
