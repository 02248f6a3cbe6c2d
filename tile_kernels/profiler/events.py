"""Sum up the events of a trace per op and kernel.

Events have the fields of Chrome's trace format, as Kineto writes them: `cat`, `name`, `ts` and `dur` in microseconds,
`pid`, `tid`, and `args`. A device event and the host event of its launch have equal `args['correlation']`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.op import ops

Event = dict[str, Any]

#: Ends the name of a slice until the trace is read: `quant.per_token_cast#3` is the third kind of call.
MARK = '#'

DEVICE = ('kernel', 'gpu_memcpy', 'gpu_memset')
LAUNCH = ('cuda_runtime', 'cuda_driver')
#: The device is the bottleneck if it is busy for this share of the time.
BUSY = 0.8
#: So many rows are printed.
MOST_ROWS = 30


@dataclass(frozen=True)
class Costs:
    """One call of a kind: bytes it moves, operations, least microseconds; and slices of the kind that are no calls."""

    bytes: int
    flops: int
    floor_us: float
    misses: int = 0


@dataclass
class Record:
    """All calls of an op, or of a kernel that no op launched; times in microseconds.

    Attributes:
        name: the op or kernel.
        kind: `'op'`, or `'kernel'`, or on a CPU `'torch'`.
        calls: number of calls.
        device_us: total time on the device; None on a CPU.
        mean_us: mean of a call, on the device, or on a CPU of wall time.
        p95_us: 95th percentile of a call.
        share: part of the whole, from 0 to 1.
        gbps: gigabytes per second on the device.
        pct_of_copy: time of a copy of the same bytes in percent of the time.
        tflops: operations of matrix products, 10^12 per second.
        floor_us: the least possible total time.
        host_us: total time of the calls on the host; for a kernel of its launches.
        gap_us: how long the device was idle before these calls.
    """

    name: str
    kind: str
    calls: int = 0
    device_us: float | None = None
    mean_us: float = 0.0
    p95_us: float = 0.0
    share: float = 0.0
    gbps: float | None = None
    pct_of_copy: float | None = None
    tflops: float | None = None
    floor_us: float | None = None
    host_us: float = 0.0
    gap_us: float | None = None


def op_of(event: Event) -> str | None:
    """The op or interpreted kernel whose call a host event is, or None."""
    name = event.get('name', '')
    if event.get('cat', '').endswith('user_annotation') and MARK in name:
        return name.rpartition(MARK)[0]
    if name.startswith('tile_kernels::'):
        return _operators().get(name.removeprefix('tile_kernels::'), name)
    return None


def _operators() -> dict[str, str]:
    return {op.operator_form.name: op.name for op in ops.values()}


@dataclass
class _Row:
    """What belongs to one record: the slices of its calls, and per call the time on the device."""

    kind: str
    slices: list[Event] = field(default_factory=list)
    device: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    gap: float = 0.0
    host: float = 0.0


def aggregate(events: Iterable[Event], costs: Mapping[str, Costs], copy_bandwidth: float, on_gpu: bool) -> list[Record]:
    """The records of a trace; `costs` are those of slices by name, `copy_bandwidth` is in bytes per second."""
    whole = [e for e in events if e.get('ph') == 'X' and not e['name'].startswith('autograd::engine::')]
    hosts = [e for e in whole if e.get('cat') in ('user_annotation', 'cpu_op') and (not on_gpu or op_of(e))]
    inside = _enclosing(hosts)
    rows: dict[str, _Row] = {}
    for event in hosts:
        name, around = op_of(event), inside[id(event)]
        if name is None and (event['cat'] != 'cpu_op' or around):
            continue  # within a slice of ours or of PyTorch, or the user's own label
        if name is not None and any(op_of(other) == name for other in around):
            continue  # the operator of the op inside its call
        kind = 'torch' if name is None else 'op' if name in ops else 'kernel'
        row = rows.setdefault(name or event['name'], _Row(kind))
        row.slices.append(event)
        row.host += event['dur']
    if on_gpu:
        _add_device(whole, hosts, rows)
    found = [_record(name, row, costs, copy_bandwidth, on_gpu) for name, row in rows.items()]
    total = sum((r.device_us if on_gpu else r.host_us) or 0.0 for r in found)
    for record in found:
        record.share = ((record.device_us if on_gpu else record.host_us) or 0.0) / total if total else 0.0
    return found


def _add_device(whole: list[Event], hosts: list[Event], rows: dict[str, _Row]) -> None:
    """Add the device events to the rows of the innermost ops that launched them, or to rows of their own."""
    launches = {e['args'].get('correlation'): e for e in whole if e.get('cat') in LAUNCH and 'args' in e}
    by_id = {e['args'].get('External id'): e for e in hosts if 'args' in e}
    inside = _enclosing(hosts, list(launches.values()))
    latest = None
    for event in sorted((e for e in whole if e.get('cat') in DEVICE), key=lambda e: e['ts']):
        args = event.get('args', {})
        launch = launches.get(args.get('correlation'))
        around = inside[id(launch)] if launch is not None else []
        call = around[-1] if around else by_id.get(args.get('External id')) if launch is None else None
        name = (op_of(call) if call is not None else None) or short_name(event['name'])
        row = rows.setdefault(name, _Row('kernel'))
        row.device[id(call) if call is not None else id(event)] += event['dur']
        if call is None and launch is not None:
            row.host += launch['dur']
        row.gap += max(0.0, event['ts'] - latest) if latest is not None else 0.0
        latest = max(latest or 0.0, event['ts'] + event['dur'])


def _enclosing(slices: list[Event], points: list[Event] | None = None) -> dict[int, list[Event]]:
    """For each slice, or each point, the slices of its thread that hold its start, the innermost last."""
    threads: dict[tuple, list[tuple[float, int, float, Event]]] = defaultdict(list)
    for event in slices:
        threads[event['pid'], event['tid']].append((event['ts'], 0, -event['dur'], event))
    for event in points or ():
        threads[event['pid'], event['tid']].append((event['ts'], 1, 0.0, event))
    found: dict[int, list[Event]] = {}
    for of in threads.values():
        stack: list[Event] = []
        for ts, is_point, _, event in sorted(of, key=lambda item: item[:3]):
            while stack and stack[-1]['ts'] + stack[-1]['dur'] <= ts:
                stack.pop()
            if points is None or is_point:
                found[id(event)] = list(stack)
            if not is_point:
                stack.append(event)
    return found


def _record(name: str, row: _Row, costs: Mapping[str, Costs], copy_bandwidth: float, on_gpu: bool) -> Record:
    of = [costs[e['name']] for e in row.slices if e['name'] in costs]
    calls = (len(row.slices) - sum(costs[n].misses for n in {e['name'] for e in row.slices} if n in costs)) or len(
        row.device
    )
    times = sorted(row.device.values()) if on_gpu else sorted(e['dur'] for e in row.slices)
    made = Record(name, row.kind, calls, host_us=row.host)
    made.mean_us = sum(times) / max(calls, 1)
    made.p95_us = times[max(-(-95 * len(times) // 100) - 1, 0)] if times else 0.0
    if on_gpu:
        made.device_us, made.gap_us = sum(times), row.gap
        if of and made.device_us:
            seconds, moved, flops = made.device_us * 1e-6, sum(c.bytes for c in of), sum(c.flops for c in of)
            made.gbps, made.floor_us = moved / seconds * 1e-9, sum(c.floor_us for c in of)
            made.pct_of_copy = 100 * moved / copy_bandwidth / seconds
            made.tflops = flops / seconds * 1e-12 if flops else None
    return made


def short_name(kernel: str) -> str:
    """The name of a device function without return type, namespaces, template and function arguments."""
    if kernel.startswith(('Memcpy', 'Memset')):
        return kernel.partition(' (')[0]
    bare, depth = [], 0
    for c in kernel.removeprefix('void ').replace('->', ''):
        depth += (c in '<(') - (c in '>)')
        bare += [c] if depth == 0 and c not in '>)' else []
    return re.sub(r'^.*::', '', ''.join(bare)).strip() or kernel


# Text -----------------------------------------------------------------------------------------

_SORTS = {
    'device': lambda r: -(r.device_us if r.device_us is not None else r.host_us),
    'host': lambda r: -r.host_us,
    'calls': lambda r: -r.calls,
    'mean': lambda r: -r.mean_us,
    'gap': lambda r: -(r.gap_us or 0.0),
    'name': lambda r: r.name,
}


def text_of(records: list[Record], events: Iterable[Event], on_gpu: bool, sort: str, width: int) -> str:
    """The table of a summary; where the names do not fit, each stands on a line of its own."""
    if sort not in _SORTS:
        raise ArgumentError(f'profiler: sort must be one of {", ".join(_SORTS)}, got {sort!r}')
    columns = {'calls': 'calls', 'device_us': 'us', 'mean_us': 'mean', 'p95_us': 'p95', 'share': '%'}
    columns |= {'gbps': 'GB/s', 'pct_of_copy': '%copy', 'tflops': 'TF/s', 'floor_us': 'floor'}
    columns |= {'host_us': 'host us', 'gap_us': 'gap us'}
    if not on_gpu:
        columns = {'calls': 'calls', 'host_us': 'wall us', 'mean_us': 'mean', 'p95_us': 'p95', 'share': '%'}
    ordered = sorted(records, key=_SORTS[sort])
    left_out = [f'and {len(ordered) - MOST_ROWS} more'] if len(ordered) > MOST_ROWS else []
    ordered = ordered[:MOST_ROWS]
    rows = [[_cell(key, getattr(record, key)) for key in columns] for record in ordered]
    widths = [max(map(len, cells)) for cells in zip(columns.values(), *rows, strict=True)]
    lines = ['  '.join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in [list(columns.values()), *rows]]
    names = ['', *(record.name for record in ordered)]
    longest = max(map(len, names))
    if longest + 2 + len(lines[0]) <= width:
        lines = [f'{name:<{longest}}  {line}'.rstrip() for name, line in zip(names, lines, strict=True)]
    else:
        lines = [part for name, line in zip(names, lines, strict=True) for part in (name[:width], f'  {line}') if part]
    return '\n'.join([*lines, *left_out, *(_last_lines(records, events) if on_gpu else [_CPU_LINE])])


_CPU_LINE = 'No GPU: these are wall times on this CPU; they say nothing about the kernels.'


def _cell(key: str, value: Any) -> str:
    if value is None:
        return '–'
    if key == 'share':
        return f'{100 * value:.0f}'
    return str(value) if isinstance(value, int) else f'{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f}'


def busy_share(events: Iterable[Event]) -> float:
    """The part of the time from the first to the last event in which a kernel or copy runs."""
    whole = [
        e for e in events if e.get('ph') == 'X' and e.get('cat') in (*DEVICE, *LAUNCH, 'user_annotation', 'cpu_op')
    ]
    if not whole:
        return 0.0
    busy, latest = 0.0, 0.0
    for start, end in sorted((e['ts'], e['ts'] + e['dur']) for e in whole if e['cat'] in DEVICE):
        busy += max(0.0, end - max(start, latest))
        latest = max(latest, end)
    return busy / max(max(e['ts'] + e['dur'] for e in whole) - min(e['ts'] for e in whole), 1e-9)


def _last_lines(records: list[Record], events: Iterable[Event]) -> list[str]:
    """Whether the host or the device limits, and the three things that would save most."""
    share = busy_share(events)
    bound = 'device-bound' if share >= BUSY else 'host-bound'
    total = sum(r.device_us or 0.0 for r in records)
    ideas = []
    if share and share < BUSY:
        ideas.append((total * (1 / share - 1), 'capture the calls in a CUDA graph, or use torch.compile'))
    for r in records:
        if r.kind == 'op' and r.floor_us and r.device_us and r.device_us > 1.2 * r.floor_us:
            saved = r.device_us - r.floor_us
            ideas.append((saved, f'tile-kernels tune {r.name}: {r.device_us / r.floor_us:.1f} times its floor'))
        elif r.kind == 'kernel' and r.device_us:
            ideas.append((r.device_us / 2, f'fuse {r.name}, or use an op for it'))
    best = sorted(ideas, key=lambda idea: -idea[0])[:3]
    first = f'device busy {share:.0%}: {bound}' + ('; to do:' if best else '')
    return [first, *(f'  {place}. {words} (up to {us:.0f} us)' for place, (us, words) in enumerate(best, 1))]
