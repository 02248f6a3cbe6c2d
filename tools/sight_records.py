"""Record on a GPU what `python -m tile_kernels.sight.validate` compares with: sweeps of configs, and counters of ncu.

    python tools/sight_records.py            # V2 and V3, about an hour on one GPU
    python tools/sight_records.py sweeps
    python tools/sight_records.py ncu
    python tools/sight_records.py works      # what each recorded case asks of a GPU; needs none, hours on two cores

Results go to `benchmarks/results/sight`. A second run replaces the sweeps that it finishes and keeps the others.
"""

import argparse
import csv
import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import tilelang.language as T
import torch

from tile_kernels.cli.bench import circumstances
from tile_kernels.core.errors import TileKernelsError
from tile_kernels.core.gpus import GPUS, Gpu
from tile_kernels.sight import exact
from tile_kernels.sight.count import count
from tile_kernels.sight.limits import resources
from tile_kernels.sight.lower import lower
from tile_kernels.sight.subject import resolve
from tile_kernels.sight.validate import COUNTERS, SWEEPS, WORKS, latest, sample, timed, with_works
from tile_kernels.tuning import tune

#: What ncu reports, by the name that it is compared with.
METRICS = {
    'dram_bytes': 'dram__bytes.sum',
    'l2_sectors': 'lts__t_sectors_op_read.sum,lts__t_sectors_op_write.sum',
    'shared_wavefronts': 'l1tex__data_pipe_lsu_wavefronts_mem_shared.sum',
    'registers': 'launch__registers_per_thread',
    'warps': 'sm__warps_active.avg.per_cycle_active',
}


def matmul(M, N, K, block_M=64, block_N=64, block_K=64, num_stages=3, threads=128, dtype='float16'):
    """A product with ReLU."""

    @T.prim_func
    def relu(A: T.Tensor((M, K), dtype), B: T.Tensor((N, K), dtype), C: T.Tensor((M, N), 'float16')):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            a, b = T.alloc_shared((block_M, block_K), dtype), T.alloc_shared((block_N, block_K), dtype)
            total = T.alloc_fragment((block_M, block_N), 'float32')
            T.clear(total)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=num_stages):
                T.copy(A[by * block_M, k * block_K], a)
                T.copy(B[bx * block_N, k * block_K], b)
                T.gemm(a, b, total, transpose_B=True)
            for i, j in T.Parallel(block_M, block_N):
                total[i, j] = T.max(total[i, j], 0)
            T.copy(total, C[by * block_M, bx * block_N])

    return relu


def transpose(M, N, block_M=64, block_N=64, threads=128, pad=0):
    """A transposition through shared memory; `pad` avoids bank conflicts."""

    @T.prim_func
    def transposed(x: T.Tensor((M, N), 'float16'), y: T.Tensor((N, M), 'float16')):
        with T.Kernel(N // block_N, M // block_M, threads=threads) as (bx, by):
            tile = T.alloc_shared((block_M, block_N + pad), 'float16')
            for i, j in T.Parallel(block_M, block_N):
                tile[i, j] = x[by * block_M + i, bx * block_N + j]
            for j, i in T.Parallel(block_N, block_M):
                y[bx * block_N + j, by * block_M + i] = tile[i, j]

    return transposed


def softmax(M, N, rows=1, threads=128):
    """Softmax of rows in registers."""

    @T.prim_func
    def softmax_rows(x: T.Tensor((M, N), 'float16'), y: T.Tensor((M, N), 'float16')):
        with T.Kernel(M // rows, threads=threads) as block:
            tile = T.alloc_fragment((rows, N), 'float32')
            most, total = T.alloc_fragment((rows,), 'float32'), T.alloc_fragment((rows,), 'float32')
            T.copy(x[block * rows, 0], tile)
            T.reduce_max(tile, most, dim=1)
            for i, j in T.Parallel(rows, N):
                tile[i, j] = T.exp2((tile[i, j] - most[i]) * 1.4426950408889634)
            T.reduce_sum(tile, total, dim=1)
            for i, j in T.Parallel(rows, N):
                tile[i, j] = tile[i, j] / total[i]
            T.copy(tile, y[block * rows, 0])

    return softmax_rows


def attention(S, heads, dim=64, block_M=64, block_N=64, num_stages=1, threads=128):
    """Attention with online softmax."""
    scale = 1.4426950408889634 / dim**0.5

    @T.prim_func
    def attend(
        q: T.Tensor((heads, S, dim), 'float16'),
        k: T.Tensor((heads, S, dim), 'float16'),
        v: T.Tensor((heads, S, dim), 'float16'),
        o: T.Tensor((heads, S, dim), 'float16'),
    ):
        with T.Kernel(S // block_M, heads, threads=threads) as (bx, head):
            q_shared, k_shared = T.alloc_shared((block_M, dim), 'float16'), T.alloc_shared((block_N, dim), 'float16')
            v_shared = T.alloc_shared((block_N, dim), 'float16')
            scores, weights = (
                T.alloc_fragment((block_M, block_N), 'float32'),
                T.alloc_fragment((block_M, block_N), 'float16'),
            )
            out = T.alloc_fragment((block_M, dim), 'float32')
            most, before = T.alloc_fragment((block_M,), 'float32'), T.alloc_fragment((block_M,), 'float32')
            part, total = T.alloc_fragment((block_M,), 'float32'), T.alloc_fragment((block_M,), 'float32')
            T.copy(q[head, bx * block_M, 0], q_shared)
            T.clear(out)
            T.clear(total)
            T.fill(most, -T.infinity('float32'))
            for step in T.Pipelined(S // block_N, num_stages=num_stages):
                T.copy(k[head, step * block_N, 0], k_shared)
                T.clear(scores)
                T.gemm(q_shared, k_shared, scores, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                T.copy(most, before)
                T.reduce_max(scores, most, dim=1, clear=False)
                for i, j in T.Parallel(block_M, block_N):
                    scores[i, j] = T.exp2((scores[i, j] - most[i]) * scale)
                T.reduce_sum(scores, part, dim=1)
                for i in T.Parallel(block_M):
                    total[i] = total[i] * T.exp2((before[i] - most[i]) * scale) + part[i]
                for i, j in T.Parallel(block_M, dim):
                    out[i, j] *= T.exp2((before[i] - most[i]) * scale)
                T.copy(scores, weights)
                T.copy(v[head, step * block_N, 0], v_shared)
                T.gemm(weights, v_shared, out, policy=T.GemmWarpPolicy.FullRow)
            for i, j in T.Parallel(block_M, dim):
                out[i, j] = out[i, j] / total[i]
            T.copy(out, o[head, bx * block_M, 0])

    return attend


PRODUCTS = ((4096, 4096, 4096), (8192, 2048, 7168), (512, 8192, 1024))
#: Kernels of a user: builder, spaces with bad configs, three problems, and the same in plain PyTorch.
TILES = dict(block_M=(64, 128, 256), block_N=(64, 128, 256), num_stages=(1, 2, 4), threads=(128, 256))
KERNELS: dict[str, tuple[Any, dict, list[dict], Any]] = {
    'matmul_relu': (
        matmul,
        TILES,
        [dict(M=m, N=n, K=k) for m, n, k in PRODUCTS],
        lambda a, b: (a @ b.T).relu(),
    ),
    'matmul_fp8': (
        matmul,
        TILES | dict(block_K=(64, 128)),
        [dict(M=m, N=n, K=k, dtype='float8_e4m3fn') for m, n, k in PRODUCTS],
        lambda a, b: (a.float() @ b.float().T).relu(),
    ),
    'transpose': (
        transpose,
        dict(block_M=(32, 64, 128), block_N=(32, 64, 128), threads=(128, 256), pad=(0, 8)),
        [dict(M=m, N=n) for m, n in ((8192, 8192), (2048, 16384), (1024, 1024))],
        lambda x: x.T,
    ),
    'softmax': (
        softmax,
        dict(rows=(1, 2, 4, 8), threads=(32, 64, 128, 256, 512, 1024)),
        [dict(M=m, N=n) for m, n in ((32768, 1024), (8192, 4096), (512, 8192))],
        lambda x: x.float().softmax(1),
    ),
    'attention': (
        attention,
        dict(block_M=(32, 64, 128, 256), block_N=(32, 64, 128), num_stages=(1, 2, 3), threads=(128, 256)),
        [dict(S=s, heads=h) for s, h in ((4096, 32), (1024, 64), (8192, 8))],
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0],
    ),
}  # fmt: skip
#: Ops with spaces of at least 24 configs, beside user kernels; each on its first three benchmark cases.
OPS = ('norm.norm_backward', 'activation.swiglu_forward', 'linear_attention.causal_conv1d')


def sweeps(budget: float, dry_run: bool = False) -> Iterator[list[dict[str, Any]]]:
    """The trials of each sweep as records; every config is timed."""
    common: dict[str, Any] = dict(every=True, budget=budget, store='none', allow_numeric=True, dry_run=dry_run)
    for name, (builder, space, problems, reference) in KERNELS.items():
        for problem in problems:
            words = ' '.join(f'{key}={value}' for key, value in problem.items())
            best = tune(
                builder,
                space=space,
                reference=reference,
                match=dict(rtol=2e-2, rms=2e-2),
                again=True,
                **common,
                **problem,
            )
            yield [record | {'op': name, 'case': words} for record in best.records()]
    from tile_kernels.core.registry import cases_of, find_op

    for name in OPS:
        for case in cases_of(find_op(name)).bench[:3]:
            for best in tune(name, cases=[case], trials=60, **common):
                yield best.records()


def record_sweeps(budget: float) -> None:
    """Time every sweep and write what succeeded."""
    about = circumstances('cuda')
    SWEEPS.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in SWEEPS.read_text().splitlines()] if SWEEPS.exists() else []
    for made in sweeps(budget):
        key = made[0]['op'], made[0].get('case')
        known = [r for r in known if (r['op'], r.get('case')) != key] + [record | about for record in made]
        SWEEPS.write_text(''.join(json.dumps(record) + '\n' for record in known))
        sys.stdout.write(f'{key[0]} {key[1]}: {len(made)} configs\n')


def predicted_counters() -> Iterator[tuple[exact.Exact, dict[str, float]]]:
    """Twelve kernels of `sight.exact` with what ncu must find."""
    wanted = [case for case in exact.cases() if case.device == 'h200' and 'atomics' not in case.name]
    for case in wanted[:: max(1, len(wanted) // 12)][:12]:
        (subject,) = resolve(case.builder, *case.args)
        (counted,) = count(subject, lower(subject))
        accesses = [a for a in counted.accesses if a.space == 'shared']
        found = {'dram_bytes': counted.distinct(), 'shared_wavefronts': sum(a.wavefronts for a in accesses)}
        found['l2_sectors'] = sum(a.sectors for a in counted.accesses if a.space == 'global')
        found['registers'] = resources(case.builder, *case.args)[subject.name]['registers']
        yield case, found


def launch(name: str) -> None:
    """Run one kernel of `sight.exact` once; ncu watches this process."""
    import tilelang

    case = next(case for case in exact.cases() if case.name == name)
    kernel = tilelang.compile(case.builder(*case.args), execution_backend='tvm_ffi')
    inputs = [torch.zeros(tuple(map(int, p.shape)), dtype=p.torch_dtype(), device='cuda') for p in kernel.params]
    kernel(*inputs)
    torch.cuda.synchronize()


def record_counters() -> None:
    """Run ncu on each kernel, and write counted beside measured numbers."""
    if shutil.which('ncu') is None:
        raise TileKernelsError('sight_records: ncu is not on the PATH; install Nsight Compute')
    rows = []
    for case, counted in predicted_counters():
        command = ['ncu', '--csv', '--metrics', ','.join(METRICS.values()), '--kernel-name', 'regex:kernel']
        command += [sys.executable, __file__, '--launch', case.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.stderr.write(f'{case.name}: ncu failed: {(done.stderr or done.stdout).strip()[-300:]}\n')
            continue
        rows.append({'kernel': case.name, 'counted': counted, 'measured': of_csv(done.stdout)})
    COUNTERS.parent.mkdir(parents=True, exist_ok=True)
    COUNTERS.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def record_works(gpu: Gpu = GPUS['h200'], seconds: int = 60) -> None:
    """Count recorded cases that the file lacks, in random order; one that takes longer than `seconds` is left out.

    Each case is written when it is counted, so a run may be stopped and goes on later.
    """
    about = {name: value for name, value in circumstances('cpu').items() if name in ('commit', 'date', 'tilelang')}
    known = {(t.op, t.case) for t in with_works(latest())}
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    WORKS.parent.mkdir(parents=True, exist_ok=True)
    for record in sample(latest(), 1 << 30):
        if (record['op'], record['case']) in known:
            continue
        signal.alarm(seconds)
        try:
            counted = timed(record, gpu)
        except KeyboardInterrupt:
            if signal.alarm(0):  # not the alarm, but the user
                raise
            continue
        signal.alarm(0)
        if counted.works:
            line = {'op': counted.op, 'case': counted.case, **about, 'works': [asdict(work) for work in counted.works]}
            with WORKS.open('a') as file:
                file.write(json.dumps(line) + '\n')


def of_csv(text: str) -> dict[str, float]:
    """The metrics in the CSV of ncu, by our names; parts of a metric add up."""
    lines = text[text.index('"ID"') :] if '"ID"' in text else ''
    values: dict[str, float] = {}
    for row in csv.DictReader(io.StringIO(lines)):
        number = float(row['Metric Value'].replace(',', ''))
        scale = {'Kbyte': 1e3, 'Mbyte': 1e6, 'Gbyte': 1e9}.get(row['Metric Unit'], 1)
        values[row['Metric Name']] = values.get(row['Metric Name'], 0) + scale * number
    return {name: sum(values.get(part, 0) for part in parts.split(',')) for name, parts in METRICS.items()}


def main() -> int:
    """Record on this machine's GPU; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
    parser.add_argument('what', nargs='*', help='sweeps, ncu or works (default: the first two)')
    parser.add_argument('--budget', type=float, default=600.0, help='seconds for each sweep (default 600)')
    parser.add_argument('--launch', help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.launch:
        launch(args.launch)
        return 0
    if 'works' in args.what:
        record_works()
        return 0
    if not torch.cuda.is_available():
        sys.stderr.write('sight_records: there is no GPU; sweeps and counters need one\n')
        return 1
    if 'sweeps' in (args.what or ['sweeps']):
        record_sweeps(args.budget)
    if 'ncu' in (args.what or ['ncu']):
        record_counters()
    return 0


if __name__ == '__main__':
    sys.exit(main())
