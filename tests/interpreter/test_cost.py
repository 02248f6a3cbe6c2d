"""What `checks='all'` costs beside `checks='none'`: CPU time of kernels of this package and of three that gather.

`python -m tests.interpreter.test_cost` prints the table.
"""

import contextlib
import statistics
import sys
import time
from unittest import mock

import pytest
import tilelang.language as T
import torch

from tile_kernels import interpreter
from tile_kernels.interpreter import UnwrittenOutput, interpret

OPS = (
    'quant.per_token_cast',
    'quant.per_block_cast',
    'activation.swiglu_forward_and_per_token_cast',
    'norm.norm_forward',
    'quant.dequantize',
    'moe.expand_to_fused',
    'moe.reduce_rows',
    'moe.topk_gate',
    'moe.fused_mapping',
    'transpose.batched_transpose',
    'transform.rotary_embedding',
    'gemm.gemm',
    'gemm.grouped_gemm',
    'engram.hash',
    'engram.short_conv',
    'mhc.sinkhorn',
)

#: Noise on a busy machine must not fail a test; the bars are 2 (median) and 8 (worst).
MOST_MEDIAN, MOST_WORST = 4.0, 20.0


@T.prim_func
def gather(x: T.Tensor((256, 256), 'float32'), index: T.Tensor((512,), 'int32'), y: T.Tensor((512, 256), 'float32')):
    with T.Kernel(512, threads=64) as pid:
        for j in T.Parallel(256):
            y[pid, j] = x[index[pid], j]


@T.prim_func
def scatter(x: T.Tensor((512, 256), 'float32'), index: T.Tensor((512,), 'int32'), y: T.Tensor((512, 256), 'float32')):
    with T.Kernel(64, threads=64) as pid:
        for i, j in T.Parallel(8, 256):
            y[index[pid * 8 + i], j] = x[pid * 8 + i, j]


@T.prim_func
def normalize(x: T.Tensor((256, 512), 'float32'), y: T.Tensor((256, 512), 'float32')):
    with T.Kernel(256, threads=128) as pid:
        row = T.alloc_shared((512,), 'float32')
        square, total = T.alloc_fragment((512,), 'float32'), T.alloc_fragment((1,), 'float32')
        T.copy(x[pid, 0:512], row)
        for j in T.Parallel(512):
            square[j] = row[j] * row[j]
        T.reduce_sum(square, total, dim=0)
        for j in T.Parallel(512):
            y[pid, j] = row[j] * T.rsqrt(total[0] / 512 + 1e-6)


def own_kernels():
    """Name, kernel, arguments and pass configs of three kernels that gather, scatter and normalize."""
    order = torch.randperm(512, dtype=torch.int32)
    yield 'gather', gather, (torch.randn(256, 256), order % 256, torch.empty(512, 256)), {}
    yield 'scatter', scatter, (torch.randn(512, 256), order, torch.empty(512, 256)), {}
    yield 'normalize', normalize, (torch.randn(256, 512), torch.empty(256, 512)), {}


def launches_of(name):
    """The same for every kernel that an op launches in its last smoke case."""
    from tile_kernels.core.knobs import knobs
    from tile_kernels.core.registry import load_ops

    op, found = load_ops()[name], []

    def note(kernel, *tensors, checks, pass_configs):
        copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in tensors]
        found.append((f'{name}: {kernel.attrs["global_symbol"]}', kernel, tuple(copies), pass_configs))
        return interpret(kernel, *tensors, checks='none', pass_configs=pass_configs)

    with mock.patch.object(interpreter, 'interpret', note), knobs(interpret=True):
        op.call(**op.case_set.arguments(op.name, op.case_set.smoke[-1]))
    return found


def seconds(kernel, tensors, switches, checks, rounds=3):
    """CPU time of one run, the best of some; the first one translates the kernel."""
    best = float('inf')
    for number in range(1 + rounds):
        copies = [one.clone() if isinstance(one, torch.Tensor) else one for one in tensors]
        started = time.process_time()
        with contextlib.suppress(UnwrittenOutput):  # known at the very end
            interpret(kernel, *copies, checks=checks, pass_configs=switches)
        best = min(best, time.process_time() - started) if number else best
    return best


def ratio(launch):
    """How many times longer the checks make a kernel, and how long it takes without."""
    _, kernel, tensors, switches = launch
    plain = seconds(kernel, tensors, switches, 'none')
    return seconds(kernel, tensors, switches, 'all') / plain, plain


def test_checks_cost_little():
    torch.manual_seed(0)
    launches = [*own_kernels(), *launches_of('norm.norm_forward'), *launches_of('transpose.batched_transpose')]
    ratios = [ratio(launch)[0] for launch in launches]
    assert statistics.median(ratios) <= MOST_MEDIAN
    assert max(ratios) <= MOST_WORST


@pytest.mark.parametrize('name', OPS)
def test_ops_of_the_table_exist(name):
    from tile_kernels.core.registry import load_ops

    assert load_ops()[name].case_set.smoke


def main():
    """Print the table."""
    torch.manual_seed(0)
    ratios = []
    for launch in [*own_kernels(), *(launch for name in OPS for launch in launches_of(name))]:
        found, plain = ratio(launch)
        ratios.append(found)
        sys.stdout.write(f'{found:6.2f}  {plain * 1e3:8.1f} ms  {launch[0]}\n')
        sys.stdout.flush()
    sys.stdout.write(f'median {statistics.median(ratios):.2f}, worst {max(ratios):.2f}, of {len(ratios)} kernels\n')


if __name__ == '__main__':
    main()
