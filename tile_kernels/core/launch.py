"""`launch`: the one place where an op meets a device.

The same line of an op body runs a compiled kernel on CUDA tensors, the interpreter on CPU tensors, nothing on fake
tensors, and is only noted down in a dry run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tile_kernels.core.cost import Cost, touched_bytes
from tile_kernels.core.errors import LaunchError, UnsupportedError
from tile_kernels.core.gpus import arch_of
from tile_kernels.core.jit import Config, Kernel
from tile_kernels.core.knobs import knobs
from tile_kernels.core.nvcc import explain, interpreter_pass_configs

#: Entries of a kernel's (static, size, device) table before it is emptied: sizes come and go, kernels stay.
_MAX_BOUND = 4096


@dataclass(frozen=True)
class Launch:
    """One launch of a dry run."""

    kernel: Kernel
    static: tuple
    config: Config
    size: int
    args: tuple

    @property
    def cost(self) -> Cost:
        """Every tensor once, and the products the kernel declares."""
        moved = sum(touched_bytes(a) for a in self.args if isinstance(a, Tensor))
        if self.kernel.flops is None:
            return Cost(moved)
        return Cost(moved, self.kernel.flops(self.static, self.args), self.args[0].element_size())


class _State(threading.local):
    """What `launch` does in this thread besides launching.

    `skip` runs only the checks and allocations of a body, `trace` collects launches instead of making them, `config`
    replaces what `choose` gives (for the kernel `forced`, or for all), `made` notes what was launched. `arch` is the
    architecture that launches without a GPU are meant for.
    """

    skip = False
    trace: list[Launch] | None = None
    config: Config | None = None
    forced: Kernel | None = None
    made: list[tuple[Callable, tuple]] | None = None
    arch: str | None = None
    #: Outputs of the op that runs, by name, which `empty` hands out instead of new memory.
    outs: dict[str, Tensor] | None = None
    #: Blocks in force that want to see every launch, so that no call may be replayed.
    watchers = 0

    @contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Change what `launch` does inside a block."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values, watchers=self.watchers + 1)
        try:
            yield
        finally:
            self.__dict__.update(before, watchers=self.watchers - 1)


state = _State()


@contextmanager
def tracing() -> Iterator[list[Launch]]:
    """Collect the launches of the block instead of running them."""
    launches: list[Launch] = []
    with state.set(trace=launches):
        yield launches


@contextmanager
def meant_for(arch: str) -> Iterator[None]:
    """Let ops that have kernels of their own for an architecture choose those of `arch` in the block, without a GPU."""
    with state.set(arch=arch):
        yield


@contextmanager
def forced_config(kernel: Kernel | None = None, /, **config: Any) -> Iterator[None]:
    """Run the launches of the block (of one kernel, if given) with this config instead of the one `choose` gives."""
    with state.set(config=config, forced=kernel):
        yield


@contextmanager
def recording() -> Iterator[list[tuple[Callable, tuple]]]:
    """Note the bound functions the block calls, with their arguments."""
    made: list[tuple[Callable, tuple]] = []
    with state.set(made=made):
        yield made


def launch(kernel: Kernel, static: tuple, first: Tensor, *rest: Tensor | float | None, size: int | None = None) -> None:
    """Run `kernel`, built for the `static` arguments, on its arguments in parameter order (outputs included).

    Args:
        kernel: what to run.
        static: its static arguments.
        first: the first argument, a tensor.
        rest: tensors, scalars, and None for a buffer this variant never touches.
        size: problem size given to `choose`, the first extent of the first tensor unless given; 0 launches nothing.
    """
    if state.skip or type(first) is FakeTensor or state.trace is not None:
        if state.trace is not None:
            _record(state.trace, kernel, static, (first, *rest), size)
        return
    if size is None:
        size = first.shape[0]
    if size == 0:
        return
    bound = kernel.bound.get((static, size, first.get_device()))
    if bound is None or state.config is not None:
        bound = _bind(kernel, static, size, first, rest)
        if bound is None:
            return
    try:
        if on_current_device(first.get_device()):
            bound(first, *rest)
        else:
            with torch.cuda.device(first.get_device()):
                bound(first, *rest)
    except RuntimeError as error:
        raise LaunchError(f'{kernel.name}{static}: {explain(str(error))}') from error
    if state.made is not None:
        state.made.append((bound, (first, *rest)))


_multiple_devices = False


def on_current_device(index: int) -> bool:
    """Whether a kernel on device `index` may be launched as things are."""
    return not _multiple_devices or torch._C._cuda_getDevice() == index


def config_for(kernel: Kernel, static: tuple, size: int) -> Config:
    """The config a launch would use; bodies ask for it where a workspace depends on it."""
    if state.config is not None and state.forced in (None, kernel):
        return state.config
    return kernel.config(static, size)


def _record(trace: list[Launch], kernel: Kernel, static: tuple, args: tuple, size: int | None) -> None:
    size = args[0].shape[0] if size is None else size
    if size != 0:
        trace.append(Launch(kernel, static, config_for(kernel, static, int(size)), int(size), args))


def _bind(kernel: Kernel, static: tuple, size: int, first: Tensor, rest: tuple) -> Callable | None:
    """The bound function for a problem seen for the first time; on a CPU the kernel is interpreted at once."""
    global _multiple_devices
    if first.device.type == 'meta':
        return None
    config = config_for(kernel, static, size)
    if first.device.type == 'cpu':
        _interpret(kernel, static, config, (first, *rest))
        return None
    if first.device.type != 'cuda':
        raise UnsupportedError(f'{kernel.name} runs on CUDA and CPU tensors, got a tensor on {first.device}')
    index = first.get_device()
    key = (static, tuple(config.items()), index)
    bound = kernel.loaded.get(key)
    if bound is None:
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                f'{kernel.name}{static} has not run on this device yet and cannot be loaded while a CUDA graph is '
                f'captured; run the op once before the capture, with a first extent of {size}'
            )
        _multiple_devices = torch.cuda.device_count() > 1
        bound = kernel.loaded[key] = kernel.load(static, config, arch_of(index))
    if state.config is None:
        if len(kernel.bound) >= _MAX_BOUND:
            kernel.bound.clear()
        kernel.bound[(static, size, index)] = bound
    return bound


def _interpret(kernel: Kernel, static: tuple, config: Config, args: tuple) -> None:
    from tile_kernels.interpreter import interpret

    prim_func = kernel.tir(*static, **config)
    interpret(prim_func, *args, checks=knobs.checks, pass_configs=interpreter_pass_configs(kernel.pass_configs))
