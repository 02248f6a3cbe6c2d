"""The introductory matmul with ReLU, as a builder."""

import tilelang.language as T


def matmul(M=256, N=256, K=256, block_M=64, block_N=64, block_K=64, threads=128):
    @T.prim_func
    def relu(A: T.Tensor((M, K), 'float16'), B: T.Tensor((K, N), 'float16'), C: T.Tensor((M, N), 'float16')):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=threads) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), 'float16')
            B_shared = T.alloc_shared((block_K, block_N), 'float16')
            C_local = T.alloc_fragment((block_M, block_N), 'float32')
            T.clear(C_local)
            for k in T.Pipelined(T.ceildiv(K, block_K), num_stages=3):
                T.copy(A[by * block_M, k * block_K], A_shared)
                T.copy(B[k * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            for i, j in T.Parallel(block_M, block_N):
                C_local[i, j] = T.max(C_local[i, j], 0)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return relu
