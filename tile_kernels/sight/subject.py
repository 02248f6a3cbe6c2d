"""What the tools examine: a PrimFunc with values for its dynamic extents, however the caller names the kernel."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tile_kernels.core import nvcc, tuned
from tile_kernels.core.errors import ArgumentError, CompileError, TileKernelsError
from tile_kernels.core.gpus import GPUS, SPEEDS, Gpu
from tile_kernels.core.knobs import cache_dir
from tile_kernels.core.launch import Launch, on_gpu
from tile_kernels.core.op import Op
from tile_kernels.core.registry import find_op, launches_of, typical_case


@dataclass(frozen=True)
class Subject:
    """One kernel launch to examine.

    Attributes:
        name: the name of the kernel.
        prim_func: the tile-level TIR.
        pass_configs: the pass configs with which it is compiled, under the names of TileLang's IR.
        target: the compilation target, e.g. `'cuda -arch=sm_90a'`.
        symbols: values of dynamic extents, strides and scalar parameters, by name.
        gpu: the GPU.
        tensors: the tensors that were given, by the name of their parameter.
        launch: the launch of an op, if the subject comes from one.
    """

    name: str
    prim_func: Any = field(repr=False)
    pass_configs: dict[str, Any]
    target: str
    symbols: dict[str, int | float]
    gpu: Gpu
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    launch: Launch | None = field(default=None, repr=False)


def gpu_for(device: str) -> Gpu:
    """The known GPU of this name, with the speeds that `tile-kernels calibrate` measured, if it ran for such a GPU."""
    if device not in GPUS:
        raise ArgumentError(f'sight: device must be one of {", ".join(GPUS)}, got {device!r}')
    gpu = GPUS[device]
    try:
        numbers = json.loads(calibrated(gpu).read_text())['numbers']
        return replace(gpu, speeds={name: float(numbers[name][0]) for name in SPEEDS})
    except (OSError, ValueError, KeyError, TypeError):
        return gpu


def calibrated(gpu: Gpu) -> Path:
    """The device file that `tile-kernels calibrate` writes for a GPU."""
    return cache_dir() / 'devices' / f'{tuned.device_name(gpu)}.json'


def resolve(
    kernel: Any, *args: Any, device: str = 'h200', pass_configs: Mapping[str, Any] | None = None, **named: Any
) -> list[Subject]:
    """The launches that a kernel, a builder or an op stands for.

    Args:
        kernel: a PrimFunc, an object with one, a `tilelang.jit` function, a builder, an op or the name of an op.
        args: tensors of a PrimFunc in parameter order, or the arguments of the builder.
        device: the name of a known GPU.
        pass_configs: pass configs of a kernel that has none of its own, under the names of TileLang's IR.
        named: dynamic extents and scalars by name, named arguments of the builder, or entries of the op's case.
    """
    gpu = gpu_for(device)
    if isinstance(kernel, (str, Op)):
        return _of_op(kernel, args, named, gpu)
    nvcc.require_tilelang()
    from tilelang.jit import JITImpl

    name = getattr(kernel, '__name__', type(kernel).__name__)
    configs = _names(pass_configs or getattr(kernel, 'pass_configs', None) or {})
    if _is_prim_func(kernel) or _is_prim_func(getattr(kernel, 'prim_func', None)):
        func, tensors = kernel if _is_prim_func(kernel) else kernel.prim_func, args
    elif isinstance(kernel, JITImpl) or callable(kernel):
        build = kernel.get_tir if isinstance(kernel, JITImpl) else kernel
        named, symbols = _split(kernel.func if isinstance(kernel, JITImpl) else kernel, named)
        func, tensors = _built(name, build, args, named), tuple(a for a in args if isinstance(a, Tensor))
        named = symbols
    else:
        raise ArgumentError(f'sight: kernel must be a PrimFunc, a builder, an op or its name, got {kernel!r}')
    own = dict(func.attrs.get('tilelang_pass_configs', {})) if func.attrs else {}
    return [_bound(_name_of(func, name), func, tensors, named, _names(own) | configs, gpu)]


def _of_op(kernel: str | Op, args: tuple, named: Mapping[str, Any], gpu: Gpu) -> list[Subject]:
    op = find_op(kernel) if isinstance(kernel, str) else kernel
    if args:
        raise ArgumentError(f'{op.name}: a case is given by name, e.g. num_tokens=4096, got {len(args)} unnamed values')
    with on_gpu(gpu):
        launches = launches_of(op, typical_case(op, named))
    return [of_launch(launch, gpu) for launch in launches]


def of_launch(launch: Launch, gpu: Gpu) -> Subject:
    """The subject of one launch of a dry run on this GPU."""
    func = launch.kernel.tir(*launch.static, **launch.config)
    configs = nvcc.interpreter_pass_configs(launch.kernel.pass_configs)
    return _bound(launch.kernel.name, func, launch.args, {}, configs, gpu, launch)


def _is_prim_func(value: Any) -> bool:
    from tilelang import tvm

    return isinstance(value, tvm.tirx.PrimFunc)


def _names(configs: Mapping[Any, Any]) -> dict[str, Any]:
    """Pass configs under the names of TileLang's IR."""
    return {getattr(key, 'value', str(key)): value for key, value in configs.items()}


def _name_of(func: Any, otherwise: str) -> str:
    return str(func.attrs['global_symbol']) if func.attrs and 'global_symbol' in func.attrs else otherwise


def _split(builder: Any, named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The named arguments of a builder, and the others, which are dynamic symbols."""
    function = getattr(builder, 'orig_func', builder)
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return dict(named), {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return dict(named), {}
    return (
        {name: value for name, value in named.items() if name in parameters},
        {name: value for name, value in named.items() if name not in parameters},
    )


def _built(name: str, build: Callable[..., Any], args: tuple, named: Mapping[str, Any]) -> Any:
    try:
        with nvcc.quiet():
            func = build(*args, **named)
    except TileKernelsError:
        raise
    except TypeError as error:
        raise ArgumentError(f'{name}: {error}') from error
    except Exception as error:
        raise CompileError(f'{name}: {nvcc.explain(str(error) or type(error).__name__)}') from error
    func = func if _is_prim_func(func) else getattr(func, 'prim_func', func)
    if not _is_prim_func(func):
        raise ArgumentError(f'{name}: a builder must return a PrimFunc, got {type(func).__name__}')
    return func


def _bound(
    name: str,
    func: Any,
    args: tuple,
    named: Mapping[str, Any],
    configs: dict[str, Any],
    gpu: Gpu,
    launch: Launch | None = None,
) -> Subject:
    """The subject with the symbols that follow from the arguments; a dynamic extent without a value is an error."""
    if len(args) > len(func.params):
        raise ArgumentError(f'{name}: takes {len(func.params)} arguments, got {len(args)}')
    names = _symbol_names(func)
    symbols: dict[str, int | float] = {}
    tensors: dict[str, Tensor] = {}
    for position, param in enumerate(func.params):
        value = args[position] if position < len(args) else None
        buffer = func.buffer_map.get(param)
        if buffer is None and isinstance(value, (bool, int, float)):
            symbols[names[param]] = value
        elif buffer is not None and isinstance(value, Tensor):
            tensors[buffer.name] = value
            _match(name, buffer, value, names, symbols)
    known = list(names.values())
    for key, value in named.items():
        if key not in known:
            rule = f'{key} must be a dynamic extent or a scalar, which are {", ".join(known) or "none"}'
            raise ArgumentError(f'{name}: {rule}')
        symbols[key] = value
    missing = [key for key in known if key not in symbols]
    if launch is not None:  # only a buffer that the launch leaves out has no extents
        symbols.update(dict.fromkeys(missing, 0))
        missing = []
    if missing:
        raise ArgumentError(f'{name}: give a value for {", ".join(missing)}, e.g. {missing[0]}=4096')
    return Subject(name, func, configs, f'cuda -arch={gpu.target}', symbols, gpu, tensors, launch)


def _symbol_names(func: Any) -> dict[Any, str]:
    """Dynamic extents, strides and scalar parameters of a PrimFunc, with names that differ: `stride`, `stride_1`."""
    found: dict[Any, str] = {}
    for param in func.params:
        buffer = func.buffer_map.get(param)
        candidates = [*buffer.shape, *buffer.strides] if buffer is not None else [param]
        for value in candidates:
            if hasattr(value, 'name') and str(value.dtype) != 'handle' and value not in found:
                same = sum(value.name == other.name for other in found)
                found[value] = f'{value.name}_{same}' if same else value.name
    return found


def _match(name: str, buffer: Any, value: Tensor, names: dict[Any, str], symbols: dict[str, int | float]) -> None:
    """Read the dynamic extents and strides of a parameter from its tensor."""
    if len(buffer.shape) != value.dim():
        raise ArgumentError(f'{name}: {buffer.name} must have {len(buffer.shape)} dimensions, got {value.dim()}')
    for axis, (extent, number) in enumerate(zip(buffer.shape, value.shape, strict=True)):
        key = names.get(extent) if hasattr(extent, 'name') else None
        wanted = symbols.setdefault(key, int(number)) if key else getattr(extent, 'value', number)
        if int(wanted) != int(number):
            raise ArgumentError(f'{name}: {buffer.name} must have extent {int(wanted)} in axis {axis}, got {number}')
    for extent, number in zip(buffer.strides, value.stride(), strict=False):
        if hasattr(extent, 'name'):
            symbols.setdefault(names[extent], int(number))
