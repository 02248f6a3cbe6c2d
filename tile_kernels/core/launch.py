"""`launch`: the only function through which an op runs on a device.

The same line of an op body runs a compiled kernel on CUDA tensors and the interpreter on CPU tensors. On fake tensors
it does nothing. In a dry run it only records the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from tile_kernels.core import tuned
from tile_kernels.core.cost import Cost, touched_bytes
from tile_kernels.core.errors import LaunchError, UnsupportedError
from tile_kernels.core.gpus import DEFAULT_GPU, Gpu, arch_of, cuda_gpu, gpu_named
from tile_kernels.core.jit import Config, Kernel
from tile_kernels.core.knobs import knobs
from tile_kernels.core.nvcc import explain, interpreter_pass_configs

#: A kernel, or a tuple of variants; `serves` selects one of them.
Variants = Kernel | tuple[Kernel, ...]

#: A kernel's (static, size, device) table is emptied at this many entries, because sizes may change without end.
_MAX_BOUND = 4096

_WORKERS_WITHOUT_GPU = 3


@dataclass(frozen=True)
class Launch:
    """One launch of a dry run."""

    kernel: Kernel
    static: tuple
    config: Config
    size: int
    args: tuple
    #: The origin of the config: `forced_config`, a table of tuned configs, `choose` or the kernel itself.
    decided_by: str = 'choose'

    @property
    def cost(self) -> Cost:
        """Bytes of every tensor once, and the operations that the kernel declares."""
        moved = sum(touched_bytes(a) for a in self.args if isinstance(a, Tensor))
        if self.kernel.flops is None:
            return Cost(moved)
        return Cost(moved, self.kernel.flops(self.static, self.args), self.args[0].dtype)


class _State(threading.local):
    """Per-thread state that changes what `launch` does.

    `skip` runs only the checks and allocations of a body. `trace` collects launches instead of running them. `config`
    replaces the config of `choose`, for the kernel `forced` or for all. `made` records the launches. `gpu` replaces the
    actual GPU in the choice of kernels and configs.
    """

    skip = False
    trace: list[Launch] | None = None
    config: Config | None = None
    forced: Kernel | None = None
    made: list[tuple[Callable, tuple]] | None = None
    gpu: Gpu | None = None
    #: Outputs of the running op by name; `empty` returns these instead of new memory.
    outs: dict[str, Tensor] | None = None
    #: The number of active blocks that must see every launch; while there are any, no call is replayed.
    watchers = 0
    #: The op whose call is a slice of the active `torch.profiler`.
    named: Any = None

    @contextmanager
    def set(self, **values: Any) -> Iterator[None]:
        """Change the state inside a block."""
        before = {name: getattr(self, name) for name in values}
        self.__dict__.update(values, watchers=self.watchers + 1)
        try:
            yield
        finally:
            self.__dict__.update(before, watchers=self.watchers - 1)

    @contextmanager
    def as_named(self, op: Any) -> Iterator[None]:
        """In the block, calls of `op` are no slices of their own; unlike `set`, this leaves replays on."""
        before, self.named = self.named, op
        try:
            yield
        finally:
            self.named = before


state = _State()

#: The `collect.Collected` objects of active `collecting()` blocks, in all threads.
collectors: list[Any] = []


@contextmanager
def tracing() -> Iterator[list[Launch]]:
    """Collect the launches of the block instead of running them."""
    launches: list[Launch] = []
    with state.set(trace=launches):
        yield launches


@contextmanager
def on_gpu(gpu: Gpu | str) -> Iterator[None]:
    """In the block, choose kernels and configs for a GPU, given by name (`'a100'`) or architecture (`'sm_80'`).

    Dry runs and the interpreter do not need this GPU. Tensors on another GPU use the chosen kernels if that GPU can run
    them.
    """
    with state.set(gpu=gpu_named(gpu) if isinstance(gpu, str) else gpu):
        yield


def gpu_of(x: Tensor) -> Gpu:
    """The GPU for which kernels are chosen: that of `on_gpu`, else that of the tensor, else an H200."""
    if state.gpu is not None:
        return state.gpu
    return cuda_gpu(x.get_device()) if x.is_cuda and not isinstance(x, FakeTensor) else DEFAULT_GPU


def num_workers(x: Tensor) -> int:
    """The number of thread blocks of a persistent kernel: one per SM of the GPU of `x`, or `knobs.num_sms`.

    Results must not depend on it. A dry run takes the SMs of its GPU. Without a GPU the number is small, so that in the
    interpreter a block processes several tiles.
    """
    if state.trace is not None:
        return knobs.num_sms or gpu_of(x).sms
    if not x.is_cuda or isinstance(x, FakeTensor):
        return _WORKERS_WITHOUT_GPU
    return knobs.num_sms or cuda_gpu(x.get_device()).sms


@contextmanager
def forced_config(kernel: Kernel | None = None, /, **config: Any) -> Iterator[None]:
    """Run the launches of the block (of one kernel, if given) with this config instead of that of `choose`."""
    with state.set(config=config, forced=kernel):
        yield


@contextmanager
def recording() -> Iterator[list[tuple[Callable, tuple]]]:
    """Record the bound functions that the block calls, with their arguments."""
    made: list[tuple[Callable, tuple]] = []
    with state.set(made=made):
        yield made


def launch(
    kernel: Variants, static: tuple, first: Tensor, *rest: Tensor | float | None, size: int | None = None
) -> None:
    """Run `kernel`, built for the `static` arguments, on its arguments in parameter order (outputs included).

    Args:
        kernel: the kernel; of several variants, the one that claims the static arguments and the GPU (`variant_for`).
        static: the static arguments, the same for all variants.
        first: the first argument, a tensor.
        rest: tensors, scalars, and None for a buffer this variant never touches.
        size: problem size for `choose`, by default the first extent of the first tensor; 0 launches nothing.
    """
    if collectors:
        _collect(kernel, static, first, size)
    if state.skip or type(first) is FakeTensor or state.trace is not None:
        if state.trace is not None:
            _record(state.trace, kernel, static, (first, *rest), size)
        return
    if size is None:
        size = first.shape[0]
    if size == 0:
        return
    if isinstance(kernel, tuple):
        bound = kernel[0].bound.get((kernel, static, size, first.get_device()))
    else:
        bound = kernel.bound.get((static, size, first.get_device()))
    if bound is None or state.config is not None or state.gpu is not None or (knobs.had_blocks and tuned.overridden()):
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
        name = variant_for(kernel, static, gpu_of(first)).name
        raise LaunchError(f'{name}{static}: {explain(str(error))}') from error
    if state.made is not None:
        state.made.append((bound, (first, *rest)))


_multiple_devices = False


def on_current_device(index: int) -> bool:
    """Whether a kernel on device `index` can be launched without changing the current device."""
    return not _multiple_devices or torch._C._cuda_getDevice() == index


def variant_for(kernel: Variants, static: tuple, gpu: Gpu) -> Kernel:
    """The variant whose `serves` claims the call; otherwise the fallback, which has no `serves`."""
    variants = kernel if isinstance(kernel, tuple) else (kernel,)
    claiming = [variant for variant in variants if variant.serves is not None and variant.claims(static, gpu)]
    claiming = claiming or [variant for variant in variants if variant.serves is None]
    if len(claiming) == 1:
        return claiming[0]
    if claiming:
        raise LaunchError(f'{_names(claiming, "and")} claim the same call, {static} on {gpu}')
    raise UnsupportedError(f'{_names(variants, "or")} cannot run with {static} on {gpu}')


def _names(kernels: Sequence[Kernel], word: str) -> str:
    return f' {word} '.join(kernel.name for kernel in kernels)


def config_for(kernel: Variants, static: tuple, size: int, x: Tensor) -> Config:
    """The config a launch on the GPU of `x` would use; op bodies need it to size a workspace."""
    gpu = gpu_of(x)
    return _decide(variant_for(kernel, static, gpu), static, size, gpu)[0]


def _decide(kernel: Kernel, static: tuple, size: int, gpu: Gpu) -> tuple[Config, str]:
    """The config of a launch and its origin."""
    if state.config is not None and state.forced in (None, kernel):
        return state.config, 'forced_config'
    return kernel.decide(static, size, gpu)


def _collect(kernel: Variants, static: tuple, first: Tensor, size: int | None) -> None:
    """Tell the active collectors about a launch; a size that is still symbolic counts as its example value."""
    number = first.shape[0] if size is None else size
    number = number if isinstance(number, int) else number.node.hint
    if number:
        for collector in collectors:
            collector.add(kernel, static, number)


def _record(trace: list[Launch], kernel: Variants, static: tuple, args: tuple, size: int | None) -> None:
    size = args[0].shape[0] if size is None else size
    if size != 0:
        gpu = gpu_of(args[0])
        variant = variant_for(kernel, static, gpu)
        config, who = _decide(variant, static, int(size), gpu)
        trace.append(Launch(variant, static, config, int(size), args, who))


def _bind(kernels: Variants, static: tuple, size: int, first: Tensor, rest: tuple) -> Callable | None:
    """The bound function for a new problem; on CPU tensors this runs the interpreter and returns None."""
    global _multiple_devices
    if first.device.type == 'meta':
        return None
    if first.device.type not in ('cpu', 'cuda'):
        names = kernels.name if isinstance(kernels, Kernel) else _names(kernels, 'or')
        raise UnsupportedError(f'{names} runs on CUDA and CPU tensors, got a tensor on {first.device}')
    gpu = gpu_of(first)
    kernel = variant_for(kernels, static, gpu)
    config, _ = _decide(kernel, static, size, gpu)
    if first.device.type == 'cpu':
        _interpret(kernel, static, config, (first, *rest))
        return None
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
    if state.config is None and state.gpu is None and not (knobs.had_blocks and tuned.overridden()):
        table = kernels[0].bound if isinstance(kernels, tuple) else kernels.bound
        if len(table) >= _MAX_BOUND:
            table.clear()
        table[(kernels, static, size, index) if isinstance(kernels, tuple) else (static, size, index)] = bound
    return bound


def _interpret(kernel: Kernel, static: tuple, config: Config, args: tuple) -> None:
    from tile_kernels.interpreter import interpret

    prim_func = kernel.tir(*static, **config)
    interpret(prim_func, *args, checks=knobs.checks, pass_configs=interpreter_pass_configs(kernel.pass_configs))
