"""What the recorded sweeps of the toolbox time: user kernels with spaces that include bad configs, and an op.

Where the first extent is dynamic, problems that differ only in it share compiled kernels.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tile_kernels.core.gpus import GPUS
from tile_kernels.core.jit import Config
from tile_kernels.core.lang import T
from tile_kernels.core.registry import find_op, typical_case
from tile_kernels.sight import calibrate
from tile_kernels.tuning.space import KernelProblem, OpProblem, Problem, Target

#: log2(e), because the hardware has the exponential to the base 2.
LOG2E = 1.4426950408889634


def matmul(N, K, block_M=64, block_N=64, block_K=64, num_stages=3, threads=128, dtype='float16'):
    """A product with ReLU."""
    M = T.dynamic('M')

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


def transpose(N, block_M=64, block_N=64, threads=128, pad=0):
    """A transposition through shared memory; `pad` avoids bank conflicts."""
    M = T.dynamic('M')

    @T.prim_func
    def transposed(x: T.Tensor((M, N), 'float16'), y: T.Tensor((N, M), 'float16')):
        with T.Kernel(N // block_N, M // block_M, threads=threads) as (bx, by):
            tile = T.alloc_shared((block_M, block_N + pad), 'float16')
            for i, j in T.Parallel(block_M, block_N):
                tile[i, j] = x[by * block_M + i, bx * block_N + j]
            for j, i in T.Parallel(block_N, block_M):
                y[bx * block_N + j, by * block_M + i] = tile[i, j]

    return transposed


def softmax(N, rows=1, threads=128):
    """Softmax of rows in registers."""
    M = T.dynamic('M')

    @T.prim_func
    def softmax_rows(x: T.Tensor((M, N), 'float16'), y: T.Tensor((M, N), 'float16')):
        with T.Kernel(T.ceildiv(M, rows), threads=threads) as block:
            tile = T.alloc_fragment((rows, N), 'float32')
            most, total = T.alloc_fragment((rows,), 'float32'), T.alloc_fragment((rows,), 'float32')
            T.copy(x[block * rows, 0], tile)
            T.reduce_max(tile, most, dim=1)
            for i, j in T.Parallel(rows, N):
                tile[i, j] = T.exp2((tile[i, j] - most[i]) * LOG2E)
            T.reduce_sum(tile, total, dim=1)
            for i, j in T.Parallel(rows, N):
                tile[i, j] = tile[i, j] / total[i]
            T.copy(tile, y[block * rows, 0])

    return softmax_rows


def norm_backward(N, rows=1, threads=128):
    """The gradient of an RMS norm for its input."""
    M = T.dynamic('M')

    @T.prim_func
    def norm_rows(
        x: T.Tensor((M, N), 'float16'),
        dy: T.Tensor((M, N), 'float16'),
        weight: T.Tensor((N,), 'float32'),
        dx: T.Tensor((M, N), 'float16'),
    ):
        with T.Kernel(T.ceildiv(M, rows), threads=threads) as block:
            tile, grad = T.alloc_fragment((rows, N), 'float32'), T.alloc_fragment((rows, N), 'float32')
            part = T.alloc_fragment((rows, N), 'float32')
            square, dot = T.alloc_fragment((rows,), 'float32'), T.alloc_fragment((rows,), 'float32')
            T.copy(x[block * rows, 0], tile)
            T.copy(dy[block * rows, 0], grad)
            for i, j in T.Parallel(rows, N):
                part[i, j] = tile[i, j] * tile[i, j]
            T.reduce_sum(part, square, dim=1)
            for i, j in T.Parallel(rows, N):
                grad[i, j] *= weight[j]
                part[i, j] = tile[i, j] * grad[i, j]
            T.reduce_sum(part, dot, dim=1)
            for i in T.Parallel(rows):
                square[i] = T.rsqrt(square[i] / N + 1e-6)
            for i, j in T.Parallel(rows, N):
                grad[i, j] = square[i] * (grad[i, j] - tile[i, j] * square[i] * square[i] * dot[i] / N)
            T.copy(grad, dx[block * rows, 0])

    return norm_rows


def top_k(E, k=8, rows=1, threads=128):
    """The largest values of each row, in falling order; the values of a row differ."""
    M = T.dynamic('M')

    @T.prim_func
    def top_rows(x: T.Tensor((M, E), 'float32'), y: T.Tensor((M, k), 'float32')):
        with T.Kernel(T.ceildiv(M, rows), threads=threads) as block:
            tile, most = T.alloc_fragment((rows, E), 'float32'), T.alloc_fragment((rows,), 'float32')
            T.copy(x[block * rows, 0], tile)
            for turn in T.serial(k):
                T.reduce_max(tile, most, dim=1)
                for i, j in T.Parallel(rows, E):
                    tile[i, j] = T.if_then_else(tile[i, j] == most[i], -T.infinity('float32'), tile[i, j])
                for i in T.Parallel(rows):
                    y[block * rows + i, turn] = most[i]

    return top_rows


def attention(S, dim=64, block_M=64, block_N=64, num_stages=1, threads=128):
    """Attention with online softmax."""
    heads = T.dynamic('heads')
    scale = LOG2E / dim**0.5

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
            scores = T.alloc_fragment((block_M, block_N), 'float32')
            weights = T.alloc_fragment((block_M, block_N), 'float16')
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


def strided(size, stride=8, threads=256):
    """Loads of every eighth float."""

    @T.prim_func
    def strided_loads(x: T.Tensor((size * stride,), 'float32'), y: T.Tensor((size,), 'float32')):
        with T.Kernel(size // threads, threads=threads) as block:
            tx = T.get_thread_binding()
            y[block * threads + tx] = x[(block * threads + tx) * stride]

    return strided_loads


def _norm_gradient(x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    rows = x.float().requires_grad_()
    with torch.enable_grad():
        y = torch.nn.functional.rms_norm(rows, rows.shape[1:], weight, 1e-6)
    return torch.autograd.grad(y, rows, dy.float())[0]


def _permuted(M: int, E: int, **_: int) -> list[torch.Tensor]:
    """Rows whose values differ, so that the largest are known."""
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(M, E, generator=generator).argsort(1).float()]


@dataclass(frozen=True)
class Swept:
    """A kernel with the problems and the space of its sweeps.

    Attributes:
        builder: the builder of a user's kernel, or the name of an op.
        problems: arguments of the builder and dynamic extents, or cases of the op.
        space: the values of each config entry; an op has its own.
        reference: the same in plain PyTorch.
        inputs: makes the inputs of a problem, if normal numbers do not serve.
        where: the configs to try.
    """

    builder: Callable[..., Any] | str
    problems: Sequence[dict[str, Any]]
    space: Mapping[str, Sequence[Any]] | None = None
    reference: Callable[..., Any] | None = None
    inputs: Callable[..., Any] | None = None
    where: Callable[[dict[str, Any], Config], bool] = lambda problem, config: True


def _in_registers(problem: dict[str, Any], config: Config) -> bool:
    """Whether a thread has at most 256 elements of its rows; more compile for a minute."""
    width = problem.get('N') or problem['E']
    return width * config['rows'] <= 256 * config['threads']


_PRODUCTS = [dict(M=4096, N=4096, K=4096), dict(M=256, N=4096, K=4096), dict(M=8192, N=2048, K=7168)]
_TILES = dict(block_M=(64, 128, 256), block_N=(64, 128, 256), num_stages=(1, 2, 4), threads=(128, 256))
_ROWS = dict(rows=(1, 2, 4, 8, 16, 32), threads=(32, 64, 128, 256, 512, 1024))
KERNELS = {
    'matmul_relu': Swept(matmul, _PRODUCTS, _TILES, lambda a, b: (a @ b.T).relu()),
    'matmul_fp8': Swept(
        matmul,
        [problem | dict(dtype='float8_e4m3fn') for problem in _PRODUCTS],
        _TILES | dict(block_K=(64, 128)),
        lambda a, b: (a.float() @ b.float().T).relu(),
    ),
    'transpose': Swept(
        transpose,
        [dict(M=n, N=8192) for n in (8192, 16384, 512)],
        dict(block_M=(32, 64, 128), block_N=(32, 64, 128), threads=(128, 256), pad=(0, 8)),
        lambda x: x.T,
    ),
    'softmax': Swept(
        softmax,
        [dict(M=32768, N=1024), dict(M=8192, N=4096), dict(M=512, N=4096)],
        _ROWS,
        lambda x: x.float().softmax(1),
        where=_in_registers,
    ),
    'attention': Swept(
        attention,
        [dict(S=4096, heads=32), dict(S=1024, heads=64), dict(S=4096, heads=4)],
        dict(block_M=(32, 64, 128, 256), block_N=(32, 64, 128), num_stages=(1, 2, 3), threads=(128, 256)),
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None])[0],
    ),
    'per_token_cast': Swept(
        'quant.per_token_cast', [dict(num_tokens=n, hidden=7168) for n in (4096, 16384, 256)]
    ),
    'norm_backward': Swept(
        norm_backward,
        [dict(M=16384, N=2048), dict(M=8192, N=4096), dict(M=512, N=4096)],
        _ROWS,
        _norm_gradient,
        where=_in_registers,
    ),
    'top_k': Swept(
        top_k,
        [dict(M=32768, E=256), dict(M=4096, E=64), dict(M=1024, E=256)],
        _ROWS,
        lambda x: x.topk(8, 1).values,
        _permuted,
        _in_registers,
    ),
}  # fmt: skip


@functools.cache
def problem_of(name: str, place: int) -> Problem:
    """A problem of a sweep, to be solved on an H200."""
    swept, target = KERNELS[name], Target(GPUS['h200'], 'h200', 'cuda')
    problem = swept.problems[place]
    if isinstance(swept.builder, str):
        op = find_op(swept.builder)
        return OpProblem.all_of(op, typical_case(op, problem), target)[0]
    return KernelProblem(
        swept.builder,
        (),
        problem,
        swept.space or {},
        target,
        functools.partial(swept.where, problem),
        swept.reference,
        functools.partial(swept.inputs, **problem) if swept.inputs is not None else None,
        dict(rtol=2e-2, rms=2e-2),
    )


def drawn(name: str, place: int, number: int) -> list[Config]:
    """So many configs of a problem, at random but repeatably; a longer draw begins with a shorter one."""
    first, *others = problem_of(name, place).configs
    random.Random(0).shuffle(others)
    return [first, *others][:number]


#: Kernels whose counts ncu confirms, with their arguments and dynamic extents.
COUNTED: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    'copy': (calibrate.copied, dict(size=1 << 27)),
    'strided loads': (strided, dict(size=1 << 25)),
    'reads from L2': (calibrate.repeated, dict(blocks=528)),
    'shared memory, 2-way': (calibrate.banked, dict(blocks=528, ways=2)),
    'shared memory, 8-way': (calibrate.banked, dict(blocks=528, ways=8)),
    'transposition': (transpose, dict(M=16384, N=16384)),
    'transposition, padded': (transpose, dict(M=16384, N=16384, pad=8)),
    'softmax': (softmax, dict(M=65536, N=4096, threads=256)),
    'softmax, 4 rows': (softmax, dict(M=65536, N=4096, rows=4, threads=256)),
    'product': (matmul, dict(M=16384, N=4096, K=4096, block_M=128, block_N=128)),
    'product of fp8': (matmul, dict(M=16384, N=4096, K=4096, block_K=128, dtype='float8_e4m3fn')),
    'attention': (attention, dict(S=4096, heads=64)),
}
