"""Hashes of the CUDA source of every kernel variant that the cases of the ops launch; needs no GPU.

    python tools/kernel_hashes.py --out before.json      at one commit
    python tools/kernel_hashes.py --against before.json  at another: lists changed, new and removed variants

Equal hashes mean that a change of host code, names or files did not change the kernels: same bits, same speed.

TileLang's lowering is not deterministic: it may swap the names of two shared buffers. A variant that differs is lowered
again, up to `--tries` times. It counts as unchanged only if the exact hash of the earlier commit appears.
"""

import argparse
import hashlib
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path

import tile_kernels  # noqa: F401
from tile_kernels.core.errors import UnsupportedError
from tile_kernels.core.gpus import GPUS, gpu_named
from tile_kernels.core.jit import kernels
from tile_kernels.core.launch import on_gpu
from tile_kernels.core.op import ops


def variants(arch: str, sets: tuple[str, ...]) -> dict[str, tuple]:
    """Every (kernel, static arguments, config) of the cases, under a text that is the same in all commits.

    Includes the variants that a GPU of the architecture uses, and those of other known GPUs that it can run.
    """
    target, found = gpu_named(arch), {}
    for op in ops.values():
        for name in sets:
            for case in getattr(op.case_set, name) if op.case_set else ():
                for gpu in (target, *GPUS.values()):
                    with on_gpu(gpu), suppress(UnsupportedError):
                        for launch in op.trace_case(case):
                            config = sorted(launch.config.items())
                            words = f'{arch} {launch.kernel.name}{[str(s) for s in launch.static]}{config}'
                            if launch.kernel.claims(launch.static, target):
                                found[words] = (arch, launch.kernel.name, launch.static, launch.config)
    return found


def digest(item: tuple[str, tuple]) -> tuple[str, str]:
    """The text of a variant and the hash of its CUDA source, or the reason why there is none."""
    words, (arch, name, static, config) = item
    try:
        source = kernels[name].source(static, arch=arch, **config)
    except Exception as error:
        return words, f'{type(error).__name__}: {error}'
    return words, hashlib.sha256(source.encode()).hexdigest()[:16]


def find_again(item: tuple[str, tuple], wanted: str, tries: int) -> bool:
    """Whether lowering a variant again gives the wanted hash within some tries."""
    kernel = kernels[item[1][1]]
    for _ in range(tries):
        kernel._tir_cache.clear()
        if digest(item)[1] == wanted:
            return True
    return False


def main() -> int:
    """Write or compare; returns 1 if a kernel of both commits differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--out', type=Path, help='write the hashes here')
    parser.add_argument('--against', type=Path, help='compare with hashes written earlier')
    parser.add_argument('--arch', default='sm_90a')
    parser.add_argument('--sets', default='smoke,bench', help='case sets, separated by commas')
    parser.add_argument('--jobs', type=int, default=1)
    parser.add_argument('--tries', type=int, default=40, help='lowerings of a variant that differs, at most')
    parser.add_argument('--only', default='', help='only kernels whose name contains this')
    options = parser.parse_args()
    items = {
        words: item
        for words, item in variants(options.arch, tuple(options.sets.split(','))).items()
        if options.only in item[1]
    }
    with ProcessPoolExecutor(options.jobs) as pool:
        hashes = dict(pool.map(digest, items.items(), chunksize=8))
    if options.out:
        options.out.write_text(json.dumps(hashes, indent=0, sort_keys=True))
    print(f'{len(hashes)} variants')
    if not options.against:
        return 0
    before = json.loads(options.against.read_text())
    before = {words: value for words, value in before.items() if options.only in words}
    differing = sorted(words for words in hashes.keys() & before.keys() if hashes[words] != before[words])
    changed = [words for words in differing if not find_again((words, items[words]), before[words], options.tries)]
    equal = len(hashes.keys() & before.keys()) - len(changed)
    print(f'equal: {equal}, {len(differing) - len(changed)} of them when lowered again')
    for title, group in (
        ('changed', changed),
        ('new', sorted(hashes.keys() - before.keys())),
        ('gone', sorted(before.keys() - hashes.keys())),
    ):
        print(f'{title}: {len(group)}')
        for words in group[:40]:
            print(f'  {words}')
    return 1 if changed else 0


if __name__ == '__main__':
    sys.exit(main())
