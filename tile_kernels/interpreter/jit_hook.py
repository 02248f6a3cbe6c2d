"""Run a user's own `@tilelang.jit` functions on CPU tensors, unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from tilelang.engine.lower import extrac_params
from tilelang.jit import JITKernel
from tilelang.profiler import Profiler
from tilelang.utils import TensorSupplyType

from tile_kernels.core.errors import UnsupportedError
from tile_kernels.interpreter.api import Report, interpret, options_of
from tile_kernels.interpreter.engine.program import compiled


class Adapter:
    """The object behind `kernel.adapter`, which examples use and profilers call.

    Attributes:
        params: Type and shape of every parameter.
        result_idx: Positions of the outputs.
        prim_func: The kernel's TIR.
        func: The function that runs the kernel.
    """

    def __init__(self, kernel: InterpretedKernel, result_idx: list[int]) -> None:
        self.kernel = kernel
        self.prim_func = kernel.prim_func
        self.ir_module = kernel.prim_func
        self.params = extrac_params(kernel.prim_func)
        self.result_idx = result_idx
        self.func: Callable[..., Any] = kernel.run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel."""
        return self.func(*args, **kwargs)

    @property
    def kernel_global_source(self) -> str:
        """The CUDA text."""
        return self.kernel.get_kernel_source()

    def get_kernel_source(self, kernel_only: bool = True) -> str:
        """The CUDA text."""
        return self.kernel.get_kernel_source(kernel_only)

    def get_host_source(self) -> str:
        """The TIR text; there is no host code."""
        return self.kernel.get_host_source()


class InterpretedKernel(JITKernel):
    """Replaces a compiled kernel: a call with tensors runs the interpreter.

    Attributes:
        prim_func: The kernel's TIR.
        report: The report of the last call.
        settings: Keyword arguments for `interpret`.
        compile_really: Returns the compiled kernel, for CUDA tensors and for a library, if there is a GPU compiler.
    """

    compile_really: Callable[[], Any] | None = None

    def __init__(
        self, prim_func: Any, out_idx: Any, pass_configs: dict[Any, Any] | None, checks: str, **settings: Any
    ) -> None:
        self.prim_func = prim_func
        self.pass_configs = dict(pass_configs or {})
        self.checks = checks
        self.settings = settings
        self.report: Report | None = None
        self.verbose = False
        self.compile_flags = None
        self.execution_backend = 'interpreter'
        count = len(prim_func.params)
        attrs = prim_func.attrs or {}
        if out_idx is None and 'tilelang_out_idx' in attrs:
            out_idx = [int(index) for index in attrs['tilelang_out_idx']]
        listed = [] if out_idx is None else [out_idx] if isinstance(out_idx, int) else list(out_idx)
        self.adapter: Any = Adapter(self, [index % count for index in listed])
        self.torch_function = self.run

    @property
    def target(self) -> Any:
        """The target for lowering: the current one, or Hopper."""
        from tilelang import tvm

        current = tvm.target.Target.current(allow_none=True)
        return current or tvm.target.Target({'kind': 'cuda', 'arch': _arch()})

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        """Run; returns the outputs named by `out_idx`, if there are any."""
        return self.adapter(*tensors, **named)

    def run(self, *tensors: Any, **named: Any) -> Any:
        """Run on tensors in parameter order or by name."""
        given = self._in_order(list(tensors), named)
        if self.compile_really is not None and any(_on_gpu(tensor) for tensor in given):
            return self.compile_really()(*given)
        out_idx = self.adapter.result_idx
        outputs: list[torch.Tensor] = []
        if out_idx and len(given) < len(self.prim_func.params):
            for index in sorted(out_idx):
                given.insert(index, None)
            program = compiled(self.prim_func, options_of(self, None, self.checks))
            made = program.new_outputs(tuple(given), out_idx)
            for index, tensor in made.items():
                given[index] = tensor
            outputs = [given[index] for index in out_idx]
        self.report = interpret(self, *given, checks=self.checks, **self.settings)
        return None if not outputs else outputs[0] if len(outputs) == 1 else outputs

    def _in_order(self, given: list[Any], named: dict[str, Any]) -> list[Any]:
        """Arguments in parameter order; others (such as a stream) are dropped."""
        if not named:
            return given
        names = []
        for position, var in enumerate(self.prim_func.params):
            buffer = self.prim_func.buffer_map.get(var, None)
            if position not in self.adapter.result_idx or any(str(buffer.name) == name for name in named):
                names.append(str(var.name) if buffer is None else str(buffer.name))
        return given + [named[name] for name in names[len(given) :] if name in named]

    def get_kernel_source(self, kernel_only: bool = True) -> str:
        """The kernel as CUDA text, lowered without a GPU."""
        import tilelang
        from tilelang import tvm
        from tilelang.transform.pass_config import normalize_pass_configs

        target = self.target
        with target, tvm.transform.PassContext(opt_level=3, config=normalize_pass_configs(self.pass_configs) or {}):
            return str(tilelang.lower(self.prim_func, target=target, enable_device_compile=False).kernel_source)

    def get_host_source(self) -> str:
        """The kernel as TIR text; there is no host code."""
        return str(self.prim_func.script())

    @property
    def kernel_source(self) -> str:
        """The kernel as CUDA text."""
        return self.get_kernel_source()

    def export_library(self, kernel_file: str) -> None:
        """Compile the kernel and write it as a shared library."""
        if self.compile_really is None:
            raise AttributeError('an interpreted kernel has no library')
        self.compile_really().export_library(kernel_file)

    def get_profiler(self, tensor_supply_type: TensorSupplyType = TensorSupplyType.Auto) -> Profiler:
        """A profiler that checks the kernel; it times only on a GPU."""
        made = InterpretedProfiler(self.params, self.out_idx, tensor_supply_type)
        return made.with_default_adapter(self.adapter)

    def run_once(self, func: Callable[..., Any] | None = None) -> Any:
        """Run once, on inputs that TileLang generates."""
        return self.get_profiler().run_once(func)


class InterpretedProfiler(Profiler):
    """TileLang's profiler of a kernel, on a machine that may have no GPU."""

    def assert_allclose(self, *args: Any, **kwargs: Any) -> None:
        """Compare the kernel with a reference program."""
        with self._without_waiting():
            super().assert_allclose(*args, **kwargs)

    def manual_assert_close(self, *args: Any, **kwargs: Any) -> None:
        """Compare the kernel with a reference program by a function of the caller."""
        with self._without_waiting():
            super().manual_assert_close(*args, **kwargs)

    def _without_waiting(self) -> Any:
        """PyTorch without CUDA cannot wait for a GPU."""
        absent = not torch.cuda.is_available()
        return mock.patch.object(torch.cuda, 'synchronize', lambda *_: None) if absent else nullcontext()

    def do_bench(self, *args: Any, **kwargs: Any) -> Any:
        """Time the kernel; needs a GPU."""
        if not torch.cuda.is_available():
            raise UnsupportedError(
                'do_bench: there is no GPU, and the time of the interpreter says nothing about one; '
                'tile_kernels.sight.predict(kernel) predicts the time'
            )
        return super().do_bench(*args, **kwargs)


def _arch() -> str:
    from tile_kernels.interpreter.cuda_device import arch_of

    return arch_of(torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0))


def _for_cpu(target: Any) -> bool:
    """Whether a kernel is compiled for the CPU; such a kernel needs no interpreter."""
    if isinstance(target, dict):
        target = target.get('kind')
    kind = target if isinstance(target, str) else getattr(getattr(target, 'kind', None), 'name', '')
    return str(kind).split(' ')[0] in ('c', 'llvm')


def _on_gpu(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type == 'cuda'


@contextmanager
def interpreting(checks: str = 'memory', **settings: Any) -> Iterator[None]:
    """Inside this context `@tilelang.jit` functions and `tilelang.compile` return interpreted kernels.

    Args:
        checks: As for `interpret`.
        **settings: Further keyword arguments for `interpret`.

    Yields:
        Nothing; afterwards TileLang compiles as usual again.
    """
    with ExitStack() as stack:
        _install(stack, checks, settings)
        yield


def _install(stack: ExitStack, checks: str, settings: dict[str, Any]) -> None:
    """Replace TileLang's compilation of kernels by interpretation, until the stack unwinds."""
    import tilelang
    from tilelang.autotuner import tuner

    jit_module: Any = import_module('tilelang.jit')  # the attribute tilelang.jit is the decorator
    implementation = jit_module.JITImpl
    caches: dict[int, tuple[Any, Any]] = {}
    call_method = implementation.__call__

    real_compile, real_compile_method = jit_module.compile, implementation.compile

    def compile_jit(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _for_cpu(self.target):
            return real_compile_method(self, *args, **kwargs)
        made = InterpretedKernel(self.get_tir(*args, **kwargs), self.out_idx, self.pass_configs, checks, **settings)
        made.compile_really = lambda: real_compile_method(self, *args, **kwargs)
        return made

    def call_jit(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Interpreted and compiled kernels must not be in one cache.
        kept = self._kernel_cache, self._call_form_cache
        self._kernel_cache, self._call_form_cache = caches.setdefault(id(self), ({}, type(kept[1])()))
        try:
            return call_method(self, *args, **kwargs)
        finally:
            self._kernel_cache, self._call_form_cache = kept

    def compile_prim_func(func: Any, out_idx: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _for_cpu(kwargs.get('target')):
            return real_compile(func, out_idx, *args, **kwargs)
        made = InterpretedKernel(func, out_idx, kwargs.get('pass_configs'), checks, **settings)
        made.compile_really = lambda: real_compile(func, out_idx, *args, **kwargs)
        return made

    def compile_many(funcs: Any, out_idx: Any = None, *_: Any, **kwargs: Any) -> list[Any]:
        return [compile_prim_func(func, out_idx, **kwargs) for func in funcs]

    for owner, name, value in (
        (implementation, 'compile', compile_jit),
        (implementation, '__call__', call_jit),
        (jit_module, 'compile', compile_prim_func),
        (tilelang, 'compile', compile_prim_func),
        (jit_module, 'par_compile', compile_many),
        (tilelang, 'par_compile', compile_many),
        (tuner.AutoTuner, 'run', _first_configuration),
    ):
        stack.enter_context(mock.patch.object(owner, name, value))


def _first_configuration(tuner: Any, *_: Any, **__: Any) -> Any:
    """Replacement of tuning: the first configuration, or the one that the caller gives."""
    import inspect

    from tilelang.autotuner.param import AutotuneResult

    parameters = inspect.signature(tuner.fn).parameters
    configs = tuner.configs
    args, kwargs = tuner._kernel_parameters or ((), ())
    if callable(configs):
        configs = configs(*args, **dict(kwargs))
    if not configs:
        raise ValueError('autotune: there is no configuration to run')
    first = dict(configs[0])
    wanted = {name: value for name, value in first.items() if name in parameters}
    given = {name for name, _ in kwargs} | set(list(parameters)[: len(args)])
    compile_kernel = tuner.jit_compile or tuner._ensure_jit_functions()[0]
    if given & set(wanted):
        kernel, first = compile_kernel(), {}
    else:
        kernel = compile_kernel(**wanted)
    kernel.update_tuner_result(latency=1.0, config=first, ref_latency=None)
    return AutotuneResult(latency=1.0, config=first, ref_latency=None, libcode='', func=kernel.prim_func, kernel=kernel)


_kept_open: list[ExitStack] = []


def install() -> None:
    """Interpret every kernel that TileLang compiles in this process from now on (`TK_INTERPRET=1`)."""
    from tile_kernels.core.knobs import knobs

    if not _kept_open:
        stack = ExitStack()
        _install(stack, knobs.checks, {})
        _kept_open.append(stack)
