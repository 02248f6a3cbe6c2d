"""Run ops on their cases on the GPU, from poisoned memory, and compare each with its twin.

    python tools/run_cases.py [--level smoke|full] [--shard 3/16] [--seconds 60] [OP ...]
    compute-sanitizer --tool memcheck python tools/run_cases.py --shard 0/8

One process without a test runner is small enough for compute-sanitizer, and several shards can use one GPU. The exit
status is 1 if a case disagrees or was not run; every such case is named. With `TK_DISABLE_JIT=1` only precompiled
kernels run.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import tile_kernels
from tile_kernels.core.op import ops
from tile_kernels.core.registry import cases_of
from tile_kernels.testing import contract


def main() -> int:
    """Check the kernels of the named ops, or of all ops."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('ops', nargs='*', help='names of ops (default: all)')
    parser.add_argument('--level', choices=('smoke', 'full'), default='smoke', help='full includes smoke')
    parser.add_argument('--shard', default='0/1', help='I/N: every N-th case, starting with the I-th')
    parser.add_argument('--seconds', type=float, default=float('inf'), help='stop after this time, and say so')
    arguments = parser.parse_args()
    for family in tile_kernels.FAMILIES:
        getattr(tile_kernels, family)

    shard, shards = map(int, arguments.shard.split('/'))
    wanted = arguments.ops or list(ops)
    cases = [case for case in contract.contract_cases(arguments.level, variants=True) if case.op.name in wanted]
    cases = cases[shard::shards]
    start, run, wrong, absent = time.perf_counter(), 0, 0, 0
    for case in cases:
        if time.perf_counter() - start > arguments.seconds:
            break
        run += 1
        try:
            with case.choosing():
                contract.check_kernel(case.op, case.case, 'cuda')
        except (AssertionError, RuntimeError, tile_kernels.TileKernelsError) as error:
            missing = isinstance(error, tile_kernels.CompileError) and tile_kernels.knobs.disable_jit
            absent += missing
            wrong += not missing
            print(f'{"ABSENT" if missing else "WRONG"} {case}: {" ".join(str(error).split())[:400]}', flush=True)
        if case.case not in cases_of(case.op).smoke:  # large cases would starve the other shards
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    print(
        f'shard {arguments.shard}: {run} of {len(cases)} {arguments.level} cases run, {wrong} disagree with their twin'
    )
    return int(wrong > 0 or run < len(cases))


if __name__ == '__main__':
    sys.exit(main())
