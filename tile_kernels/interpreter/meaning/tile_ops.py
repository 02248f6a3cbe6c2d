"""Tile operators: copy, fill, gemm, reduce, scan, reducers, transpose, atomics on tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from tile_kernels.interpreter.engine.frame import Frame, active_threads, agreed, cluster_distance
from tile_kernels.interpreter.engine.lanes import Mask, expand
from tile_kernels.interpreter.engine.translate import Closure, Compiler, is_const, op
from tile_kernels.interpreter.errors import ReducerMisuse, TypeMismatch
from tile_kernels.interpreter.meaning.accumulate import contribute, identity, pair, reduce_axes
from tile_kernels.interpreter.meaning.async_ops import async_copy_hook, async_gemm_hook
from tile_kernels.interpreter.meaning.cluster_ops import Pair, multicast, signal_after_copy
from tile_kernels.interpreter.memory.access import Access, Dim
from tile_kernels.interpreter.memory.dtypes import FP4_PAIR, DType, caster, dtype_of, rounder

# Annotations of copies that select an instruction and do not change the result.
COPY_HINTS = {
    'disable_tma',
    'prefer_instruction',
    'coalesced_width',
    'eviction_policy',
    'parallel_loop_layout',
    'leader_scope_threads',
    'is_async_copy',
    'no_implicit_async_commit_wait',
    'tl.ws_op_id',
    'use_tma',
    'force_cp_async',
}
ASYNCHRONOUS = {'tl.tileop.async_copy': 'copy', 'tl.tileop.tma_copy': 'tma'}
NAN_KEEPING = {'max': np.maximum, 'min': np.minimum}
GEMM_HINTS = {'wg_wait', 'k_pack', 'tl.ws_op_id', 'is_tcgen05', 'use_2cta'}
REDUCE_HINTS = {'batch', 'enable_fadd2', 'nan_propagate', 'tl.ws_op_id'}


class Region:
    """A rectangle of a buffer: an access with one axis per dimension of extent other than 1."""

    def __init__(self, compiler: Compiler, node: Any, guard: str | None = None, reducer: bool = False) -> None:
        buffer, starts, extents = region_parts(compiler, node)
        if not reducer:
            forbid_plain_use(compiler, buffer)
        view = compiler.buffer(buffer)
        if view.dtype is FP4_PAIR and guard is None:
            raise compiler.unsupported(f'a tile operation other than a copy on {view.dtype.name}')
        depth = compiler.depth
        self.wide = [position for position, extent in enumerate(extents) if not (is_const(extent) and int(extent) == 1)]
        self.extents: tuple[Closure, ...] = tuple(compiler.expr(extents[position]) for position in self.wide)
        self.rank = len(extents)
        access = compiler.access(buffer, starts)
        dims = []
        for position, dim in enumerate(access.dims):
            terms = dim.terms
            mode = dim.guard
            if position in self.wide:
                terms = (*terms, (depth + self.wide.index(position), 1))
                mode = 'none' if view.scope != 'global' else guard or ('both' if compiler.options.guards else 'none')
            dims.append(Dim(self._together(dim.base), terms, mode))
        safe_value = compiler.safe_value(buffer, copied=True)
        self.access = Access(view, dims, compiler.ndim + len(self.wide), compiler.site, access.checked, safe_value)
        self.access.extra = self.extents
        self.access.path = access.path
        self.buffer = view
        self.node = buffer
        self.replicated = buffer.data in compiler.storages and compiler.storages[buffer.data].replicated
        self.pair: Pair | None = None  # two blocks use this rectangle as the first of them says

    def _together(self, base: Closure) -> Closure:
        """A coordinate of the rectangle, the same for all participating threads."""

        def run(frame: Frame) -> Any:
            if self.access.private:
                return base(frame)
            start = agreed(frame, base(frame))
            return start if self.pair is None else self.pair.of_first(frame, start)

        return run

    def follow(self, other: Region) -> None:
        """Use the loop extents of another region; a copy iterates over one of its two regions."""
        self.access.extra = other.extents

    def load(self, frame: Frame, mask: Mask) -> Any:
        """Values with the region's axes last, broadcast to the full rectangle."""
        value = self.access.load(frame, mask)
        shape = (1, 1, *self.access.extents(frame))
        array = np.asarray(value)
        array = array.reshape((1,) * len(shape)) if array.ndim == 0 else array
        return np.broadcast_to(array, np.broadcast_shapes(array.shape, shape))

    def shape(self, frame: Frame) -> list[int]:
        """Extents of all dimensions of the region."""
        shape = [1] * self.rank
        for position, extent in zip(self.wide, self.extents, strict=True):
            shape[position] = int(extent(frame))
        return shape

    def load_matrix(self, frame: Frame, mask: Mask) -> np.ndarray:
        """Values as (blocks, *all dimensions of the region), including those of extent 1."""
        value = self.load(frame, mask)
        shape = [1] * self.rank
        for position, extent in zip(self.wide, value.shape[2:], strict=True):
            shape[position] = extent
        return value.reshape(value.shape[0] * value.shape[1], *shape)

    def store_matrix(self, frame: Frame, value: np.ndarray, mask: Mask) -> None:
        """Write (blocks, *all dimensions of the region)."""
        wide = tuple(value.shape[1 + position] for position in self.wide)
        self.access.store(frame, value.reshape(value.shape[0], 1, *wide), mask)


def region_parts(compiler: Compiler, node: Any) -> tuple[Any, list[Any], list[Any]]:
    """Buffer, starts and extents of a `T.region` call, a `BufferRegion` or a plain load."""
    kind = type(node).__name__
    if kind == 'BufferRegion':
        return (node.buffer, [part.min for part in node.region], [part.extent for part in node.region])
    if kind == 'BufferLoad':
        starts = [index.base if type(index).__name__ == 'Ramp' else index for index in node.indices]
        extents = [int(index.lanes) if type(index).__name__ == 'Ramp' else 1 for index in node.indices]
        return node.buffer, starts, extents
    if kind == 'Call' and str(node.op.name) == 'tl.region':
        load = node.args[0]
        return load.buffer, list(load.indices), list(node.args[2:])
    raise compiler.unsupported(f'tile operand {node}')


def collective(frame: Frame, mask: Mask, axes: int) -> Mask:
    """The mask of a collective operation of the block: a block participates if any of its threads does."""
    if mask is None:
        return None
    if mask.shape[1] > 1:
        mask = mask.any(axis=1, keepdims=True)
    return None if mask.all() else expand(mask, mask.ndim + axes)


@op('tl.tileop.copy', 'tl.tileop.async_copy', 'tl.tileop.tma_copy')
def _copy(compiler: Compiler, call: Any) -> Closure:
    """dst[...] = src[...], converted; outside a buffer, loads give the safe value and stores are dropped."""
    notes = {str(key): value for key, value in dict(call.annotations or {}).items()}
    if int(notes.get('is_gather4', 0)) or int(notes.get('is_scatter4', 0)):
        return _four_rows(compiler, call, notes)
    if set(notes) - COPY_HINTS - {'barrier', 'dst_block', 'cluster_mask'}:
        raise compiler.unsupported(f'copy annotation {sorted(set(notes) - COPY_HINTS)}')
    source, target = (Region(compiler, call.args[0], 'both'), Region(compiler, call.args[1], 'both'))
    if len(source.wide) != len(target.wide):
        raise compiler.unsupported('a copy between regions of different rank')
    if FP4_PAIR in (source.buffer.dtype, target.buffer.dtype) and source.buffer.dtype != target.buffer.dtype:
        raise compiler.unsupported(f'a copy from {source.buffer.dtype.name} to {target.buffer.dtype.name}')
    if _level(source) >= _level(target):
        target.follow(source)
    else:
        source.follow(target)
    convert = caster(dtype_of(source.buffer.dtype.name), dtype_of(target.buffer.dtype.name))
    private = 'local' in (source.buffer.scope, target.buffer.scope)
    signal: Callable[[Frame], None] | None = None
    shared_load = multicast(compiler, notes['cluster_mask']) if int(notes.get('cluster_mask', 0)) else None
    if 'dst_block' in notes and not (is_const(notes['dst_block']) and int(notes['dst_block']) == -1):
        if 'barrier' in notes:
            signal = signal_after_copy(compiler, notes['barrier'], notes['dst_block'])
        target.access.row_shift = other_block(compiler, notes['dst_block'])
        target.access.atomic = True  # races between blocks of a cluster are not checked
        private = True
    source.access.private = target.access.private = private
    source.access.per_thread = private or target.replicated
    source.access.only_moves = target.buffer.scope in ('local', 'fragment')
    axes = len(source.wide)
    launch = _asynchronous(compiler, call, notes, target)
    if source.buffer.scope == 'shared' and str(call.op.name) == 'tl.tileop.tma_copy':
        source.access.asynchronous = 'tma'
    if target.buffer.scope == 'shared':
        compiler.overwrites = compiler.overwrites or 'barrier' in notes
        target.access.asynchronous = ASYNCHRONOUS.get(str(call.op.name), '')
        if source.buffer.scope in ('fragment', 'local'):
            compiler.generic.add(target.access.path)

    def run(frame: Frame) -> None:
        mask = frame.mask
        if mask is not None:
            mask = expand(mask, mask.ndim + axes) if private else collective(frame, mask, axes)
        value = source.access.load(frame, mask)
        if shared_load is not None:
            value = shared_load(frame, value)
        target.access.store(frame, convert(value), mask)
        if signal is not None:
            signal(frame)
        elif launch is not None:
            launch(frame, mask)

    return run


def _four_rows(compiler: Compiler, call: Any, notes: dict[str, Any]) -> Closure:
    """Copy between four rows of a tensor and a tile; rows outside the tensor load 0 and store nothing."""
    from tvm.ir import Range
    from tvm.tirx import BufferRegion

    known = {'is_gather4', 'is_scatter4', 'gather4_rows', 'gather4_col', 'barrier'}
    if set(notes) - COPY_HINTS - known:
        raise compiler.unsupported(f'copy annotation {sorted(set(notes) - COPY_HINTS - known)}')
    gathers = bool(int(notes.get('is_gather4', 0)))
    ends = [region_parts(compiler, argument) for argument in call.args[:2]]
    (tensor, _, _), (tile, _, extents) = ends if gathers else reversed(ends)
    width = extents[1]
    moves = []
    for position, row in enumerate(notes['gather4_rows']):
        away = BufferRegion(tensor, [Range.from_min_extent(row, 1), Range.from_min_extent(notes['gather4_col'], width)])
        here = BufferRegion(tile, [Range.from_min_extent(position, 1), Range.from_min_extent(0, width)])
        pair = [Region(compiler, end, 'both') for end in ((away, here) if gathers else (here, away))]
        for end in pair:
            if end.buffer.scope == 'global':
                end.access.dims = [replace(dim, guard='both') for dim in end.access.dims]
        source, target = pair
        (target if gathers else source).access.asynchronous = 'tma'
        moves.append((source, target, async_copy_hook(compiler, 'tl.tileop.tma_copy', notes, target.access)))
    compiler.overwrites = compiler.overwrites or gathers
    convert = caster(dtype_of(moves[0][0].buffer.dtype.name), dtype_of(moves[0][1].buffer.dtype.name))

    def run(frame: Frame) -> None:
        mask = collective(frame, frame.mask, 1)
        for source, target, launch in moves:
            target.access.store(frame, convert(source.access.load(frame, mask)), mask)
            if launch is not None:
                launch(frame, mask)

    return run


def other_block(compiler: Compiler, rank: Any) -> Callable[[Frame], np.ndarray]:
    """The distance, in rows of shared memory, to the block of a given cluster rank."""
    compiler.whole_cluster = True
    wanted = compiler.expr(rank)

    def run(frame: Frame) -> np.ndarray:
        return cluster_distance(frame, compiler.cluster_dims, wanted(frame))

    return run


def _level(region: Region) -> int:
    return {'fragment': 2, 'local': 2, 'shared': 1}.get(region.buffer.scope, 0)


def _asynchronous(compiler: Compiler, call: Any, notes: dict[str, Any], target: Region) -> Callable[..., None] | None:
    return async_copy_hook(compiler, str(call.op.name), notes, target.access)


@op('tl.tileop.fill')
def _fill(compiler: Compiler, call: Any) -> Closure:
    """dst[...] = value."""
    target = Region(compiler, call.args[0])
    convert = caster(dtype_of(compiler.dtype(call.args[1]).name), dtype_of(target.buffer.dtype.name))
    value = compiler.expr(call.args[1])
    private = target.buffer.scope == 'local'
    axes = len(target.wide)
    starts = target.node.data in compiler.reducers
    if target.buffer.scope == 'shared':
        compiler.generic.add(target.access.path)

    def run(frame: Frame) -> None:
        filler = convert(value(frame))
        mask = frame.mask
        if mask is not None:
            mask = expand(mask, mask.ndim + axes) if private else collective(frame, mask, axes)
        target.access.store(frame, expand(filler, target.access.ndim), mask)
        if starts:
            frame.memory[target.buffer.slot].partial = False

    return run


@op('tl.tileop.gemm', 'tl.tileop.wgmma_gemm')
def _gemm(compiler: Compiler, call: Any) -> Closure:
    """C += A @ B (operands may be transposed), accumulated in the type of C."""
    return matrix_product(compiler, call)


Scaling = Callable[[Frame, Mask, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def matrix_product(
    compiler: Compiler,
    call: Any,
    pair: Pair | None = None,
    scaling: Scaling | None = None,
    hints: frozenset[str] = frozenset(),
    slots: tuple[int, ...] = (0, 1, 2, 3, 4, 9),
) -> Closure:
    """A product of tiles; `pair` combines the right operands of two blocks, `scaling` changes both operands.

    `slots` are the arguments with A, B, C, whether A and B are transposed, and whether C starts at 0.
    """
    arguments = [call.args[slot] for slot in slots]
    left, right, out = (Region(compiler, argument) for argument in arguments[:3])
    for region in (left, right, out):
        region.pair = pair
        region.access.atomic = pair is not None and region is not out  # races between two blocks are not checked
    left.access.everyone = right.access.everyone = True
    if str(call.op.name).startswith('tl.tileop.wgmma_gemm'):
        left.access.asynchronous = right.access.asynchronous = 'gemm'
    notes = {str(key) for key in dict(call.annotations or {})}
    kinds = left.buffer.dtype, right.buffer.dtype
    if (
        compiler.options.checks != 'none'
        and kinds[0].name != kinds[1].name
        and not all(_is_tiny(kind) for kind in kinds)
    ):
        text = f'a product of {kinds[0].name} ({left.buffer.name}) and {kinds[1].name} ({right.buffer.name})'
        raise TypeMismatch(f'{text}: both operands must have one type', compiler.site, buffer=right.buffer.name)
    if notes - GEMM_HINTS - hints:
        raise compiler.unsupported(f'gemm annotation {sorted(notes - GEMM_HINTS - hints)}')
    transpose_left, transpose_right = bool(arguments[3]), bool(arguments[4])
    clear = compiler.expr(arguments[5])
    dtype = out.buffer.dtype
    exact = np.float64 if dtype.is_int or dtype.name == 'float64' else np.float32
    round_out = rounder(dtype)
    launch = async_gemm_hook(compiler, str(call.op.name), out.access, [left.access, right.access])
    out.access.may_be_in_flight = launch is not None

    def run(frame: Frame) -> None:
        mask = collective(frame, frame.mask, 2)
        if pair is not None and mask is not None:
            mask = pair.of_first(frame, mask)
            if not mask.any():
                return
        a = left.load_matrix(frame, mask).astype(exact, copy=False)
        b = right.load_matrix(frame, mask).astype(exact, copy=False)
        a, b = a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:])
        a = a.swapaxes(-1, -2) if transpose_left else a
        b = b.swapaxes(-1, -2) if transpose_right else b
        if pair is not None:
            b = pair.side_by_side(frame, b)
        if scaling is not None:
            a, b = scaling(frame, mask, a, b)
        product = _matmul(a, b)
        cleared = agreed(frame, clear(frame))
        if pair is not None:
            cleared = pair.of_first(frame, cleared)
        if not isinstance(cleared, np.ndarray) and cleared:
            total: Any = product
        else:
            old = out.load_matrix(frame, mask)
            old = old.reshape(-1, *old.shape[-2:])
            if isinstance(cleared, np.ndarray):
                old = np.where(cleared.reshape(-1, 1, 1), 0, old)
            total = old + product
        if dtype.is_int:
            total = total.astype(np.int64).astype(dtype.value)
        elif round_out is not None:
            total = round_out(total)
        total = np.broadcast_to(total, (frame.blocks, *total.shape[1:]))
        wide = [total.shape[1:][position - out.rank + 2] for position in out.wide]
        out.access.store(frame, total.reshape(frame.blocks, 1, *wide), mask)
        if frame.clock is not None:
            frame.clock.settle(active_threads(frame))
        if launch is not None:
            launch(frame, mask)

    return run


def _is_tiny(dtype: DType) -> bool:
    """A float of 8 bits or fewer; products may mix such types."""
    return dtype.is_float and dtype.bits <= 8


def _matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    tensors = [torch.from_numpy(part if part.flags.writeable else part.copy()) for part in (a, b)]
    with torch.autocast('cpu', enabled=False):
        return torch.matmul(*tensors).numpy()


@op('tl.tileop.reduce')
def _reduce(compiler: Compiler, call: Any) -> Closure:
    """`dst` = combination of src along one dimension, including the old dst if `clear` is false."""
    source, target = Region(compiler, call.args[0]), Region(compiler, call.args[1])
    kind, dim = str(call.args[2].value), int(call.args[3])
    clear = compiler.expr(call.args[4])
    notes = {str(key) for key in dict(call.annotations or {})}
    if notes - REDUCE_HINTS:
        raise compiler.unsupported(f'reduce annotation {sorted(notes - REDUCE_HINTS)}')
    propagate = 'nan_propagate' in notes
    absolute = kind.startswith('abs')
    name = kind.removeprefix('abs')
    dtype = source.buffer.dtype
    result_type = target.buffer.dtype
    convert = caster(dtype_of(dtype.name), dtype_of(result_type.name))
    private = target.buffer.scope == 'local'
    source.access.per_thread = target.access.per_thread = private or target.replicated

    def run(frame: Frame) -> None:
        mask = frame.mask
        if mask is not None:
            mask = expand(mask, mask.ndim + len(source.wide)) if private else collective(frame, mask, len(source.wide))
        value = source.load(frame, mask)
        lead = value.shape[:2]
        shape = [1] * source.rank
        for position, extent in zip(source.wide, value.shape[2:], strict=True):
            shape[position] = extent
        value = value.reshape(*lead, *shape)
        if absolute:
            value = np.abs(value)
        combined = _combine_dim(name, value, 2 + dim, dtype, propagate)
        rounding = rounder(dtype)
        combined = convert(combined if rounding is None else rounding(combined))
        wide = target.access.extents(frame)
        combined = combined.reshape(*lead, *wide)
        out_mask = None
        if mask is not None:
            flat = mask.reshape(mask.shape[:2])
            out_mask = flat.reshape(flat.shape + (1,) * len(wide))
        if not clear(frame):
            old = target.load(frame, out_mask)
            if propagate and name in NAN_KEEPING:
                combined = NAN_KEEPING[name](old, combined)
            else:
                combined = pair(name, old, combined, result_type)
        target.access.store(frame, combined, out_mask)
        if frame.clock is not None:
            frame.clock.settle(active_threads(frame))

    return run


def _combine_dim(name: str, value: np.ndarray, axis: int, dtype: Any, propagate: bool) -> np.ndarray:
    if propagate and name in NAN_KEEPING:
        return NAN_KEEPING[name].reduce(value, axis=axis, keepdims=True)
    return reduce_axes(name, value, (axis,), dtype)


@op('tl.tileop.cumsum', 'tl.tileop.cummax')
def _scan(compiler: Compiler, call: Any) -> Closure:
    """Running sum or maximum along one dimension, from the end if reversed."""
    source, target = Region(compiler, call.args[0]), Region(compiler, call.args[1])
    source.access.everyone = True
    dim, backwards = int(call.args[2]), bool(call.args[3])
    ufunc = np.add if str(call.op.name).endswith('sum') else np.fmax
    dtype = source.buffer.dtype
    convert = caster(dtype_of(dtype.name), dtype_of(target.buffer.dtype.name))
    rounding = rounder(dtype)

    def run(frame: Frame) -> None:
        mask = collective(frame, frame.mask, len(source.wide))
        value = source.load_matrix(frame, mask)
        value = np.flip(value, 1 + dim) if backwards else value
        if ufunc is np.add:
            value = np.add.accumulate(value, axis=1 + dim, dtype=value.dtype)
        else:
            value = ufunc.accumulate(value, axis=1 + dim)
        value = np.flip(value, 1 + dim) if backwards else value
        value = np.ascontiguousarray(value)
        target.store_matrix(frame, convert(value if rounding is None else rounding(value)), mask)

    return run


@op('tl.tileop.transpose')
def _transpose(compiler: Compiler, call: Any) -> Closure:
    """dst[j, i] = src[i, j]."""
    source, target = Region(compiler, call.args[0]), Region(compiler, call.args[1])
    convert = caster(dtype_of(source.buffer.dtype.name), dtype_of(target.buffer.dtype.name))

    def run(frame: Frame) -> None:
        mask = collective(frame, frame.mask, 2)
        value = np.ascontiguousarray(source.load_matrix(frame, mask).swapaxes(-1, -2))
        target.store_matrix(frame, convert(value), mask)

    return run


def forbid_plain_use(compiler: Compiler, buffer: Any) -> None:
    """Raise if a reducer is used like other memory."""
    newer = str(buffer.scope()) == 'local.reducer' and buffer.data in compiler.opened
    if newer and compiler.options.checks != 'none':
        text = f'reducer {buffer.name} is used like other memory; its result is what T.finalize_reducer gives'
        raise ReducerMisuse(text, compiler.site, buffer=str(buffer.name))


def _require_open(frame: Frame, access: Access, done: str) -> None:
    """Raise if a reducer has not been started, or has been finalized."""
    stage = access.memory(frame).stage
    if stage != 'open' and access.checked:
        when = 'after T.finalize_reducer' if stage else 'before T.reducer_init'
        text = f'reducer {access.buffer.name} is {done} {when}'
        frame.report(ReducerMisuse, text, access.site, buffer=access.buffer.name)


@op('tl.tileop.reducer_init')
def _reducer_init(compiler: Compiler, call: Any) -> Closure:
    """Start a reduction from the identity, or from a given value that counts once."""
    target = Region(compiler, call.args[0], reducer=True)
    dtype = target.buffer.dtype
    start = compiler.expr(call.args[1]) if len(call.args) > 1 else None
    neutral = identity(_reducer_op(compiler, target), dtype)

    def run(frame: Frame) -> None:
        value = neutral if start is None else start(frame)
        target.access.store(frame, expand(value, target.access.ndim), collective(frame, frame.mask, len(target.wide)))
        frame.memory[target.buffer.slot].stage = 'open'

    return run


@op('tl.reducer_update')
def _reducer_update(compiler: Compiler, call: Any) -> Closure:
    """Contribute a value to one output of a reducer, once per iteration of the enclosing T.Parallel."""
    load = call.args[0]
    access = compiler.access(load.buffer, list(load.indices))
    name = compiler.reducers[load.buffer.data]
    value = compiler.expr(call.args[1])
    if compiler.options.checks != 'none' and load.buffer.data not in compiler.finalized:
        text = f'reducer {access.buffer.name} is updated and never finalized'
        raise ReducerMisuse(text, compiler.site, buffer=access.buffer.name)

    def run(frame: Frame) -> None:
        _require_open(frame, access, 'updated')
        contribute(frame, access, value(frame), name, frame.mask, 1)

    return run


@op('tl.tileop.finalize_reducer_v2')
def _finalize(compiler: Compiler, call: Any) -> Closure:
    """`dst` = result of the reducer."""
    source, target = Region(compiler, call.args[0], reducer=True), Region(compiler, call.args[1])

    def run(frame: Frame) -> None:
        _require_open(frame, source.access, 'finalized')
        mask = collective(frame, frame.mask, len(source.wide))
        target.access.store(frame, source.load(frame, mask), mask)
        frame.memory[source.buffer.slot].stage = 'done'

    return run


@op('tl.tileop.finalize_reducer')
def _finalize_in_place(compiler: Compiler, call: Any) -> Closure:
    """Reducers in the older syntax already hold their result: partial sums of threads are not modelled."""
    slot = Region(compiler, call.args[0]).buffer.slot

    def run(frame: Frame) -> None:
        frame.memory[slot].partial = False

    return run


def _reducer_op(compiler: Compiler, target: Region) -> str:
    return compiler.reducers[target.node.data]


@op('tl.tileop.atomicadd', 'tl.tileop.atomicmax', 'tl.tileop.atomicmin')
def _atomic_tile(compiler: Compiler, call: Any) -> Closure:
    """dst[...] = op(dst[...], value[...]), each element atomically and once."""
    name = {'add': 'sum', 'max': 'max', 'min': 'min'}[str(call.op.name)[-3:]]
    target = Region(compiler, call.args[1], 'both')
    if target.buffer.dtype is FP4_PAIR:
        raise compiler.unsupported(f'atomics on {FP4_PAIR.name}')
    target.access.atomic = True
    kind = type(call.args[0]).__name__
    is_tile = kind == 'BufferRegion' or (kind == 'Call' and str(call.args[0].op.name) == 'tl.region')
    axes = len(target.wide)
    convert = caster(dtype_of(compiler.dtype_of_operand(call.args[0]).name), dtype_of(target.buffer.dtype.name))
    if is_tile:
        source = Region(compiler, call.args[0], 'both')
        target.follow(source)
        read: Callable[[Frame, Mask], Any] = source.access.load
    else:
        scalar = compiler.expr(call.args[0])
        ndim = target.access.ndim

        def read(frame: Frame, mask: Mask) -> Any:
            return expand(scalar(frame), ndim)

    def run(frame: Frame) -> None:
        mask = collective(frame, frame.mask, axes)
        contribute(frame, target.access, convert(read(frame, mask)), name, mask, 1)

    return run


@op('tl.tileop.im2col', 'tl.tileop.c2d_im2col')
def _im2col(compiler: Compiler, call: Any) -> Closure:
    """Columns of a convolution: dst[i, j] = the pixel at tap j of output i of an NHWC image, 0 outside it."""
    image, target = Region(compiler, call.args[0]), Region(compiler, call.args[1])
    row_tile, column_tile = compiler.expr(call.args[2]), compiler.expr(call.args[3])
    kernel, stride, dilation, padding = (int(part) for part in call.args[4:8])

    def run(frame: Frame) -> None:
        mask = collective(frame, frame.mask, len(target.wide))
        _, height, width, channels = image.buffer.layout(frame)[0]
        rows, columns = target.shape(frame)[-2:]
        out_h = (height + 2 * padding - (kernel - 1) * dilation - 1) // stride + 1
        out_w = (width + 2 * padding - (kernel - 1) * dilation - 1) // stride + 1
        m = np.asarray(row_tile(frame)).reshape(-1, 1, 1) * rows + np.arange(rows).reshape(1, -1, 1)
        k = np.asarray(column_tile(frame)).reshape(-1, 1, 1) * columns + np.arange(columns).reshape(1, 1, -1)
        y = m % (out_h * out_w) // out_w * stride + k // (kernel * channels) * dilation - padding
        x = m % out_w * stride + k // channels % kernel * dilation - padding
        inside = (y >= 0) & (x >= 0) & (y < height) & (x < width)
        pixels = image.load_matrix(frame, None)[0]
        batch = np.broadcast_to(np.minimum(m // (out_h * out_w), pixels.shape[0] - 1), inside.shape)
        found = pixels[
            batch, np.where(inside, y, 0), np.where(inside, x, 0), np.broadcast_to(k % channels, inside.shape)
        ]
        value = np.where(inside, found, np.float32(0))
        lead = (1,) * (target.rank - 2)
        target.store_matrix(frame, value.reshape(-1, *lead, rows, columns), mask)

    return run
