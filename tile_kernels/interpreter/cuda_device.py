"""Simulate a GPU: `device='cuda'` tensors are on the CPU, and queries about SMs and the target work."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

_NAMES = {
    (8, 0): 'NVIDIA A100-SXM4-80GB',
    (8, 9): 'NVIDIA L40S',
    (9, 0): 'NVIDIA H200',
    (10, 0): 'NVIDIA B200',
    (12, 0): 'NVIDIA GeForce RTX 5090',
}
_SHARED_KB = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}


def arch_of(capability: tuple[int, int]) -> str:
    """The architecture TileLang lowers for: `sm_90a` for (9, 0)."""
    major, minor = capability
    return f'sm_{major}{minor}{"a" if major >= 9 else ""}'


class _OnCpu(TorchFunctionMode):
    """Redirects every request for a CUDA device to the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, '__name__', '')
        if func is torch.device:
            return func('cuda', args[0]) if args and isinstance(args[0], int) else func(*args, **kwargs)
        if name == '__get__' and getattr(func, '__self__', None) is torch.Tensor.is_cuda:
            return True
        if name == 'cuda' and args:
            return args[0]
        if name == 'record_stream':
            return None
        if kwargs.get('pin_memory') is True:
            kwargs['pin_memory'] = False
        if name == 'pin_memory':
            return args[0]
        if 'device' in kwargs:
            kwargs['device'] = _on_cpu(kwargs['device'])
        if name == 'to' and len(args) > 1:
            args = (args[0], *(_on_cpu(part) if _is_device(part) else part for part in args[1:]))
        if name in _DIVISIONS and not kwargs and _by_number(args):
            return getattr(args[0], _DIVISIONS[name])(_inverse(args[1], args[0].dtype))
        return func(*args, **kwargs)


# On a GPU, PyTorch divides by a number as a product with its inverse.
_DIVISIONS = {'__truediv__': 'mul', 'div': 'mul', 'true_divide': 'mul', '__itruediv__': 'mul_', 'div_': 'mul_'}


def _by_number(args: Any) -> bool:
    if len(args) != 2 or not isinstance(args[0], torch.Tensor) or not args[0].is_floating_point():
        return False
    return isinstance(args[1], (int, float)) and not isinstance(args[1], bool)


def _inverse(number: float, dtype: torch.dtype) -> float:
    """The inverse in the type of the computation: 32 bits for everything narrower."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return float(torch.tensor(1.0, dtype=wide).div(torch.tensor(number, dtype=wide)))


def _is_device(part: Any) -> bool:
    return isinstance(part, (torch.device, str)) or (isinstance(part, int) and not isinstance(part, bool))


def _on_cpu(device: Any) -> Any:
    if isinstance(device, int) and not isinstance(device, bool):
        return torch.device('cpu')
    if isinstance(device, str) and device.split(':')[0] == 'cuda':
        return torch.device('cpu')
    if isinstance(device, torch.device) and device.type == 'cuda':
        return torch.device('cpu')
    return device


class _Event:
    """A CUDA event that uses host time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.at = time.perf_counter()

    def record(self, *_: Any) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: nothing runs in the background."""

    def wait(self, *_: Any) -> None:
        """Do nothing: nothing runs in the background."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return max((end.at - self.at) * 1e3, 1e-6)


class _Stream:
    """A stream; work finishes when it is submitted."""

    cuda_stream = 0
    device = torch.device('cpu')

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        """Do nothing: nothing runs in the background."""

    def wait_stream(self, *_: Any) -> None:
        """Do nothing: nothing runs in the background."""

    def wait_event(self, *_: Any) -> None:
        """Do nothing: nothing runs in the background."""

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True


class _Generator(torch.Generator):
    """A random number generator; a CUDA generator is on the CPU."""

    def __new__(cls, device: Any = 'cpu') -> _Generator:
        return super().__new__(cls, _on_cpu(device))  # type: ignore[call-arg]


def _nothing() -> Callable[..., None]:
    """A function that does nothing; another one for every name, as PyTorch's compiler tells them apart."""

    def nothing(*_: Any, **__: Any) -> None:
        return None

    return nothing


def properties(capability: tuple[int, int], num_sms: int) -> Any:
    """The result of `torch.cuda.get_device_properties` for the simulated GPU."""
    shared = _SHARED_KB.get(capability, 99) << 10
    return SimpleNamespace(
        name=_NAMES.get(capability, f'NVIDIA GPU sm_{capability[0]}{capability[1]}'),
        major=capability[0],
        minor=capability[1],
        multi_processor_count=num_sms,
        total_memory=141 << 30,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared + (1 << 10),
        L2_cache_size=50 << 20,
        gcnArchName='',
        is_integrated=0,
        is_multi_gpu_board=0,
    )


def _cuda_functions(capability: tuple[int, int], num_sms: int) -> dict[str, Any]:
    facts = properties(capability, num_sms)
    stream = _Stream()
    return {
        'is_available': lambda: True,
        'is_initialized': lambda: True,
        'is_bf16_supported': lambda *_, **__: True,
        'device_count': lambda: 1,
        'current_device': lambda: 0,
        'get_device_properties': lambda *_, **__: facts,
        'get_device_capability': lambda *_, **__: capability,
        'get_device_name': lambda *_, **__: facts.name,
        'get_arch_list': lambda: [arch_of(capability)],
        'mem_get_info': lambda *_: (facts.total_memory, facts.total_memory),
        'memory_allocated': lambda *_: 0,
        'max_memory_allocated': lambda *_: 0,
        'memory_reserved': lambda *_: 0,
        'current_stream': lambda *_: stream,
        'default_stream': lambda *_: stream,
        'stream': lambda given=None: given or stream,
        'device': lambda *_: stream,
        'Event': _Event,
        'Stream': _Stream,
        **{
            name: _nothing()
            for name in (
                'init',
                '_lazy_init',
                'set_device',
                'synchronize',
                'empty_cache',
                'manual_seed',
                'manual_seed_all',
                'reset_peak_memory_stats',
                'set_stream',
                'ipc_collect',
            )
        },
    }


def bench_once(fn: Callable[[], Any], *_: Any, quantiles: Any = None, **__: Any) -> Any:
    """Replacement of `tilelang.profiler.do_bench`: one run, whose milliseconds say nothing about a GPU."""
    started = time.perf_counter()
    fn()
    milliseconds = (time.perf_counter() - started) * 1e3
    return [milliseconds] * len(quantiles) if quantiles else milliseconds


@contextmanager
def fake_cuda(capability: tuple[int, int] = (9, 0), num_sms: int = 132) -> Iterator[None]:
    """Inside this context PyTorch and TileLang see a simulated GPU, whose tensors are on the CPU.

    Args:
        capability: Compute capability of the GPU, (9, 0) for Hopper.
        num_sms: Number of its streaming multiprocessors.

    Yields:
        Nothing. Kernels run inside `interpreting()`; this context does not change their semantics.
    """
    import tilelang
    from tilelang import tvm
    from tilelang.profiler import bench

    functions = _cuda_functions(capability, num_sms)
    with ExitStack() as stack:
        for name, function in functions.items():
            if hasattr(torch.cuda, name):
                stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch, 'set_default_device', _nothing()))
        stack.enter_context(mock.patch.object(torch, 'Generator', _Generator))
        stack.enter_context(mock.patch.object(torch.version, 'cuda', torch.version.cuda or '13.0'))
        device_module = tilelang.utils.device
        stack.enter_context(mock.patch.object(device_module, 'IS_CUDA', True))
        stack.enter_context(mock.patch.object(device_module, 'Event', _Event))
        for module in (bench, tilelang.profiler, tilelang.autotuner.tuner):
            if hasattr(module, 'do_bench'):
                stack.enter_context(mock.patch.object(module, 'do_bench', bench_once))
        _patch_tvm_device(stack, type(tvm.runtime.cuda(0)), capability, num_sms)
        stack.enter_context(_OnCpu())
        yield


def _patch_tvm_device(stack: ExitStack, device: type, capability: tuple[int, int], num_sms: int) -> None:
    """Replace TVM's own queries of a CUDA device."""
    shared = _SHARED_KB.get(capability, 99) << 10
    answers = {
        'exist': True,
        'compute_version': f'{capability[0]}.{capability[1]}',
        'multi_processor_count': num_sms,
        'warp_size': 32,
        'max_shared_memory_per_block': 48 << 10,
        'max_threads_per_block': 1024,
        'device_name': _NAMES.get(capability, ''),
        'l2_cache_size_bytes': 50 << 20,
    }
    for name, answer in answers.items():
        original = getattr(device, name, None)
        if isinstance(original, property):
            getter = original.fget
            stack.enter_context(mock.patch.object(device, name, property(_answer(getter, answer))))
    from tilelang.carver.arch.driver import cuda_driver

    stack.enter_context(mock.patch.object(cuda_driver, 'get_shared_memory_per_block', lambda *_, **__: shared))


def _answer(getter: Any, answer: Any) -> Callable[[Any], Any]:
    return lambda self: answer if _is_cuda(self) else getter(self)


def _is_cuda(device: Any) -> bool:
    return 'cuda' in str(device)
