"""Control: early exit, assertions, external functions, and hints without an effect on results."""

from __future__ import annotations

import ast
import linecache
import re
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from tile_kernels.interpreter.engine.frame import Frame, active_threads
from tile_kernels.interpreter.engine.lanes import both, expand, lane_of
from tile_kernels.interpreter.engine.translate import EXTERN_CONSTRUCTS, Closure, Compiler, op
from tile_kernels.interpreter.errors import AssertionFailed, Site
from tile_kernels.interpreter.meaning.element_ops import pointed
from tile_kernels.interpreter.meaning.extern import Pointer, RemoteBarrier, model_of
from tile_kernels.interpreter.meaning.mbarriers import BarrierOperand
from tile_kernels.interpreter.meaning.statements import marked

_PRINTS: WeakKeyDictionary[Compiler, dict[Site, list[tuple[str, str]]]] = WeakKeyDictionary()


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
    """A promise to the compiler, which the interpreter checks."""
    return assertion(compiler, call.args[0], 'T.assume')


@op('tl.device_assert', 'tl.device_assert_with_msg')
def _device_assert(compiler: Compiler, call: Any) -> Closure:
    """A condition checked on the device."""
    message, _, stack = (str(call.args[1].value) if len(call.args) > 1 else '').partition('\n')
    caller = re.match(r'  at (.*):(\d+) in ', stack)
    if caller is not None:
        compiler.site = Site(compiler.kernel, caller[1], int(caller[2]))  # `stmt` restores the old one
    return assertion(compiler, call.args[0], f'T.device_assert({message!r})' if message else 'T.device_assert')


def assertion(compiler: Compiler, condition: Any, what: str) -> Closure:
    """Raise if a condition fails for an active lane."""
    holds = compiler.expr(condition)
    site = compiler.site
    written = (
        _first_argument(site) if type(condition).__name__ == 'Var' else str(condition)
    )  # a macro shows its argument
    text = f'{what} does not hold: {written}' if written else f'{what} does not hold'

    def run(frame: Frame) -> None:
        result = holds(frame)
        if not isinstance(result, np.ndarray):
            if not result:
                frame.report(AssertionFailed, text, site)
            return
        failed = ~result if frame.mask is None else ~result & frame.mask
        if failed.any():
            frame.report(AssertionFailed, text, site, lane_of(failed))

    return run


def _first_argument(site: Site) -> str:
    """The first argument of the call on a line; empty if it continues on the next line."""
    try:
        call = ast.parse(linecache.getline(site.file, site.line).strip(), mode='eval').body
    except SyntaxError:
        return ''
    return ast.unparse(call.args[0]) if isinstance(call, ast.Call) and call.args else ''


@op(
    'tl.no_set_max_nreg',
    'tl.annotate_producer_reg_dealloc',
    'tl.annotate_consumer_reg_alloc',
    'tl.pdl_trigger',
    'tl.prefetch_tma_descriptor',
    'tl.warpgroup_arrive',
    'tl.warpgroup_fence_operand',
    'tl.ptx_fence_barrier_init',
    'tl.tma_store_arrive',
    'tl.tcgen05_before_thread_sync',
    'tl.tcgen05_after_thread_sync',
    'tl.deallocate_tmem',
)
def _hint(compiler: Compiler, call: Any) -> Closure:
    """Hints about registers, launch overlap and fences: no effect on results here."""
    return lambda frame: None


@op('tl.pdl_sync')
def _wait_for_kernel_before(compiler: Compiler, call: Any) -> Closure:
    """`T.pdl_sync`: wait for the previous kernel; a kernel without it starts after that kernel."""
    compiler.begins_early = True

    def run(frame: Frame) -> None:
        if frame.early is not None:
            frame.early = frame.early & ~active_threads(frame)

    return run


@op('tl.fence_proxy_async')
def _fence_proxy(compiler: Compiler, call: Any) -> Closure:
    """Proxy fence: makes the earlier accesses of the threads visible to later TMA copies and wgmma."""

    def run(frame: Frame) -> None:
        if frame.clock is not None:
            frame.clock.fence(active_threads(frame))

    return run


@op('tirx.call_extern', 'tirx.call_pure_extern')
def _call_extern(compiler: Compiler, call: Any) -> Closure:
    """A CUDA function, run by its registered model."""
    name = str(call.args[0].value)
    if name.startswith('debug_print'):
        return _print(compiler, name, call)
    if name in EXTERN_CONSTRUCTS:
        return EXTERN_CONSTRUCTS[name](compiler, call)
    model = model_of(name)
    if model is None:
        raise compiler.unsupported(f'external function {name} (register a model with tile_kernels.interpreter.extern)')
    arguments = [_extern_argument(compiler, part) for part in call.args[1:]]
    return lambda frame: model(*[argument(frame) for argument in arguments])


def _print(compiler: Compiler, name: str, call: Any) -> Closure:
    """`T.print`: a message, a value, or one element of a buffer, for every active thread."""
    message, site = str(call.args[1].value), _line_of_print(compiler, call)
    if name == 'debug_print_msg':
        return lambda frame: frame.shared.session.print(frame, site, message, None, frame.mask)
    value = compiler.expr(call.args[-1])
    if name == 'debug_print_var':
        return lambda frame: frame.shared.session.show(frame, site, message, value, frame.mask)
    buffer, element = str(call.args[2].value), compiler.expr(call.args[3])
    label = '' if message.startswith(f'buffer<{buffer},') or not message else f'{message}: '

    def run(frame: Frame) -> None:
        which = element(frame)
        spot = int(which) if np.ndim(which) == 0 else int(np.asarray(which).flat[0])
        frame.shared.session.show(frame, site, f'{label}{buffer}[{spot}]', value, frame.mask)

    return run


def _line_of_print(compiler: Compiler, call: Any) -> Site:
    """The line of a print: consecutive prints all have the line of the first, so their arguments are compared."""
    first = compiler.site
    row = _PRINTS.setdefault(compiler, {}).setdefault(first, [])
    mine = (str(call.args[1].value), str(call.args[2]) if len(call.args) > 2 else '')
    if mine not in row:
        row.append(mine)
    lines = [first.line]
    for line in range(first.line + 1, first.line + 40):
        if re.search(r'\bprint\(', linecache.getline(first.file, line)):
            lines.append(line)
    line = lines[min(row.index(mine), len(lines) - 1)]
    return Site(first.kernel, first.file, line)


def _extern_argument(compiler: Compiler, node: Any) -> Closure:
    if type(node).__name__ != 'Call' or str(node.op.name) not in ('tl.access_ptr', 'tirx.address_of'):
        return compiler.expr(node)
    load = pointed(compiler, node)
    if compiler.buffer(load.buffer).scope == 'barrier':
        operand = BarrierOperand(compiler, node)
        operand.storage.counts_bytes = True
        compiler.whole_cluster = True
        return lambda frame: RemoteBarrier(frame, operand, compiler.cluster_dims)
    access = compiler.access(load.buffer, list(load.indices))
    return lambda frame: Pointer(frame, access.moved, compiler.cluster_dims)
