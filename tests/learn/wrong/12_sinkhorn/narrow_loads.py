"""step: lean
words: reads 4 bytes of x at a time

Each number is loaded by itself.
"""

import tilelang.language as T


def sinkhorn(n: int, rounds: int = 20, eps: float = 1e-6):
    num_matrices = T.dynamic('num_matrices')
    per_block = 128 // n
    levels = n.bit_length() - 1
    vector = min(n, 4)

    @T.prim_func
    def kernel(x: T.Tensor((num_matrices, n, n), 'float32'), p: T.Tensor((num_matrices, n, n), 'float32')):
        with T.Kernel(T.ceildiv(num_matrices, per_block), threads=128) as block:
            thread = T.get_thread_binding()
            matrix = block * per_block + thread // n
            row = thread % n
            part = T.alloc_local((n,), 'float32')
            total = T.alloc_var('float32')
            for j in T.unroll(n):
                part[j] = 0.0
            if matrix < num_matrices:
                for v in T.unroll(n // vector):
                    for j in T.unroll(vector):
                        part[v * vector + j] = x[matrix, row, v * vector + j]
            total = part[0]
            for j in T.unroll(1, n):
                total = T.max(total, part[j])
            for level in T.unroll(levels):
                total = T.max(total, T.shfl_xor(total, 1 << level))
            for j in T.unroll(n):
                part[j] = T.exp(part[j] - total)
            for _ in T.serial(rounds):
                total = eps
                for j in T.unroll(n):
                    total += part[j]
                total = 1.0 / total
                for j in T.unroll(n):
                    part[j] *= total
                for j in T.unroll(n):
                    total = part[j]
                    for level in T.unroll(levels):
                        total += T.shfl_xor(total, 1 << level)
                    part[j] *= 1.0 / (total + eps)
            if matrix < num_matrices:
                for v in T.unroll(n // vector):
                    for j in T.vectorized(vector):
                        p[matrix, row, v * vector + j] = part[v * vector + j]

    return kernel
