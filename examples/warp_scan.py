"""Inclusive prefix sum of rows, `y[t, i] = x[t, 0] + ... + x[t, i]`, by shuffles and one exchange between warps.

One block owns one row and takes `num_threads` elements at a time. In a warp five steps suffice, d = 1, 2, 4, 8, 16: a
lane adds what the lane `d` below it holds and then knows the sum of the `2 * d` elements that end at its own. Warps
leave their totals in shared memory, each thread adds the totals of the warps below its own, and the sum of all is
carried to the next chunk.
"""

import tilelang.language as T
import torch
from _run import Example, main


def warp_scan_kernel(length: int, num_threads: int = 128):
    """Build the kernel for one row length."""
    num_rows = T.dynamic('num_rows')
    num_warps = num_threads // 32

    @T.prim_func
    def warp_scan(x: T.Tensor((num_rows, length), 'int32'), y: T.Tensor((num_rows, length), 'int32')):
        with T.Kernel(num_rows, threads=num_threads) as row:
            thread = T.get_thread_binding()
            lane, warp = thread % 32, thread // 32
            total_shared = T.alloc_shared((num_warps,), 'int32')
            value = T.alloc_var('int32')
            below = T.alloc_var('int32')
            carry = T.alloc_var('int32', init=0)
            for chunk in T.serial(T.ceildiv(length, num_threads)):
                i = chunk * num_threads + thread
                value = T.if_then_else(i < length, x[row, i], 0)
                for level in T.unroll(5):
                    below = T.shfl_up(value, 1 << level)
                    if lane >= 1 << level:
                        value += below
                if lane == 31:
                    total_shared[warp] = value
                T.sync_threads()
                value += carry
                for w in T.unroll(num_warps):
                    if w < warp:
                        value += total_shared[w]
                    carry += total_shared[w]
                T.sync_threads()
                if i < length:
                    y[row, i] = value

    return warp_scan


def example(num_rows: int = 5, length: int = 300) -> Example:
    """Integers: exact, wrapping included."""
    x = torch.randint(-1000, 1000, (num_rows, length), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    return Example(warp_scan_kernel(length), (x,), (torch.empty_like(x),), (x.cumsum(1, dtype=torch.int32),))


if __name__ == '__main__':
    main('warp_scan', example())
