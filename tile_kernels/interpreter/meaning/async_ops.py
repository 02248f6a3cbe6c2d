"""Asynchronous copies and wgmma: data in flight, groups, and their waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tile_kernels.interpreter.checks.asynchronous import AsyncGroups
from tile_kernels.interpreter.engine.frame import Frame
from tile_kernels.interpreter.engine.lanes import Mask, both
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.meaning.element_ops import pointed, shifted
from tile_kernels.interpreter.meaning.mbarriers import BarrierOperand


def async_copy_hook(compiler: Compiler, name: str, notes: dict[str, Any], access: Any) -> Callable[..., None] | None:
    """The action after an asynchronous copy: its data is in flight until the matching wait."""
    if compiler.options.checks == 'none' or access.buffer.scope != 'shared':
        return None
    if name == 'tl.tileop.async_copy':
        return lambda frame, mask: groups_of(frame).launch(frame, access, mask, 'copy', commit=True)
    if name == 'tl.tileop.tma_copy' and 'barrier' in notes:
        operand = BarrierOperand(compiler, notes['barrier'])

        def note(frame: Frame, mask: Mask) -> None:
            groups_of(frame).launch_tma(frame, access, mask, operand)
            if frame.clock is not None:  # the copy itself completes the barrier, whenever its arrival was announced
                frame.clock.release(operand.slot, operand.index(frame), frame.mask)

        return note
    return None


def async_gemm_hook(compiler: Compiler, name: str, access: Any, operands: list[Any]) -> Callable[..., None] | None:
    """The action after `T.wgmma_gemm`: result and operands are in use until `T.wait_wgmma`."""
    if compiler.options.checks == 'none':
        return None
    if name in ('tl.tileop.tcgen05_gemm', 'tl.tileop.tcgen05_gemm_blockscaled'):
        from tile_kernels.interpreter.meaning.tcgen05_ops import tcgen05_hook

        return tcgen05_hook(access)
    if name not in ('tl.tileop.wgmma_gemm', 'tl.tileop.wgmma_gemm_sp'):
        return None
    read = [operand for operand in operands if operand.buffer.scope == 'shared']

    def note(frame: Frame, mask: Mask) -> None:
        groups = groups_of(frame)
        groups.launch(frame, access, mask, 'gemm', commit=True)
        for operand in read:
            groups.launch_reads(frame, operand, mask)

    return note


def groups_of(frame: Frame) -> Any:
    """The asynchronous operations of a batch."""
    if frame.async_groups is None:
        frame.async_groups = AsyncGroups(frame)
    return frame.async_groups


@op('tl.ptx_cp_async', 'tirx.ptx_cp_async')
def _cp_async(compiler: Compiler, call: Any) -> Closure:
    """Copy adjacent elements from global to shared memory; zeros if the predicate is false."""
    target, source = pointed(compiler, call.args[0]), pointed(compiler, call.args[1])
    count = int(call.args[2])
    predicate = compiler.expr(call.args[3]) if len(call.args) > 3 else None
    pairs = [
        (
            compiler.access(target.buffer, shifted(target.indices, lane)),
            compiler.access(source.buffer, shifted(source.indices, lane)),
        )
        for lane in range(count)
    ]
    for access in pairs[0]:
        access.vector_bytes = count * access.buffer.dtype.bits // 8
    watched = compiler.options.checks != 'none'
    kind = pairs[0][0].buffer.dtype.value

    def run(frame: Frame) -> None:
        outer = frame.mask
        wanted = True if predicate is None else predicate(frame)
        for into, origin in pairs:
            if isinstance(wanted, np.ndarray):
                value: Any = np.where(wanted, origin.load(frame, both(outer, wanted)), kind.type(0))
            else:
                value = origin.load(frame, outer) if wanted else kind.type(0)
            into.store(frame, value, outer)
            if watched:
                groups_of(frame).launch(frame, into, outer, 'copy', commit=False)

    return run


@op('tirx.ptx_commit_group')
def _commit(compiler: Compiler, call: Any) -> Closure:
    """Close a group of asynchronous copies."""
    if compiler.options.checks == 'none':
        return lambda frame: None
    return lambda frame: groups_of(frame).commit(frame, 'copy')


@op('tirx.ptx_wait_group', 'tl.wait_wgmma', 'tl.warpgroup_wait')
def _wait_group(compiler: Compiler, call: Any) -> Closure:
    """Wait until at most n groups of copies (or wgmma) of the thread are in flight."""
    kind = 'copy' if str(call.op.name) == 'tirx.ptx_wait_group' else 'gemm'
    count = compiler.expr(call.args[0])

    def run(frame: Frame) -> None:
        if frame.async_groups is not None:
            frame.async_groups.wait(frame, kind, int(count(frame)))

    return run


@op('tl.tma_store_wait')
def _store_wait(compiler: Compiler, call: Any) -> Closure:
    """Wait for stores to global memory; in the interpreter they complete at once."""
    return lambda frame: None
