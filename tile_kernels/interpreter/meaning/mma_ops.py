"""Explicit matrix instructions of a warp: `ldmatrix` and `mma`, with the PTX register layout of each lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import both, splits_warps
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.errors import BarrierDivergence
from tile_kernels.interpreter.meaning.element_ops import pointed, shifted
from tile_kernels.interpreter.meaning.warp_ops import WARP, by_thread, by_warp
from tile_kernels.interpreter.memory.access import Access, Buffer, Dim
from tile_kernels.interpreter.memory.dtypes import DType, decoder, dtype_of, rounder

_KINDS = {
    'fp16': 'float16',
    'bf16': 'bfloat16',
    'tf32': 'tfloat32',
    'fp32': 'tfloat32',
    'fp64': 'float64',
    'e4m3': 'float8_e4m3fn',
    'e5m2': 'float8_e5m2',
    'int8': 'int8',
    'uint8': 'uint8',
}
_ROW_BYTES, _WORD_BYTES = 16, 4


@op('tl.ptx_ldmatrix')
def _ldmatrix(compiler: Compiler, call: Any) -> Closure:
    """Load 8x8 matrices of 16 bits: each lane of eight addresses a row, and every lane gets a word of each matrix."""
    transposed, count = bool(call.args[0]), int(call.args[1])
    source, target = pointed(compiler, call.args[2]), pointed(compiler, call.args[3])
    kind, held = compiler.dtype(source.buffer), compiler.dtype(target.buffer)
    size = kind.storage.itemsize
    if held.storage.itemsize != size or (transposed and size != 2):
        raise compiler.unsupported(f'ptx_ldmatrix of {kind.name} into {held.name}')
    per_row, per_word = _ROW_BYTES // size, _WORD_BYTES // size
    reads = [compiler.access(source.buffer, shifted(source.indices, k)) for k in range(per_row)]
    writes = [compiler.access(target.buffer, shifted(target.indices, k)) for k in range(count * per_word)]
    lane = np.arange(WARP)
    naming = (lane < 8 * count).reshape(1, -1)
    site, checked = compiler.site, compiler.options.checks != 'none'

    def run(frame: Frame) -> None:
        _require_warps(frame, checked, site, 'T.ptx_ldmatrix')
        named = np.tile(naming, (1, -(-frame.threads // WARP)))[:, : frame.threads]
        mask = both(frame.mask, None if named.all() else named)
        rows = [by_warp(frame, read.load(frame, mask), kind.value, 2) for read in reads]
        whole = np.stack(np.broadcast_arrays(*rows), axis=-1)  # (blocks, warps, lanes, elements of a row)
        for number, write in enumerate(writes):
            matrix, part = divmod(number, per_word)
            if transposed:
                picked = whole[:, :, 8 * matrix + lane % 4 * per_word + part, lane // 4]
            else:
                picked = whole[:, :, 8 * matrix + lane // 4, lane % 4 * per_word + part]
            write.store(frame, by_thread(frame, picked), frame.mask)

    return run


@dataclass(frozen=True)
class Operand:
    """One matrix of an `mma`: the elements in a lane's registers, and their position in the matrix."""

    accesses: list[Access]
    dtype: DType
    place: tuple[np.ndarray, np.ndarray]  # (lanes, elements): row and column
    shape: tuple[int, int]

    def load(self, frame: Frame, wide: Any) -> np.ndarray:
        """The matrix of every warp, as (blocks, warps, rows, columns)."""
        count = self.place[0].shape[1]
        loaded = [access.load(frame, frame.mask) for access in self.accesses]
        if len(self.accesses) == count:
            lanes = [by_warp(frame, value, wide, 2) for value in loaded]
        else:
            lanes = self._unpacked([by_warp(frame, value, np.uint32, 2) for value in loaded], wide)
        spread = np.broadcast_arrays(*lanes)
        found = np.empty((*spread[0].shape[:2], *self.shape), wide)
        found[:, :, self.place[0], self.place[1]] = np.stack(spread, axis=-1)
        return found

    def _unpacked(self, words: list[np.ndarray], wide: Any) -> list[np.ndarray]:
        """Elements of packed words."""
        bits = self.dtype.bits
        mask = np.uint32((1 << bits) - 1)
        decode = decoder(self.dtype)
        return [
            decode((word >> np.uint32(bits * k) & mask).astype(self.dtype.storage)).astype(wide)
            for word in words
            for k in range(32 // bits)
        ]


@op('tirx.ptx_mma')
def _mma(compiler: Compiler, call: Any) -> Closure:
    """`C += A @ B` of a warp: A has 16 rows, B has 8 columns, and each lane holds a part of all three.

    The products of an element are summed exactly; the sum with C is rounded once.
    """
    shape, left, right, *kinds = (str(part.value) for part in call.args[:6])
    m, n, depth = _dimensions(shape)
    known = all(kind in _KINDS for kind in kinds[:2]) and kinds[2] in ('fp32', 'fp16', 'int32')
    if (m, n, left, right) != (16, 8, 'row', 'col') or not known:
        raise compiler.unsupported(f'ptx_mma {shape} of {kinds}')
    a_type, b_type = (dtype_of(_KINDS[kind]) for kind in kinds[:2])
    per_word = 32 // a_type.bits
    chunk = 4 * per_word  # elements along K in a word of each of four lanes
    if a_type.bits != b_type.bits or depth % chunk:
        raise compiler.unsupported(f'ptx_mma {shape} of {kinds}')
    group, member = np.divmod(np.arange(WARP)[:, None], 4)
    a_word, a_part = np.divmod(np.arange(2 * depth // chunk * per_word), per_word)
    b_word, b_part = np.divmod(np.arange(depth // chunk * per_word), per_word)
    c_part = np.arange(4)
    a_place = (group + a_word % 2 * 8, member * per_word + a_part + a_word // 2 * chunk)
    b_place = (member * per_word + b_part + b_word * chunk, group + 0 * b_word)
    c_place = (group + c_part // 2 * 8, member * 2 + c_part % 2)
    held = dtype_of({'fp32': 'float32', 'fp16': 'float16', 'int32': 'int32'}[kinds[2]])
    operands = []
    for position, (place, kind, size) in enumerate(
        ((a_place, a_type, (16, depth)), (b_place, b_type, (depth, 8)), (c_place, held, (16, 8)))
    ):
        pointer, offset = call.args[6 + 2 * position], call.args[7 + 2 * position]
        accesses = _registers(compiler, pointer, offset, place[0].shape[1], kind)
        operands.append(Operand(accesses, kind, place, size))
    site, checked = compiler.site, compiler.options.checks != 'none'
    finish = _finisher(held)
    wide = np.int64 if held.is_int else np.float64

    def run(frame: Frame) -> None:
        _require_warps(frame, checked, site, 'T.ptx_mma')
        a, b, c = (operand.load(frame, wide) for operand in operands)
        if a_type.name == 'tfloat32':  # the instruction ignores the lowest bits
            a, b = (_truncated(part) for part in (a, b))
        given = finish(c + a @ b)[:, :, c_place[0], c_place[1]]
        for element, access in enumerate(operands[2].accesses):
            access.store(frame, by_thread(frame, given[..., element]), frame.mask)

    return run


def _finisher(dtype: DType) -> Callable[[np.ndarray], np.ndarray]:
    rounding = rounder(dtype)
    if dtype.is_int:
        return lambda total: total.astype(np.int32)
    if rounding is None:
        return lambda total: total.astype(np.float32)
    return lambda total: rounding(total.astype(np.float32))


def _truncated(value: np.ndarray) -> np.ndarray:
    bits = value.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)
    return bits.view(np.float32).astype(np.float64)


def _dimensions(shape: str) -> tuple[int, int, int]:
    """(16, 8, 16) of 'm16n8k16'."""
    rows, rest = shape.removeprefix('m').split('n')
    columns, depth = rest.split('k')
    return int(rows), int(columns), int(depth)


def _require_warps(frame: Frame, checked: bool, site: Any, what: str) -> None:
    if checked and splits_warps(frame.mask):
        frame.report(BarrierDivergence, f'{what} runs on a part of a warp', site)


def _registers(compiler: Compiler, pointer: Any, offset: Any, count: int, kind: DType) -> list[Access]:
    """Accesses to `count` numbers of a lane from pointer and offset on; a word may hold several numbers."""
    if type(pointer).__name__ == 'Var':
        return _of_memory(compiler, pointer, offset, count, kind)
    load = pointed(compiler, pointer)
    if compiler.dtype(load).name == 'uint32':
        count = count * kind.bits // 32
    elif compiler.dtype(load).bits != kind.bits:
        raise compiler.unsupported(f'ptx_mma of {kind.name} in registers of {compiler.dtype(load).name}')
    first = [*load.indices[:-1], load.indices[-1] + offset]
    return [compiler.access(load.buffer, shifted(first, element)) for element in range(count)]


def _of_memory(compiler: Compiler, data: Any, offset: Any, count: int, kind: DType) -> list[Access]:
    """The same for a pointer to a whole buffer."""
    storage = compiler.storages.get(data)
    if storage is None or storage.scope != 'local' or not isinstance(storage.size, int):
        raise compiler.unsupported(f'ptx_mma with pointer {data}')
    if storage.dtype.name == 'uint32':
        count = count * kind.bits // 32
    elif storage.dtype.bits != kind.bits:
        raise compiler.unsupported(f'ptx_mma of {kind.name} in registers of {storage.dtype.name}')
    flat = ((storage.size,), (1,))
    view = Buffer(storage.name, storage.slot, storage.dtype, 'local', lambda frame: flat, None, None, flat)
    checked = compiler.options.checks != 'none'
    found = []
    for element in range(count):
        dim = Dim(compiler.expr(offset + element), (), 'none')
        found.append(Access(view, [dim], compiler.ndim, compiler.site, checked))
    return found
