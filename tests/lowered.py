"""What TileLang and nvcc made of a kernel, by the digest of its code, so that unchanged kernels are not compiled again.

`python -m tests.lowered` compiles what has changed and writes the record. A stale record costs time only: tests compile
every kernel whose digest differs, all kernels with `TK_FULL_TEST=1`, and always a small sample.
"""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tile_kernels import knobs
from tile_kernels.core import cache, nvcc
from tile_kernels.core.jit import Kernel
from tile_kernels.sight.guards import unguarded_loads

RECORD = Path(__file__).parent / 'lowered.json'

_recorded: dict[str, dict] = json.loads(RECORD.read_text()) if RECORD.exists() else {}


def unfenced_products(source: str) -> list[str]:
    """Asynchronous products that may not see tiles of cp.async: a fence has to stand between the wait and them."""
    found, waiting = [], False
    for line in source.splitlines():
        if 'cp_async_wait' in line:
            waiting = True
        elif 'fence_proxy_async' in line:
            waiting = False
        elif 'tl::wgmma_' in line and waiting:
            found.append(line.strip())
    return found


def touched_early(source: str) -> list[str]:
    """What a kernel touches or starts before it waits for the one before, if it may be launched before that ends."""
    first = source.split('__launch_bounds__')[1]  # others of the same launch follow it
    before, wait, _ = first.partition('cudaGridDependencySynchronize();')
    if not wait:
        return []
    signature, body = re.split(r'\) \{\n', before, maxsplit=1)
    pointers = re.findall(r'\* (?:__restrict__ )?(\w+)', signature)
    starts = ['tma_load', 'cudaTriggerProgrammaticLaunchCompletion']
    return [name for name in pointers + starts if re.search(rf'\b{name}\b', body)]


def _key(kernel: Kernel, static: tuple, config: dict, arch: str) -> tuple[str, str]:
    """The name of an entry, and the digest of everything that it depends on."""
    values = ','.join(str(value).removeprefix('torch.') for value in (*static, *config.values()))
    return f'{kernel.name}({values})@{arch}', f'{kernel._digest(static, config, arch)}-{cache.toolkit()}'


def compiled(kernel: Kernel, static: tuple, config: dict, arch: str) -> dict[str, Any]:
    """Lower a kernel; nvcc compiles those for Hopper."""
    source, shared = kernel._lower(static, config, arch)
    found: dict[str, Any] = {
        'digest': _key(kernel, static, config, arch)[1],
        'shared': shared,
        'named': kernel.name in source,
        'unfenced': unfenced_products(source),
        'early': touched_early(source),
        'unguarded': unguarded_loads(source),
        'proxy_fence': 'fence_proxy_async' in source,
    }
    if arch == 'sm_90a':
        found |= nvcc.resources(source, arch)
    return found


def facts(kernel: Kernel, static: tuple, config: dict, arch: str = 'sm_90a') -> dict[str, Any]:
    """Facts of the generated code: those on record if nothing has changed since, else those of a compilation now."""
    name, digest = _key(kernel, static, config, arch)
    found = _recorded.get(name)
    control = sum(map(ord, kernel.name)) % 12 == 0
    if found is None or found['digest'] != digest or control or knobs.full_test:
        return compiled(kernel, static, config, arch)
    return found


def main() -> None:
    """Compile what has changed and write the record."""
    from tests import test_lowering

    wanted = [(launch, 'sm_90a') for launch in test_lowering.one_per_kernel(test_lowering.BENCH)]
    wanted += [tuple(param.values) for param in test_lowering.other_architectures()]

    def entry(item: tuple) -> tuple[str, dict]:
        launch, arch = item
        name, digest = _key(launch.kernel, launch.static, launch.config, arch)
        old = _recorded.get(name)
        return name, old if old and old['digest'] == digest else compiled(
            launch.kernel, launch.static, launch.config, arch
        )

    with ThreadPoolExecutor(2) as pool:
        found = dict(pool.map(entry, wanted))
    lines = [f'{json.dumps(name)}: {json.dumps(found[name])}' for name in sorted(found)]
    RECORD.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
    print(f'{len(found)} kernels, {sum(_recorded.get(name) != value for name, value in found.items())} compiled')


if __name__ == '__main__':
    main()
