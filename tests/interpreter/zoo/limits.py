"""What no GPU takes: too many threads, too much shared memory, products of two types."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen


@specimen('ResourceLimit')
def more_threads_than_a_block_may_have(bug):
    threads = 2048 if bug else 1024

    @T.prim_func
    def kernel(y: T.Tensor((threads,), 'int32')):
        with T.Kernel(1, threads=threads):
            thread = T.get_thread_binding()
            y[thread] = thread

    return Launch(kernel, (torch.empty(threads, dtype=torch.int32),))


@specimen('ResourceLimit')
def more_shared_memory_than_there_is(bug):
    rows = 64 if bug else 32

    @T.prim_func
    def kernel(x: T.Tensor((rows, 1024), 'float32'), y: T.Tensor((rows, 1024), 'float32')):
        with T.Kernel(1, threads=128):
            x_shared = T.alloc_shared((rows, 1024), 'float32')
            T.copy(x, x_shared)
            T.copy(x_shared, y)

    return Launch(kernel, (torch.randn(rows, 1024), torch.empty(rows, 1024)))


@specimen('ResourceLimit')
def buffers_that_are_in_use_together(bug):
    @T.prim_func
    def kernel(x: T.Tensor((32, 1024), 'float32'), y: T.Tensor((32, 1024), 'float32')):
        with T.Kernel(1, threads=128):
            first_shared = T.alloc_shared((32, 1024), 'float32')
            second_shared = T.alloc_shared((32, 1024), 'float32')
            T.copy(x, first_shared)
            if bug:
                T.copy(x, second_shared)
                for i, j in T.Parallel(32, 1024):
                    y[i, j] = first_shared[i, j] + second_shared[i, j]
            else:  # the second may lie where the first was
                T.copy(first_shared, y)
                T.copy(x, second_shared)
                T.copy(second_shared, y)

    return Launch(kernel, (torch.randn(32, 1024), torch.empty(32, 1024)))


def _product(left, right):
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), left), b: T.Tensor((64, 64), right), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((64, 64), left)
            b_shared = T.alloc_shared((64, 64), right)
            c_frag = T.alloc_fragment((64, 64), 'float32')
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.clear(c_frag)
            T.gemm(a_shared, b_shared, c_frag)
            T.copy(c_frag, c)

    tensors = [torch.randn(64, 64).to(getattr(torch, name)) for name in (left, right)]
    return Launch(kernel, (*tensors, torch.empty(64, 64)))


@specimen('TypeMismatch', 'b_shared')
def product_of_half_and_bfloat16(bug):
    return _product('float16', 'bfloat16' if bug else 'float16')


@specimen('TypeMismatch', 'b_shared')
def product_of_half_and_single(bug):
    return _product('float16', 'float32' if bug else 'float16')


@specimen('TypeMismatch', 'b_shared')
def product_of_a_float_of_8_bits_and_half(bug):
    return _product('float8_e4m3fn', 'float16' if bug else 'float8_e5m2')
