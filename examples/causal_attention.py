"""Causal attention in one pass over the keys (online softmax).

For every query row `i` of a head: `o[i] = sum_(j <= i) p[i, j] * v[j]` with `p[i] = softmax(scale * q[i] @ k.T)`.
Keys come in blocks. The running row maximum `m`, the sum `l` and the accumulator `o` refer to the same maximum; when a
block raises it from `m` to `m'`, the old sum and accumulator shrink by `exp2(m - m')`:

    l = l * exp2(m - m') + sum_j exp2(s[j] - m')          o = o * exp2(m - m') + exp2(s - m') @ v

Scores are kept in units of log2, so the scale carries the factor `log2(e)`. Every block of queries starts at key 0,
which each row may see, so the maximum is finite from the first block on.
"""

import math

import tilelang.language as T
import torch
from _run import Example, main


def causal_attention_kernel(
    batch: int, num_heads: int, seq: int, head_dim: int, block_m: int = 64, block_n: int = 64, num_stages: int = 2
):
    """Build the kernel for one problem size."""
    shape = (batch, num_heads, seq, head_dim)
    scale = math.log2(math.e) / math.sqrt(head_dim)

    @T.prim_func
    def causal_attention(
        q: T.Tensor(shape, 'bfloat16'),
        k: T.Tensor(shape, 'bfloat16'),
        v: T.Tensor(shape, 'bfloat16'),
        o: T.Tensor(shape, 'bfloat16'),
    ):
        with T.Kernel(T.ceildiv(seq, block_m), num_heads, batch, threads=128) as (pid_m, h, n):
            q_shared = T.alloc_shared((block_m, head_dim), 'bfloat16')
            k_shared = T.alloc_shared((block_n, head_dim), 'bfloat16')
            v_shared = T.alloc_shared((block_n, head_dim), 'bfloat16')
            s_frag = T.alloc_fragment((block_m, block_n), 'float32')
            p_frag = T.alloc_fragment((block_m, block_n), 'bfloat16')
            o_frag = T.alloc_fragment((block_m, head_dim), 'float32')
            max_frag = T.alloc_fragment((block_m,), 'float32')
            old_max_frag = T.alloc_fragment((block_m,), 'float32')
            shrink_frag = T.alloc_fragment((block_m,), 'float32')
            block_sum_frag = T.alloc_fragment((block_m,), 'float32')
            sum_frag = T.alloc_fragment((block_m,), 'float32')
            row = pid_m * block_m
            T.copy(q[n, h, row : row + block_m, 0:head_dim], q_shared)
            T.fill(max_frag, -T.infinity('float32'))
            T.clear(sum_frag)
            T.clear(o_frag)
            for step in T.Pipelined(T.ceildiv(T.min(row + block_m, seq), block_n), num_stages=num_stages):
                col = step * block_n
                T.copy(k[n, h, col : col + block_n, 0:head_dim], k_shared)
                T.copy(v[n, h, col : col + block_n, 0:head_dim], v_shared)
                T.gemm(q_shared, k_shared, s_frag, transpose_B=True, clear_accum=True)
                for i, j in T.Parallel(block_m, block_n):
                    s_frag[i, j] = T.if_then_else(col + j <= row + i, s_frag[i, j] * scale, -T.infinity('float32'))
                T.copy(max_frag, old_max_frag)
                T.reduce_max(s_frag, max_frag, dim=1, clear=False)
                for i in T.Parallel(block_m):
                    shrink_frag[i] = T.exp2(old_max_frag[i] - max_frag[i])
                for i, j in T.Parallel(block_m, block_n):
                    s_frag[i, j] = T.exp2(s_frag[i, j] - max_frag[i])
                T.reduce_sum(s_frag, block_sum_frag, dim=1)
                for i in T.Parallel(block_m):
                    sum_frag[i] = sum_frag[i] * shrink_frag[i] + block_sum_frag[i]
                for i, j in T.Parallel(block_m, head_dim):
                    o_frag[i, j] *= shrink_frag[i]
                T.copy(s_frag, p_frag)
                T.gemm(p_frag, v_shared, o_frag)
            for i, j in T.Parallel(block_m, head_dim):
                o_frag[i, j] /= sum_frag[i]
            T.copy(o_frag, o[n, h, row : row + block_m, 0:head_dim])

    return causal_attention


def example(batch: int = 1, num_heads: int = 2, seq: int = 150, head_dim: int = 64) -> Example:
    """The reference runs in float64; probabilities and outputs are rounded to bfloat16 (8 bits) by the kernel."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, num_heads, seq, head_dim, generator=generator).bfloat16() for _ in range(3))
    scores = q.double() @ k.double().mT / math.sqrt(head_dim)
    scores.masked_fill_(torch.ones(seq, seq, dtype=torch.bool).triu(1), -math.inf)
    expected = (scores.softmax(-1) @ v.double()).bfloat16()
    kernel = causal_attention_kernel(batch, num_heads, seq, head_dim)
    return Example(kernel, (q, k, v), (torch.empty_like(q),), (expected,), tolerance=2**-7)


if __name__ == '__main__':
    main('causal_attention', example())
