"""Where the time goes: per op and kernel, on the device and on the host.

    from tile_kernels import profiler
    profiler.start(); model(x); profiler.stop(); profiler.summary()

    with profiler.profile() as p:
        model(x)
    p.summary(sort='device'); p.export_chrome_trace('trace.json'); p.records

It runs `torch.profiler`. While it is active, every eager call of an op is a named slice of the trace. The code behind
calls is replaced for that time, so nothing is checked while no profiler is active. On a CPU, times are wall times.
"""

from __future__ import annotations

import functools
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.profiler import ProfilerActivity, record_function
from torch.utils._pytree import tree_map_only

from tile_kernels.core.call import Calls, naming
from tile_kernels.core.errors import ArgumentError, TileKernelsError
from tile_kernels.core.explain import config_words
from tile_kernels.core.gpus import DEFAULT_GPU, Gpu, cuda_gpu
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import Launch, on_gpu
from tile_kernels.core.op import Op
from tile_kernels.core.replay import MISS
from tile_kernels.profiler.events import MARK, Costs, Event, Record, aggregate, op_of, text_of

__all__ = ['Profile', 'Record', 'profile', 'start', 'stop', 'summary']


def __dir__() -> list[str]:
    return __all__


class Kind:
    """Calls of an op with equal shapes, dtypes and options."""

    def __init__(self, op: Op, given: dict[str, Any], mode: FakeTensorMode) -> None:
        self.op, self.mode = op, mode
        self.given = tree_map_only(Tensor, mode.from_tensor, given)
        #: Replays that did not match: their slices are no calls.
        self.misses = 0

    def launches(self, gpu: Gpu) -> list[Launch]:
        """The launches of such a call; none if it cannot be traced."""
        try:
            with self.mode, on_gpu(gpu):
                return self.op.trace(**self.given)
        except Exception:  # a body may read values, which fake tensors do not have
            return []


class Naming:
    """Makes every eager call of an op a slice of the active trace; with numbers, `kinds` says what each slice is."""

    #: The one in force; there is one at a time.
    active: Naming | None = None

    def __init__(self, numbered: bool = False) -> None:
        self.kinds: dict[str, Kind] = {}
        self.numbered = numbered
        self._names: dict[Any, str] = {}
        self._mode = FakeTensorMode()
        self._before: list[tuple[type, str, Any]] = []

    def name(self, op: Op, given: dict[str, Any]) -> str:
        """The name of the slice of a call: `quant.per_token_cast#3`, with the number of its kind."""
        if not self.numbered:
            return op.name
        key = op.name, str(tree_map_only(Tensor, lambda x: (x.shape, x.stride(), x.dtype, x.device), given))
        if key not in self._names:
            self._names[key] = f'{op.name}{MARK}{len(self._names)}'
            self.kinds[self._names[key]] = Kind(op, given, self._mode)
        return self._names[key]

    def install(self) -> None:
        """Replace the code behind calls, unless that was done already; replays from before are not used."""
        if Naming.active is not None:
            return
        Naming.active = self
        naming.elsewhere = True
        eager, learn = Calls.eager, Calls.learn

        def named_eager(calls: Calls, key: tuple | None, given: dict[str, Any]) -> Any:
            with record_function(self.name(calls.op, given)):
                return eager(calls, key, given)

        def named_learn(calls: Calls, key: tuple, first: Any, tensors: Any, given: dict[str, Any]) -> Any:
            before = len(calls.replays.get(key, ()))
            result = learn(calls, key, first, tensors, given)
            known = calls.replays.get(key, [])
            if known and len(known) != before:
                known[-1] = self._named_replay(known[-1], self.name(calls.op, given))
            return result

        self._replace(Calls, 'eager', named_eager)
        self._replace(Calls, 'learn', named_learn)
        if 'tilelang' in sys.modules:
            from tile_kernels.interpreter.jit_hook import InterpretedKernel

            call = InterpretedKernel.__call__

            def named_kernel(kernel: InterpretedKernel, *tensors: Any, **named: Any) -> Any:
                name = str(kernel.prim_func.attrs['global_symbol'])
                with record_function(f'{name}{MARK}' if self.numbered else name):
                    return call(kernel, *tensors, **named)

            self._replace(InterpretedKernel, '__call__', named_kernel)
        knobs.touch()

    def _replace(self, owner: type, name: str, value: Any) -> None:
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def remove(self) -> None:
        """Restore the code, and forget the named replays."""
        if Naming.active is not self:
            return
        Naming.active = None
        naming.elsewhere = False
        for owner, name, value in self._before:
            setattr(owner, name, value)
        self._before.clear()
        knobs.touch()

    def _named_replay(self, replay: Callable, name: str) -> Callable:
        def named(*tensors: Any) -> Any:
            with record_function(name):
                result = replay(*tensors)
            if result is MISS and name in self.kinds:
                self.kinds[name].misses += 1
            return result

        return named


class Profile:
    """The profile of a stretch of code."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.gpu = cuda_gpu(torch.cuda.current_device()) if self.on_gpu else DEFAULT_GPU
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self.on_gpu else [])
        self._torch = torch.profiler.profile(activities=activities)
        self._naming = Naming(numbered=True)
        self.trace: dict[str, Any] = {}

    def start(self) -> None:
        """Begin."""
        if Naming.active is not None or torch.autograd._profiler_enabled():
            raise ArgumentError('profiler: a torch.profiler is active; stop it first')
        self._naming.install()
        try:
            self._torch.start()
        except BaseException:
            self._naming.remove()
            raise

    def stop(self) -> None:
        """End, and read the trace."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self._torch.stop()
        self._naming.remove()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / 'trace.json'
            self._torch.export_chrome_trace(str(path))
            self.trace = json.loads(path.read_text())

    @property
    def events(self) -> list[Event]:
        """The events of the trace, as Chrome's format has them."""
        return self.trace.get('traceEvents', [])

    @functools.cached_property
    def _launches(self) -> dict[str, list[Launch]]:
        return {name: kind.launches(self.gpu) for name, kind in self._naming.kinds.items()}

    @functools.cached_property
    def _costs(self) -> dict[str, Costs]:
        """Bytes, operations and least time of one call of each kind."""
        found = {}
        for name, launches in self._launches.items():
            costs = [launch.cost for launch in launches]
            floor = sum(cost.floor_us(self.gpu) for cost in costs)
            moved, flops = sum(cost.bytes for cost in costs), sum(cost.flops for cost in costs)
            found[name] = Costs(moved, flops, floor, self._naming.kinds[name].misses)
        return found

    @functools.cached_property
    def records(self) -> list[Record]:
        """One record per op, and per kernel that no op launched."""
        return aggregate(self.events, self._costs, self.gpu.copy_bandwidth, self.on_gpu)

    def summary(self, sort: str = 'device') -> None:
        """Print the records, sorted by `device`, `host`, `calls`, `mean`, `gap` or `name`."""
        sys.stdout.write(self.table(sort) + '\n')

    def table(self, sort: str = 'device') -> str:
        """The text that `summary` prints."""
        return text_of(self.records, self.events, self.on_gpu, sort, shutil.get_terminal_size((80, 24)).columns)

    __str__ = table

    def export_chrome_trace(self, path: str | Path, predict: bool = True) -> None:
        """Write the trace for chrome://tracing or Perfetto; slices of ops have config, bytes, floor and prediction.

        Args:
            path: the file.
            predict: whether to predict the time of every kind of launch, which takes about a second each.
        """
        about = {name: self._about(name, predict) for name in self._launches}
        events = []
        for event in self.events:
            if MARK in event.get('name', '') and event.get('cat', '').endswith('user_annotation'):
                args = {**event.get('args', {}), **about.get(event['name'], {})}
                event = {**event, 'name': op_of(event), 'args': args}
            events.append(event)
        Path(path).write_text(json.dumps({**self.trace, 'traceEvents': events}))

    def _about(self, name: str, predict: bool) -> dict[str, Any]:
        """What slices of a kind of calls carry."""
        launches, costs = self._launches[name], self._costs[name]
        config = '; '.join(f'{launch.kernel.name} {config_words(launch.config)}' for launch in launches)
        found = {'config': config, 'bytes': costs.bytes, 'floor us': round(costs.floor_us, 3)}
        if predict and launches:
            from tile_kernels.sight.model import predict_launch, time_us
            from tile_kernels.sight.subject import of_launch

            try:
                works = [predict_launch(of_launch(launch, self.gpu), compile=False)[1] for launch in launches]
                found['predicted us'] = round(time_us(works, self.gpu), 3) if self.gpu.speeds else 'GPU not measured'
            except TileKernelsError as error:
                found['predicted us'] = str(error)
        return found


_active: Profile | None = None
_last: Profile | None = None


def start() -> None:
    """Begin a profile; `stop` ends it."""
    global _active
    if _active is not None:
        raise ArgumentError('profiler: start was called twice; call stop first')
    made = Profile()
    made.start()
    _active = made


def stop() -> Profile:
    """End the profile that `start` began, and return it."""
    global _active, _last
    if _active is None:
        raise ArgumentError('profiler: stop without start; call start first')
    ended, _active = _active, None
    ended.stop()
    _last = ended
    return ended


def summary(sort: str = 'device') -> None:
    """Print the last profile."""
    if _last is None:
        raise ArgumentError('profiler: nothing was profiled yet; call start and stop first')
    _last.summary(sort)


@contextmanager
def profile() -> Iterator[Profile]:
    """Profile the block; its results are there after the block."""
    start()
    try:
        yield _active  # type: ignore[misc]
    finally:
        stop()
