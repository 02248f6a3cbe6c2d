"""Run your own TileLang kernel on small random inputs: findings, prints, untaken branches, slowest lines."""

from __future__ import annotations

import argparse
import ast
import inspect
import linecache
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from tile_kernels.core.errors import ArgumentError

SLOWEST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this command."""
    parser.add_argument('kernel', metavar='FILE.py:NAME', help='a T.prim_func, a @tilelang.jit function, or a factory')
    parser.add_argument(
        '--set',
        action='append',
        default=[],
        metavar='NAME=VALUE',
        help='an argument of the factory, a size, or a scalar (repeatable)',
    )
    parser.add_argument('--size', type=int, default=64, help='sizes that are not given (default 64)')
    parser.add_argument('--seed', type=int, default=0, help='seed of the random inputs')
    parser.add_argument('--strict', action='store_true', help='report accesses that only bounds guards keep legal')


def run(args: argparse.Namespace) -> int:
    """Run the kernel; the exit status is 1 if there are findings, and 2 if it uses something unsupported."""
    import torch

    from tile_kernels.interpreter import UnsupportedConstruct, interpret

    file, _, name = args.kernel.rpartition(':')
    if not file or not name:
        raise ArgumentError(f'debug: the kernel must be given as FILE.py:NAME, got {args.kernel!r}')
    if not Path(file).is_file():
        raise ArgumentError(f'debug: there is no file {file}')
    given = _given(args.set)
    torch.manual_seed(args.seed)
    prim_func, pass_configs, out_idx = _load(file, name, given, args.size)
    try:
        tensors = make_inputs(prim_func, given, args.size)
        for text in describe(prim_func, tensors):
            sys.stdout.write(f'{text}\n')
        kernel = _Kernel(prim_func, pass_configs, out_idx)
        report = interpret(kernel, *tensors, checks='collect', strict=args.strict, profile=True)
    except UnsupportedConstruct as error:
        sys.stdout.write(f'unsupported: {error}\n')
        return 2
    _show(report)
    return 1 if report.errors else 0


class _Kernel:
    """A PrimFunc with its compiler switches, for `interpret`."""

    def __init__(self, prim_func: Any, pass_configs: dict[Any, Any], out_idx: list[int]) -> None:
        self.prim_func, self.pass_configs, self.out_idx = prim_func, pass_configs, out_idx


def _given(pairs: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition('=')
        if not equals:
            raise ArgumentError(f'debug: --set needs NAME=VALUE, got {pair!r}')
        try:
            found[name] = ast.literal_eval(text)
        except (SyntaxError, ValueError):
            found[name] = text
    return found


def _load(file: str, name: str, given: dict[str, Any], size: int) -> tuple[Any, dict[Any, Any], list[int]]:
    """The PrimFunc of a name in a file, its compiler switches and its outputs."""
    from tile_kernels.interpreter.cuda_device import fake_cuda
    from tile_kernels.interpreter.jit_hook import interpreting

    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        with fake_cuda(), interpreting('none'):
            names = runpy.run_path(file, run_name='debugged')
            if name not in names:
                kernels = sorted(key for key, value in names.items() if _is_kernel(value))
                raise ArgumentError(f'debug: {file} has no {name}; it has {", ".join(kernels) or "no kernels"}')
            found = names[name]
            found = getattr(found, 'jit_impl', found)  # of an autotuned function
            return _build(found, name, given, size)
    finally:
        sys.path.pop(0)


def _is_kernel(value: Any) -> bool:
    return hasattr(value, 'buffer_map') or hasattr(value, 'get_tir') or hasattr(value, 'jit_impl')


def _build(found: Any, name: str, given: dict[str, Any], size: int) -> tuple[Any, dict[Any, Any], list[int]]:
    if hasattr(found, 'buffer_map'):
        return found, {}, []
    if not callable(found):
        raise ArgumentError(f'debug: {name} is no kernel, it is of type {type(found).__name__}')
    signature = getattr(found, 'signature', None) or inspect.signature(found)
    source = getattr(found, 'func_source', '')
    constants = [
        part for words in re.findall(r'T\.const\(\s*[\'"]([^\'"]*)', source) for part in re.split(r'[ ,]+', words)
    ]
    arguments = {key: value for key, value in given.items() if key in signature.parameters or key in constants}
    if constants:  # eager: the sizes replace the tensors
        arguments = {**dict.fromkeys(constants, size), **arguments}
    else:
        missing = [
            key
            for key, parameter in signature.parameters.items()
            if key not in arguments and parameter.default is inspect.Parameter.empty and parameter.kind < 2
        ]
        if missing:
            raise ArgumentError(f'debug: {name} needs {", ".join(missing)}; give --set {missing[0]}=...')
    made = found.get_tir(**arguments) if hasattr(found, 'get_tir') else found(**arguments)
    made = getattr(made, 'prim_func', made)
    if not hasattr(made, 'buffer_map'):
        raise ArgumentError(f'debug: {name} gives {type(made).__name__} instead of a T.prim_func')
    out_idx = getattr(found, 'out_idx', None)
    listed = [] if out_idx is None else [out_idx] if isinstance(out_idx, int) else list(out_idx)
    return made, dict(getattr(found, 'pass_configs', None) or {}), [index % len(made.params) for index in listed]


def make_inputs(prim_func: Any, given: dict[str, Any], size: int) -> list[Any]:
    """Random arguments for a kernel; symbolic sizes are `size` unless given by name.

    Args:
        prim_func: The kernel.
        given: Sizes and scalars by name.
        size: Every other symbolic size.

    Returns:
        Tensors and scalars in the order of the parameters; outputs of floats start as NaN.
    """
    from tilelang import tvm

    from tile_kernels.interpreter.engine.program import Usage

    usage = Usage(prim_func)
    symbols: dict[Any, Any] = {}
    buffers = [prim_func.buffer_map[var] for var in prim_func.params if var in prim_func.buffer_map]
    for buffer in buffers:
        for extent in [*buffer.shape, *buffer.strides]:
            for var in tvm.tirx.analysis.undefined_vars(extent) if not isinstance(extent, int) else ():
                symbols[var] = tvm.tirx.const(int(given.get(str(var.name), size)), str(var.dtype))
    made: list[Any] = []
    for var in prim_func.params:
        if var not in prim_func.buffer_map:
            made.append(given.get(str(var.name), size if 'int' in str(var.dtype) else 1.0))
            continue
        buffer = prim_func.buffer_map[var]
        shape = [_number(extent, symbols) for extent in buffer.shape]
        strides = [_number(extent, symbols) for extent in buffer.strides]
        only_stored = buffer.data in usage.stored and buffer.data not in usage.loaded
        made.append(_tensor(str(buffer.dtype), shape, strides, only_stored))
    return made


def _number(extent: Any, symbols: dict[Any, Any]) -> int:
    from tilelang import tvm

    if isinstance(extent, int):
        return extent
    return int(tvm.arith.Analyzer().simplify(tvm.tirx.stmt_functor.substitute(extent, symbols)))


def _tensor(dtype: str, shape: list[int], strides: list[int], output: bool) -> Any:
    import torch

    if dtype.startswith(('float4', 'int4', 'uint4')):
        return torch.randint(-128, 128, (*shape[:-1], shape[-1] // 2), dtype=torch.int8)
    kind = getattr(torch, {'float8_e4m3': 'float8_e4m3fn'}.get(dtype, dtype), None)
    if kind is None:
        raise ArgumentError(f'debug: a tensor of {dtype} cannot be made here')
    if kind.is_floating_point:
        whole = torch.full(shape, float('nan')) if output else torch.randn(shape)
        made = whole.to(kind)
    elif kind == torch.bool:
        made = torch.rand(shape) < 0.5
    else:
        made = torch.full(shape, 77).to(kind) if output else torch.randint(0, 4, shape).to(kind)
    if strides and any(
        extent > 1 and want != have for extent, want, have in zip(shape, strides, made.stride(), strict=True)
    ):
        reach = 1 + sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True))
        holder = torch.zeros(max(reach, 0), dtype=kind).as_strided(shape, strides)
        made = holder.copy_(made)
    return made


def describe(prim_func: Any, tensors: list[Any]) -> list[str]:
    """One line per argument."""
    found = []
    for var, tensor in zip(prim_func.params, tensors, strict=True):
        if var in prim_func.buffer_map:
            buffer = prim_func.buffer_map[var]
            found.append(f'input     {buffer.name}: {buffer.dtype} {tuple(tensor.shape)}')
        else:
            found.append(f'input     {var.name} = {tensor}')
    return found


def _show(report: Any) -> None:
    out = sys.stdout.write
    for error in report.errors:
        more = f' ({error.times} times)' if error.times > 1 else ''
        out(f'finding   {type(error).__name__}: {error}{more}\n')
    for line, buffer in report.guarded:
        out(f'guarded   line {line}: {buffer} is accessed outside its shape; its guard steps in\n')
    for branch in report.uncovered:
        out(f'branch    line {branch.line}: no thread took the {branch.side!r} side\n')
    taken = sum(branch.ran for branch in report.branches)
    file = report.branches[0].file if report.branches else ''
    out(f'coverage  {taken} of {len(report.branches)} branches\n')
    for row in report.lines[:SLOWEST]:
        text = linecache.getline(row.file or file, row.line).strip()
        out(f'slow      line {row.line}: {1e3 * row.seconds:8.2f} ms in {row.runs} runs  {text}\n')
    out(f'result    {len(report.errors)} findings in {report.seconds:.2f} s\n')
