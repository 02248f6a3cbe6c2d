"""Time the calls of a decoder layer for few tokens, in a CUDA graph and on the host, with other configs beside.

    python -m tools.decode_round --json round.json          # on a GPU; about 100 s on 16 cores with an empty cache

First all kernels are compiled in parallel. A column of the table is a change of the config that `choose` takes; its
numbers are times in a graph, relative to that config. The host time is that of the public function.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from tile_kernels.cli.bench import circumstances
from tile_kernels.core.gpus import arch_of
from tile_kernels.core.jit import Config, Kernel
from tile_kernels.core.launch import Launch, forced_config, tracing
from tile_kernels.core.precompile import Variant, compile_variants
from tile_kernels.testing.bench import graph_time, host_time
from tools.decode_calls import FORWARD, HOST, Call

EARLY = dict(early=True)

#: Changes of the config that `choose` takes, by kernel.
CHANGES: dict[str, list[Config]] = {
    'norm_forward_kernel': [EARLY, dict(warps=16), dict(early=True, warps=16)],
    'per_token_cast_kernel': [EARLY, dict(vectors=1), dict(early=True, vectors=1), dict(early=True, num_threads=64)],
    'dequantise_kernel': [EARLY, dict(early=True, num_threads=64), dict(early=True, num_threads=256)],
    'swiglu_forward_kernel': [EARLY, dict(early=True, num_threads=64)],
    'rotary_kernel': [EARLY, dict(heads=1), dict(early=True, heads=1)],
    'post_kernel': [EARLY, dict(early=True, num_threads=64), dict(early=True, num_threads=128)],
    'expand_kernel': [EARLY, dict(num_threads=128), dict(early=True, num_threads=128)],
    'expand_to_fused_kernel': [EARLY, dict(early=True, vectors=2), dict(early=True, vectors=4)],
    'normalize_weight_kernel': [EARLY, dict(direct=True), dict(early=True, direct=True, num_threads=32)],
    'route_topk_kernel': [EARLY],
    'topk_gate_kernel': [EARLY],
}

#: Calls whose time does not depend on the hidden size.
SMALL = ('normalize weights', 'gate', 'top-k')


def problems(tokens: list[int], hidden: list[int], only: str) -> Iterator[tuple[str, int, int]]:
    """Name, tokens and hidden size of every measurement in a graph."""
    for name in FORWARD:
        if only in name:
            for width in hidden[:1] if name in SMALL else hidden:
                yield from ((name, count, width) for count in tokens)


def made(make: Callable[[int, int], Call], tokens: int, hidden: int) -> Call:
    """A call on tensors of the GPU."""
    with torch.device('cuda'):
        return make(tokens, hidden)


def launch_of(call: Call) -> Launch:
    """The only launch of a call."""
    with tracing() as launches:
        call()
    return launches[-1]


def changes(launch: Launch) -> list[Config]:
    """Whole configs to compare, other than that of the launch."""
    found = [launch.config | change for change in CHANGES[launch.kernel.name]]
    return [config for config in found if config != launch.config]


def compile_all(launches: list[Launch]) -> float:
    """Compile what the launches need, with every config; returns the seconds."""
    start, arch = time.perf_counter(), arch_of(torch.cuda.current_device())
    needed = [
        Variant(launch.kernel, launch.static, tuple(config.items()), arch)
        for launch in launches
        for config in (launch.config, *changes(launch))
    ]
    for variant, reason in compile_variants(list(dict.fromkeys(needed)), None, False).items():
        sys.stdout.write(f'{variant}: {reason}\n')
    return time.perf_counter() - start


def words(kernel: Kernel, chosen: Config, config: Config) -> str:
    """The change of a config: `early=True vectors=1`."""
    return ' '.join(f'{name}={value}' for name, value in config.items() if value != chosen[name])


def measure(name: str, tokens: int, hidden: int) -> dict[str, Any]:
    """Times of a call with every config, in microseconds."""
    call = made(FORWARD[name], tokens, hidden)
    launch = launch_of(call)
    record: dict[str, Any] = {'call': name, 'tokens': tokens, 'hidden': hidden, 'kernel': launch.kernel.name}
    record |= {'config': launch.config, 'host_us': round(1e3 * host_time(call), 2), 'graph_us': {}}
    for config in (launch.config, *changes(launch)):
        change = words(launch.kernel, launch.config, config)
        with forced_config(launch.kernel, **config) if change else nullcontext():
            record['graph_us'][change] = round(1e3 * graph_time(call), 3)
    return record


def line(record: dict[str, Any]) -> str:
    """A row of the table."""
    own = record['graph_us']['']
    beside = [f'{change} {time / own:.2f}' for change, time in record['graph_us'].items() if change]
    first = f'{record["call"]:18} {record["hidden"]:5} {record["tokens"]:5} {own:7.2f} {record["host_us"]:6.1f}'
    return f'{first}  {", ".join(beside)}'


def summary(records: list[dict[str, Any]]) -> Iterator[str]:
    """Geometric means over hidden sizes and calls, for every kernel, change and number of tokens."""
    ratios: dict[tuple[str, str], dict[int, list[float]]] = {}
    for record in records:
        for change, spent in record['graph_us'].items():
            if change:
                of = ratios.setdefault((record['kernel'], change), {})
                of.setdefault(record['tokens'], []).append(math.log(spent / record['graph_us']['']))
    for (kernel, change), of in ratios.items():
        means = (f'{tokens}: {math.exp(sum(logs) / len(logs)):.2f}' for tokens, logs in of.items())
        yield f'{kernel} {change}  {"  ".join(means)}'


def allocations() -> Iterator[tuple[str, Call]]:
    """Ways to allocate four small tensors, and the smallest call of PyTorch, for their host time."""
    device, shape = torch.device('cuda'), (64, 4)
    like, template = torch.empty(shape, device=device), torch.empty(shape, device=device)
    template.untyped_storage().resize_(0)
    options: dict[str, Any] = dict(dtype=torch.float32, device=device)
    yield 'empty_strided', lambda: torch.empty_strided(shape, (4, 1), **options)
    yield '4 times empty_strided', lambda: [torch.empty_strided(shape, (4, 1), **options) for _ in range(4)]
    yield 'one empty and unsafe_chunk(4)', lambda: torch.empty((256, 4), **options).unsafe_chunk(4)
    yield 'empty_like', lambda: torch.empty_like(like)
    yield 'empty_like of a tensor without memory', lambda: torch.empty_like(template)
    yield 'new_empty_strided', lambda: like.new_empty_strided(shape, (4, 1))
    yield 'add of 64 x 4', lambda: torch.add(like, 1)


def bound_launch() -> tuple[str, Call]:
    """The bound function of a kernel alone, with the arguments of a call."""
    from tile_kernels import moe
    from tile_kernels.moe.normalize_weight import normalize_weight_kernel

    weights = torch.rand(64, 8, device='cuda')
    sums, normalized = moe.normalize_weight(weights)
    bound = next(iter(normalize_weight_kernel.loaded.values()))
    return 'bound launch of three tensors', lambda: bound(weights, sums, normalized)


def host_rows() -> Iterator[dict[str, Any]]:
    """Host times that belong to no graph."""
    calls: list[tuple[str, Call]] = [(name, made(make, 64, 2560)) for name, make in HOST.items()]
    for name, call in [*allocations(), bound_launch(), *calls]:
        yield {'call': name, 'tokens': 64, 'hidden': 2560, 'host_us': round(1e3 * host_time(call), 2)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--tokens', type=int, nargs='+', default=[1, 8, 64, 256, 1000, 2048])
    parser.add_argument('--hidden', type=int, nargs='+', default=[2560, 7168])
    parser.add_argument('--only', default='', help='calls whose name contains this')
    parser.add_argument('--commit')
    parser.add_argument('--json', type=Path, help='append the records to this file, one in a line')
    args = parser.parse_args()
    todo = list(problems(args.tokens, args.hidden, args.only))
    seconds = compile_all([launch_of(made(FORWARD[name], *numbers)) for name, *numbers in todo])
    sys.stdout.write(f'compiled in {seconds:.0f} s\n{"call":18}hidden tokens graph   host  relative to graph\n')
    context, records = circumstances('cuda', args.commit), []
    for problem in todo:
        records.append(measure(*problem))
        sys.stdout.write(line(records[-1]) + '\n')
        sys.stdout.flush()
    hosts = [] if args.only else list(host_rows())
    sys.stdout.write(
        '\n'.join([*(f'{row["call"]:40} {row["host_us"]:6.1f}' for row in hosts), *summary(records)]) + '\n'
    )
    if args.json is not None:
        with args.json.open('a') as file:
            file.writelines(json.dumps(record | context) + '\n' for record in records + hosts)


if __name__ == '__main__':
    main()
