"""Control: early exit, assertions, external functions, and hints without an effect on results."""

from __future__ import annotations

from typing import Any

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads
from tile_kernels.interpreter.engine.lanes import both, expand, lane_of
from tile_kernels.interpreter.engine.translate import Closure, Compiler, op
from tile_kernels.interpreter.errors import AssertionFailed
from tile_kernels.interpreter.meaning.element_ops import pointed
from tile_kernels.interpreter.meaning.extern import Pointer, RemoteBarrier, model_of
from tile_kernels.interpreter.meaning.mbarriers import BarrierOperand
from tile_kernels.interpreter.meaning.statements import marked


@op('tirx.thread_return')
def _thread_return(compiler: Compiler, call: Any) -> Closure:
    """The active threads leave the kernel."""
    if compiler.depth:
        raise compiler.unsupported('T.thread_return inside T.Parallel')
    return _leave(compiler, 'live')


@op('tl.loop_break', 'tirx.break_loop', 'tirx.break')
def _break(compiler: Compiler, call: Any) -> Closure:
    """The active threads leave the innermost loop."""
    return _leave(compiler, 'looping')


def _leave(compiler: Compiler, what: str) -> Closure:
    ndim = compiler.ndim

    def run(frame: Frame) -> None:
        leaving = np.ones((1,) * ndim, bool) if frame.mask is None else frame.mask
        staying = ~leaving
        before = getattr(frame, what)
        setattr(frame, what, staying if before is None else expand(before, staying.ndim) & staying)
        frame.mask = both(frame.mask, staying)

    return marked(run, escapes_=True)


@op('tirx.assume')
def _assume(compiler: Compiler, call: Any) -> Closure:
    """A promise to the compiler; the interpreter holds the kernel to it."""
    return assertion(compiler, call.args[0], 'T.assume')


@op('tl.device_assert', 'tl.device_assert_with_msg')
def _device_assert(compiler: Compiler, call: Any) -> Closure:
    """A condition checked on the device."""
    message = f' ({call.args[1].value})' if len(call.args) > 1 else ''
    return assertion(compiler, call.args[0], f'T.device_assert{message}')


def assertion(compiler: Compiler, condition: Any, what: str) -> Closure:
    """Raise if a condition fails for an active lane."""
    holds = compiler.expr(condition)
    text = f'{what} does not hold: {condition}'
    site = compiler.site

    def run(frame: Frame) -> None:
        result = holds(frame)
        if not isinstance(result, np.ndarray):
            if not result:
                raise frame.error(AssertionFailed, text, site)
            return
        failed = ~result if frame.mask is None else ~result & frame.mask
        if failed.any():
            raise frame.error(AssertionFailed, text, site, lane_of(failed))

    return run


@op(
    'tl.no_set_max_nreg',
    'tl.annotate_producer_reg_dealloc',
    'tl.annotate_consumer_reg_alloc',
    'tl.pdl_trigger',
    'tl.prefetch_tma_descriptor',
    'tl.warpgroup_arrive',
    'tl.warpgroup_commit_batch',
    'tl.warpgroup_fence_operand',
    'tl.ptx_fence_barrier_init',
    'tl.tma_store_arrive',
)
def _hint(compiler: Compiler, call: Any) -> Closure:
    """Hints about registers, launch overlap and fences: no effect on results here."""
    return lambda frame: None


@op('tl.pdl_sync')
def _wait_for_kernel_before(compiler: Compiler, call: Any) -> Closure:
    """Wait until the kernel before has ended; without it, a kernel is launched after that."""
    compiler.begins_early = True

    def run(frame: Frame) -> None:
        if frame.early is not None:
            frame.early = frame.early & ~active_threads(frame)

    return run


@op('tl.fence_proxy_async')
def _fence_proxy(compiler: Compiler, call: Any) -> Closure:
    """What the threads did is visible to copies and products that follow."""

    def run(frame: Frame) -> None:
        if frame.clock is not None:
            frame.clock.fence(active_threads(frame))

    return run


@op('tirx.call_extern', 'tirx.call_pure_extern')
def _call_extern(compiler: Compiler, call: Any) -> Closure:
    """A CUDA function, through its registered model."""
    name = str(call.args[0].value)
    if name.startswith('debug_print'):
        return lambda frame: None
    model = model_of(name)
    if model is None:
        raise compiler.unsupported(f'external function {name} (register a model with tile_kernels.interpreter.extern)')
    arguments = [_extern_argument(compiler, part) for part in call.args[1:]]
    return lambda frame: model(*[argument(frame) for argument in arguments])


def _extern_argument(compiler: Compiler, node: Any) -> Closure:
    if type(node).__name__ != 'Call' or str(node.op.name) not in ('tl.access_ptr', 'tirx.address_of'):
        return compiler.expr(node)
    load = pointed(compiler, node)
    if compiler.buffer(load.buffer).scope == 'barrier':
        operand = BarrierOperand(compiler, node)
        operand.storage.counts_bytes = True
        return lambda frame: RemoteBarrier(frame, operand, compiler.cluster_dims)
    access = compiler.access(load.buffer, list(load.indices))
    return lambda frame: Pointer(frame, access.moved, compiler.cluster_dims)
