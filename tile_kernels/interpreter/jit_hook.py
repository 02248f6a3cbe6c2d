"""Let a user's own `@tilelang.jit` functions run on CPU tensors, unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch

from tile_kernels.interpreter.api import Report, interpret, options_of
from tile_kernels.interpreter.engine.program import compiled


class InterpretedKernel:
    """Stands in for a compiled kernel: called with tensors, it interprets them.

    Attributes:
        prim_func: The kernel's TIR.
        report: The report of the last call.
    """

    def __init__(self, prim_func: Any, out_idx: Any, pass_configs: dict[Any, Any] | None, checks: str) -> None:
        self.prim_func = prim_func
        self.pass_configs = dict(pass_configs or {})
        self.checks = checks
        self.report: Report | None = None
        count = len(prim_func.params)
        attrs = prim_func.attrs or {}
        if out_idx is None and 'tilelang_out_idx' in attrs:
            out_idx = [int(index) for index in attrs['tilelang_out_idx']]
        listed = [] if out_idx is None else [out_idx] if isinstance(out_idx, int) else list(out_idx)
        self.out_idx = [index % count for index in listed]

    def __call__(self, *tensors: Any, **named: Any) -> Any:
        """Run; returns the outputs named by `out_idx`, if there are any."""
        given = [*tensors, *self._in_order(len(tensors), named)]
        outputs: list[torch.Tensor] = []
        if self.out_idx and len(given) < len(self.prim_func.params):
            for index in sorted(self.out_idx):
                given.insert(index, None)
            program = compiled(self.prim_func, options_of(self, None, self.checks))
            made = program.new_outputs(tuple(given), self.out_idx)
            for index, tensor in made.items():
                given[index] = tensor
            outputs = [given[index] for index in self.out_idx]
        self.report = interpret(self, *given, checks=self.checks)
        return None if not outputs else outputs[0] if len(outputs) == 1 else outputs

    def _in_order(self, given: int, named: dict[str, Any]) -> list[Any]:
        """Arguments given by name, in the order of the parameters that follow the first `given` ones."""
        buffers = self.prim_func.buffer_map
        inputs = [var for index, var in enumerate(self.prim_func.params) if index not in self.out_idx]
        names = [str(buffers[var].name if var in buffers else var.name) for var in inputs[given:]]
        return [named[name] for name in names if name in named]

    def get_kernel_source(self, *_: Any, **__: Any) -> str:
        """The kernel as TIR text."""
        return str(self.prim_func.script())


@contextmanager
def interpreting(checks: str = 'memory') -> Iterator[None]:
    """Inside this context `@tilelang.jit` functions and `tilelang.compile` give interpreted kernels.

    Args:
        checks: As for `interpret`.

    Yields:
        Nothing; TileLang compiles as usual again afterwards.
    """
    import tilelang

    jit_module: Any = import_module('tilelang.jit')  # the attribute tilelang.jit is the decorator
    implementation = jit_module.JITImpl
    caches: dict[int, tuple[Any, Any]] = {}
    compile_method, call_method = implementation.compile, implementation.__call__
    compile_function = jit_module.compile

    def compile_jit(self: Any, *args: Any, **kwargs: Any) -> InterpretedKernel:
        return InterpretedKernel(self.get_tir(*args, **kwargs), self.out_idx, self.pass_configs, checks)

    def call_jit(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Interpreted and compiled kernels must not meet in one cache.
        kept = self._kernel_cache, self._call_form_cache
        self._kernel_cache, self._call_form_cache = caches.setdefault(id(self), ({}, type(kept[1])()))
        try:
            return call_method(self, *args, **kwargs)
        finally:
            self._kernel_cache, self._call_form_cache = kept

    def compile_prim_func(func: Any, out_idx: Any = None, *_: Any, **kwargs: Any) -> InterpretedKernel:
        return InterpretedKernel(func, out_idx, kwargs.get('pass_configs'), checks)

    implementation.compile, implementation.__call__ = compile_jit, call_jit
    jit_module.compile = tilelang.compile = compile_prim_func
    try:
        yield
    finally:
        implementation.compile, implementation.__call__ = compile_method, call_method
        jit_module.compile = tilelang.compile = compile_function
