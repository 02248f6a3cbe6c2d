"""Kernels to tune in the interpreter, and clocks that read their times from the config."""

import tilelang
import tilelang.language as T

from tile_kernels.tuning.runs import Times

BLOCK = 32


def doubled(n, fault='none', threads=32, pad=0):
    """Twice the input, with planted mistakes."""

    @T.prim_func
    def doubling(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32')):
        with T.Kernel(T.ceildiv(n, BLOCK), threads=threads) as block:
            shift = T.alloc_local((1,), 'int32')
            shift[0] = T.ceildiv(n, BLOCK) - 1 - block if fault == 'off by one tile' else block
            for i in T.Parallel(BLOCK):
                value = x[block * BLOCK + i] * 2.0
                if fault == 'NaN':
                    y[block * BLOCK + i] = T.sqrt(-1.0 - value * value)
                elif fault == 'unwritten tail':
                    if block * BLOCK + i < n - 1:
                        y[block * BLOCK + i] = value
                elif fault == 'race':  # right if the blocks run one after the other
                    y[block * BLOCK + i] = value
                    if (block + 2) * BLOCK <= n:
                        y[(block + 1) * BLOCK + i] = 0.0
                else:
                    y[shift[0] * BLOCK + i] = value
            if fault == 'hang':
                while shift[0] >= 0:
                    shift[0] = block
            if pad:
                scratch = T.alloc_shared((pad,), 'float32')
                scratch[0] = x[0]

    return doubling


@tilelang.jit(out_idx=[-1])
def matmul(M, N, K, block_M=32, block_N=32, block_K=32, num_stages=2, threads=64):
    @T.prim_func
    def relu(A: T.Tensor((M, K), 'float16'), B: T.Tensor((K, N), 'float16'), C: T.Tensor((M, N), 'float16')):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), 'float16')
            B_shared = T.alloc_shared((block_K, block_N), 'float16')
            C_local = T.alloc_fragment((block_M, block_N), 'float32')
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=num_stages):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            for i, j in T.Parallel(block_M, block_N):
                C_local[i, j] = T.max(C_local[i, j], 0)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return relu


def times(us: float, spread: float = 0.0) -> Times:
    return Times(us, us - spread, us + spread, us / 2)


def by_threads(run, effort) -> Times:
    """More threads are faster."""
    return times(1000 / run.config['threads'])


def one(run, effort) -> Times:
    """Every config takes one microsecond."""
    return times(1.0)


def summed(n, parts=1):
    """The sum of the input, from sums of its parts: their number fixes the order."""

    @T.prim_func
    def summing(x: T.Tensor((n,), 'float32'), y: T.Tensor((1,), 'float32')):
        with T.Kernel(1, threads=1) as _:
            total = T.alloc_local((parts,), 'float32')
            for p in T.serial(parts):
                total[p] = 0.0
                for i in T.serial(n // parts):
                    total[p] = total[p] + x[p * (n // parts) + i]
            for p in T.serial(parts - 1):
                total[0] = total[0] + total[p + 1]
            y[0] = total[0]

    return summing


def by_parts(run, effort) -> Times:
    """More parts are faster."""
    return times(100 / run.config['parts'])


def added(threads=32):
    """`y += alpha * x` for any length."""
    n = T.dynamic('n')

    @T.prim_func
    def adding(x: T.Tensor((n,), 'float32'), y: T.Tensor((n,), 'float32'), alpha: T.float32):
        with T.Kernel(T.ceildiv(n, BLOCK), threads=threads) as block:
            for i in T.Parallel(BLOCK):
                if block * BLOCK + i < n:
                    y[block * BLOCK + i] = y[block * BLOCK + i] + alpha * x[block * BLOCK + i]

    return adding


@tilelang.jit
def exponential(A, block: int = 32):
    """In TileLang's eager style; the kernel allocates and returns its output."""
    n = T.const('n')
    A: T.Tensor((n,), 'float32')
    B = T.empty((n,), 'float32')
    with T.Kernel(T.ceildiv(n, block), threads=32) as pid:
        for i in T.Parallel(block):
            B[pid * block + i] = T.exp(A[pid * block + i])
    return B
