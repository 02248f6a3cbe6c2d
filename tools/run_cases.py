"""Run ops on their cases on the GPU, from poisoned memory, and compare each with its twin.

    python tools/run_cases.py [--level smoke|full] [--shard 3/16] [--seconds 60] [--isolate 30] [OP ...]
    compute-sanitizer --tool memcheck python tools/run_cases.py --shard 0/8

One process without a test runner is small enough for compute-sanitizer, and several shards can use one GPU. The exit
status is 1 if a case disagrees or was not run; every such case is named. With `TK_DISABLE_JIT=1` only precompiled
kernels run. With `--isolate`, a worker process runs the cases: a crash, or a hang of that many seconds, costs one case.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

import tile_kernels
from tile_kernels.core import workers
from tile_kernels.core.registry import cases_of, find_ops
from tile_kernels.testing import contract


def main() -> int:
    """Check the kernels of the named ops, or of all ops."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('ops', nargs='*', help='ops or families (default: all)')
    parser.add_argument('--level', choices=('smoke', 'full'), default='smoke', help='full includes smoke')
    parser.add_argument('--most', type=int, metavar='N', help='the last N cases of each op; the first are often empty')
    parser.add_argument('--shard', default='0/1', help='I/N: every N-th case, starting with the I-th')
    parser.add_argument('--seconds', type=float, default=float('inf'), help='stop after this time, and say so')
    parser.add_argument(
        '--isolate', type=float, metavar='S', help='use a worker process; each case takes at most S seconds'
    )
    arguments = parser.parse_args()
    shard, shards = map(int, arguments.shard.split('/'))
    cases: list[tuple[int, contract.ContractCase]] = []
    for op in find_ops(arguments.ops):
        found = list(enumerate(contract.contract_cases(arguments.level, variants=True, names=(op.name,))))
        cases += found[-arguments.most :] if arguments.most else found
    cases = cases[shard::shards]
    worker = workers.Child() if arguments.isolate else None
    start, run, wrong, absent = time.perf_counter(), 0, 0, 0
    for i, case in cases:
        if time.perf_counter() - start > arguments.seconds:
            break
        run += 1
        try:
            if worker is not None:
                worker.call(contract.check_case, arguments.level, case.op.name, i, 'cuda', limit=arguments.isolate)
                continue
            with case.choosing():
                contract.check_kernel(case.op, case.case, 'cuda')
        except (AssertionError, RuntimeError, tile_kernels.TileKernelsError, workers.Failed) as error:
            missing = isinstance(error, tile_kernels.CompileError) and tile_kernels.knobs.disable_jit
            absent += missing
            wrong += not missing
            print(f'{"ABSENT" if missing else "WRONG"} {case}: {" ".join(str(error).split())[:400]}', flush=True)
        if case.case not in cases_of(case.op).smoke:  # large cases would starve the other shards
            torch.cuda.empty_cache()
    if worker is not None:
        worker.close()
    else:
        torch.cuda.synchronize()
    print(
        f'shard {arguments.shard}: {run} of {len(cases)} {arguments.level} cases run, {wrong} disagree with their twin'
    )
    return int(wrong > 0 or run < len(cases))


if __name__ == '__main__':
    sys.exit(main())
