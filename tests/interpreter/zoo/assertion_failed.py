"""Promises of the kernel that do not hold."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen


@specimen('AssertionFailed')
def promise_about_an_index_is_broken(bug):
    @T.prim_func
    def kernel(x: T.Tensor((50, 32), 'float32'), ids: T.Tensor((8,), 'int32'), y: T.Tensor((8, 32), 'float32')):
        with T.Kernel(8, threads=32) as pid:
            row = ids[pid]
            T.assume(row >= 0)
            T.assume(row < 50)  # BUG
            for j in T.Parallel(32):
                y[pid, j] = x[row, j]

    ids = torch.tensor([4, 0, 49, 7, 50 if bug else 1, 2, 2, 3], dtype=torch.int32)
    return Launch(kernel, (torch.randn(50, 32), ids, torch.empty(8, 32)))


@specimen('AssertionFailed')
def promise_about_a_shape_is_broken(bug):
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def kernel(x: T.Tensor((num_tokens,), 'float32'), y: T.Tensor((num_tokens,), 'float32')):
        T.assume(num_tokens % 8 == 0)  # BUG
        with T.Kernel(T.ceildiv(num_tokens, 64), threads=64) as pid:
            for i in T.Parallel(64):
                y[pid * 64 + i] = x[pid * 64 + i]

    return Launch(kernel, (torch.randn(72 + bug), torch.empty(72 + bug)))


@specimen('AssertionFailed')
def device_assertion_fails_in_one_thread(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            T.device_assert(x[thread] > 0.0)  # BUG
            y[thread] = T.log(x[thread])

    x = torch.rand(64) + 1
    x[33] -= 5.0 * bug
    return Launch(kernel, (x, torch.empty(64)))
