"""Predict the time of a kernel on a GPU from exact counts of its lowered code, and compare two predictions.

The time of a call is a constant, plus for each launch the longest of what its resources need:

    us = event_us + sum over launches of max(hbm, tensor, alu) + next_us for each launch after the first

Only measured GPUs have these constants (`Gpu.speeds`). `python -m tile_kernels.sight.validate` prints what each term
gains on the recorded times. Terms that gained nothing there are not part of the model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tile_kernels.core import nvcc
from tile_kernels.core.errors import TileKernelsError
from tile_kernels.core.explain import size
from tile_kernels.core.gpus import Gpu
from tile_kernels.sight.count import Access, Counts, count
from tile_kernels.sight.limits import Occupancy, occupancy, reason_against
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import Subject, gpu_for, resolve

#: The terms of the model that ablation can switch off; what remains is a roofline on counted bytes.
TERMS = ('counted', 'fill', 'next', 'alu')
#: With blocks for only a part of the SMs, the speed of memory grows with this power of the part.
FILL = 0.5
#: Counts with this note saw one turn of a loop whose length only the device knows.
_ONE_TURN = 'counts as one turn'


@dataclass(frozen=True)
class Work:
    """What a launch asks of a GPU.

    Attributes:
        bytes: bytes of device memory; each byte counts once for reads and once for writes.
        flops: operations of matrix products by element type.
        alu: other floating-point operations.
        blocks: blocks of the grid.
        declared: bytes of the tensors of an op's launch, each tensor once.
    """

    bytes: float
    flops: dict[str, float]
    alu: float
    blocks: int
    declared: float


def work_of(subject: Subject, counted: Sequence[Counts]) -> Work:
    """The work of a launch; where only the device knows how often loops turn, an op's declared cost is the least."""
    total, flops = sum(c.distinct() for c in counted), dict[str, float]()
    alu = sum(c.events.get('alu', 0) for c in counted)
    for counts in counted:
        for dtype, number in counts.flops.items():
            flops[dtype] = flops.get(dtype, 0) + number
    declared = total
    if subject.launch is not None:
        cost = subject.launch.cost
        declared = cost.bytes
        if any(_ONE_TURN in note for counts in counted for note in counts.assumptions):
            total, dtype = max(total, cost.bytes), str(cost.dtype).removeprefix('torch.')
            flops = {dtype: float(cost.flops)} if cost.flops > sum(flops.values()) else flops
    return Work(total, flops, alu, sum(c.blocks for c in counted), declared)


def demands(work: Work, gpu: Gpu, off: Collection[str] = ()) -> dict[str, float]:
    """Microseconds that each resource of a measured GPU needs for a launch, without the terms `off`."""
    speeds = gpu.speeds
    fill = 1.0 if 'fill' in off else min(1.0, work.blocks / gpu.sms)
    moved = work.declared if 'counted' in off else work.bytes
    found = {
        'hbm': moved / speeds['stream_bandwidth'] / fill**FILL,
        'tensor': sum(flops / _rate(dtype, gpu) for dtype, flops in work.flops.items()) / fill,
    }
    found |= {} if 'alu' in off else {'alu': work.alu / speeds['alu_rate'] / fill}
    return {name: 1e6 * seconds for name, seconds in found.items()}


def time_us(works: Sequence[Work], gpu: Gpu, off: Collection[str] = (), graph: bool = False) -> float:
    """Microseconds of a call with these launches, with a cold L2 cache, or inside a CUDA graph."""
    first = gpu.speeds['graph_us' if graph else 'event_us']
    later = 0.0 if 'next' in off else gpu.speeds['next_us'] * max(0, len(works) - 1)
    return first + later + sum(max(demands(work, gpu, off).values()) for work in works)


def floor_us(work: Work, gpu: Gpu) -> float:
    """The least time: bytes at the published bandwidth or products at the published peak, the longer one."""
    products = sum(flops / _peak(dtype, gpu) for dtype, flops in work.flops.items())
    return 1e6 * max(work.bytes / gpu.bandwidth, products)


def _peak(dtype: str, gpu: Gpu) -> float:
    """The published peak of products; integers of 8 bits have that of fp8, unknown types that of half precision."""
    known = torch.float8_e4m3fn if dtype in ('int8', 'uint8') else getattr(torch, dtype, None)
    return gpu.peaks.get(known, gpu.peaks[torch.bfloat16])  # type: ignore[arg-type]


def _rate(dtype: str, gpu: Gpu) -> float:
    """The rate of products; other types reach the share of their peak that half precision reaches."""
    return gpu.speeds['half_rate'] * _peak(dtype, gpu) / gpu.peaks[torch.bfloat16]


@dataclass(frozen=True)
class Prediction:
    """What is known about a kernel before it runs; prints as text.

    Attributes:
        name: the kernel, or the op with several launches.
        device: the GPU.
        us: predicted microseconds by the timer of `bench`, with a cold L2 cache; None for a GPU that was not measured.
        graph_us: the same inside a CUDA graph.
        floor_us: no GPU of this kind is faster.
        bound: `launch`, `latency`, `hbm`, `tensor`, `alu` or `nothing launches`.
        utilization: the part of each resource that is used at the predicted time.
        occupancy: resident blocks and warps of an SM.
        waves: blocks over the blocks that the GPU holds at once.
        tail: the part of the last wave that idles.
        flops: operations of matrix products by element type.
        traffic: bytes of each level, and of each buffer requested and distinct bytes and how often it is read.
        accesses: every kind of access with its line, sectors and wavefronts.
        fits: True, or the sentence why it cannot be launched.
        provenance: where each number comes from: counted, read from the machine code, calibrated or assumed.
        assumptions: what the numbers take for granted.
        launches: the launches of an op that has several.
    """

    name: str
    device: str
    us: float | None
    graph_us: float | None
    floor_us: float
    bound: str
    utilization: dict[str, float] = field(default_factory=dict)
    occupancy: Occupancy | None = None
    waves: float = 0.0
    tail: float = 0.0
    flops: dict[str, float] = field(default_factory=dict)
    traffic: dict[str, Any] = field(default_factory=dict)
    accesses: list[Access] = field(default_factory=list, repr=False)
    fits: bool | str = True
    provenance: dict[str, str] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)
    launches: tuple[Prediction, ...] = ()

    @property
    def intensity(self) -> float:
        """Operations of products for each byte of device memory."""
        return sum(self.flops.values()) / max(1.0, self.traffic.get('hbm', 0.0))

    def to_dict(self) -> dict[str, Any]:
        """The prediction as JSON."""
        return dataclasses.asdict(self) | {'intensity': self.intensity}

    def __str__(self) -> str:
        time = 'not measured, so it has no predicted time' if self.us is None else f'{self.us:.4g} us'
        graph = '' if self.graph_us is None else f', {self.graph_us:.4g} us in a CUDA graph'
        lines = [f'{self.name} on {self.device}: {time}{graph}']
        lines.append(f'  floor {self.floor_us:.4g} us, bound by {self.bound}, {self.intensity:.4g} FLOP/B')
        if self.fits is not True:
            lines.append(f'  cannot be launched: {self.fits}')
        if self.utilization:
            shares = ', '.join(f'{name} {share:.0%}' for name, share in self.utilization.items() if share >= 0.005)
            lines.append(f'  used: {shares or "less than 1 % of everything"}')
        if self.occupancy is not None:
            lines.append(f'  occupancy: {self.occupancy} ({self.provenance["occupancy"]})')
            lines.append(f'  waves: {self.waves:.3g}, {self.tail:.0%} of the last one idles')
        if self.traffic:
            levels = ', '.join(f'{name} {size(self.traffic[name])}' for name in ('hbm', 'l2', 'shared'))
            lines.append(f'  bytes: {levels}')
        for part in self.launches[:4]:
            lines.append(f'  {part.name}: {"–" if part.us is None else f"{part.us:.4g} us"}, bound by {part.bound}')
        lines += [f'  assumed: {note}' for note in self.assumptions[:3]]
        left = len(self.assumptions) - 3
        return '\n'.join(lines + ([f'  and {left} more assumptions'] if left > 0 else []))


def predict(kernel: Any, *args: Any, device: str = 'h200', compile: bool = True, **named: Any) -> Prediction:
    """Predict the time of a kernel, what bounds it, and what it moves; needs no GPU.

    Args:
        kernel: a kernel, a builder or an op, as `tile_kernels.sight.subject.resolve` takes it.
        args: arguments of the kernel or the builder.
        device: the GPU. Only measured GPUs give a time; the others give floor, counts and `fits`.
        compile: whether to run nvcc to read the registers; without, occupancy is that by threads and shared memory.
        named: dynamic extents, arguments of the builder or entries of the case.
    """
    gpu = gpu_for(device)
    parts = [predict_launch(subject, compile) for subject in resolve(kernel, *args, device=device, **named)]
    if not parts:
        return Prediction(getattr(kernel, 'name', str(kernel)), gpu.name, 0.0, 0.0, 0.0, 'nothing launches')
    if len(parts) == 1:
        return parts[0][0]
    launches, works = tuple(part for part, _ in parts), [work for _, work in parts]
    longest = max(launches, key=lambda part: part.us or part.floor_us)
    times = [time_us(works, gpu, graph=graph) if gpu.speeds else None for graph in (False, True)]
    floor = sum(part.floor_us for part in launches)
    flops: dict[str, float] = {}
    for dtype, number in ((d, n) for part in launches for d, n in part.flops.items()):
        flops[dtype] = flops.get(dtype, 0) + number
    traffic = {level: sum(part.traffic[level] for part in launches) for level in ('hbm', 'l2', 'shared')}
    name = kernel if isinstance(kernel, str) else getattr(kernel, 'name', longest.name)
    return Prediction(
        name, gpu.name, times[0], times[1], floor, longest.bound,
        flops=flops,
        traffic=traffic,
        fits=next((part.fits for part in launches if part.fits is not True), True),
        provenance=longest.provenance,
        assumptions=list(dict.fromkeys(note for part in launches for note in part.assumptions)),
        launches=launches,
    )  # fmt: skip


def predict_launch(subject: Subject, compile: bool = True) -> tuple[Prediction, Work]:
    """The prediction for one launch, and its work."""
    lowered = lower(subject)
    return predict_counted(subject, count(subject, lowered), lowered.source if compile else None)


def predict_counted(subject: Subject, counted: Sequence[Counts], source: str | None = None) -> tuple[Prediction, Work]:
    """The prediction for a launch that was counted; with its CUDA source, registers are read."""
    gpu, work = subject.gpu, work_of(subject, counted)
    largest = max(counted, key=lambda counts: counts.requested())
    notes = list(dict.fromkeys(note for counts in counted for note in counts.assumptions))
    resources, where = _resources(source, gpu, notes)
    held = occupancy(largest, gpu, resources.get('registers'), resources.get('static_shared', 0))
    waves = largest.blocks / (gpu.sms * max(1, held.blocks))
    found = demands(work, gpu) if gpu.speeds else {}
    us = time_us([work], gpu) if gpu.speeds else None
    reasons = (reason_against(counts, gpu, resources.get('registers')) for counts in counted)
    fits = next((reason for reason in reasons if reason is not None), True)
    loops = any(_ONE_TURN in note for note in notes)
    counted_or = 'declared by the op, where loops depend on data' if loops and subject.launch else 'counted'
    made = Prediction(
        subject.name,
        gpu.name,
        us,
        time_us([work], gpu, graph=True) if gpu.speeds else None,
        floor_us(work, gpu),
        _bound(found, work, gpu),
        _utilization(work, gpu, us) if us else {},
        held,
        waves,
        math.ceil(waves) - waves,
        work.flops,
        _traffic(counted, work),
        [access for counts in counted for access in counts.accesses],
        fits,
        {'us': 'calibrated' if us else 'none', 'floor_us': counted_or, 'occupancy': where, 'traffic': counted_or},
        notes,
    )
    return made, work


def _resources(source: str | None, gpu: Gpu, notes: list[str]) -> tuple[dict[str, int], str]:
    """Registers and static shared memory by nvcc, and where they come from."""
    if source is not None:
        try:
            return nvcc.resources(source, gpu.target), 'read from the machine code'
        except TileKernelsError as error:
            notes.append(f'registers do not limit the resident blocks, because they could not be read: {error}')
    return {}, 'assumed, without registers'


def _bound(found: Mapping[str, float], work: Work, gpu: Gpu) -> str:
    """What takes longest; without measured speeds the longer part of the floor."""
    if not found:
        return 'hbm' if floor_us(work, gpu) == 1e6 * work.bytes / gpu.bandwidth else 'tensor'
    longest = max(found, key=lambda name: found[name])
    if found[longest] < gpu.speeds['event_us']:
        return 'launch'
    return 'latency' if longest == 'hbm' and work.blocks < gpu.sms else longest


def _utilization(work: Work, gpu: Gpu, us: float) -> dict[str, float]:
    """Shares of the published peaks, and of the calibrated rate of other operations, at the predicted time."""
    shares = {
        'tensor': 1e6 * sum(flops / _peak(dtype, gpu) for dtype, flops in work.flops.items()),
        'memory': 1e6 * work.bytes / gpu.bandwidth,
        'alu': 1e6 * work.alu / gpu.speeds['alu_rate'],
    }
    return {name: microseconds / us for name, microseconds in shares.items()}


def _traffic(counted: Sequence[Counts], work: Work) -> dict[str, Any]:
    every = [access for counts in counted for access in counts.accesses]
    buffers: dict[str, dict[str, float]] = {}
    for counts in counted:
        for name in dict.fromkeys(a.buffer for a in counts.accesses if a.space == 'global'):
            reads, writes = counts.requested(name, False), counts.requested(name, True)
            room = counts.sizes.get(name, math.inf)
            distinct = min(reads, room) + min(writes, room)
            times = reads / min(reads, room) if reads else 0.0
            buffers[name] = {'requested': reads + writes, 'distinct': distinct, 'times_read': times}
    return {
        'hbm': work.bytes,
        'l2': 32 * sum(access.sectors for access in every if access.space == 'global'),
        'shared': 128 * sum(access.wavefronts for access in every if access.space == 'shared'),
        'buffers': buffers,
    }


@dataclass(frozen=True)
class Comparison:
    """Two predictions side by side; prints as text with the reason of the difference."""

    first: Prediction
    second: Prediction

    @property
    def reason(self) -> str:
        """Why the times differ, in one sentence."""
        a, b = self.first, self.second
        for side in (a, b):
            if side.fits is not True:
                return f'{side.name} cannot be launched: {side.fits}'
        one, two = a.us or a.floor_us, b.us or b.floor_us
        if abs(one - two) <= 0.02 * max(one, two):
            return 'the predicted times are equal within 2 %; only a measurement tells them apart'
        slow, fast, times = (a, b, one / two) if one > two else (b, a, two / one)
        causes = {f'{n} bytes': (slow.traffic.get(n, 0), fast.traffic.get(n, 0)) for n in ('hbm', 'l2', 'shared')}
        causes['products'] = sum(slow.flops.values()), sum(fast.flops.values())
        name, (most, least) = max(causes.items(), key=lambda cause: cause[1][0] / max(cause[1][1], 1))
        why = f'it has {most / least:.3g} times the {name}' if least and most > 1.02 * least else f'by {slow.bound}'
        return f'the {"first" if slow is a else "second"} takes {times:.3g} times as long: {why}'

    def __str__(self) -> str:
        rows = [('', self.first.name, self.second.name), *(self._row(name) for name in _COMPARED), *self._levels()]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f'{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}'.rstrip() for a, b, c in rows]
        return '\n'.join([*lines, self.reason])

    def _row(self, name: str) -> tuple[str, str, str]:
        a, b = (getattr(side, name) for side in (self.first, self.second))
        return name, _word(a), _word(b)

    def _levels(self) -> list[tuple[str, str, str]]:
        pairs = [(n, self.first.traffic.get(n, 0), self.second.traffic.get(n, 0)) for n in ('hbm', 'l2', 'shared')]
        return [(f'{name} bytes', size(a), size(b)) for name, a, b in pairs]


_COMPARED = ('us', 'graph_us', 'floor_us', 'bound', 'intensity', 'waves', 'tail')


def _word(value: Any) -> str:
    return f'{value:.4g}' if isinstance(value, float) else '–' if value is None else str(value)


def compare(first: Prediction, second: Prediction) -> Comparison:
    """Two predictions side by side, with the reason of the difference."""
    return Comparison(first, second)
