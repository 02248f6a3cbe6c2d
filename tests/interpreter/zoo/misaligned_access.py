"""Vectors at addresses that are no multiples of their size."""

import tilelang.language as T
import torch

from .specimen import Launch, innocent, specimen


@specimen('MisalignedAccess', 'x')
def vectors_of_a_tensor_that_begins_at_an_odd_place(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=16):
            thread = T.get_thread_binding()
            for i in T.vectorized(4):
                y[thread * 4 + i] = x[thread * 4 + i]  # BUG

    return Launch(kernel, (torch.randn(72)[bug : 64 + bug], torch.empty(64)))


@specimen('MisalignedAccess', 'x')
def asynchronous_copy_from_an_odd_place(bug):
    @T.prim_func
    def kernel(x: T.Tensor((72,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=16):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            source = thread * 4 + 2 * bug
            T.ptx_cp_async(T.access_ptr(x_shared[thread * 4], 'w', 4), T.access_ptr(x[source], 'r', 4), 4)  # BUG
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.sync_threads()
            for i in T.serial(4):
                y[thread * 4 + i] = x_shared[thread * 4 + i]

    return Launch(kernel, (torch.randn(72), torch.empty(64)))


@specimen('MisalignedAccess', 'y')
def atomic_pair_at_an_odd_element(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((66,), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            T.atomic_addx2(y[thread * 2 + bug], x[thread * 2])  # BUG

    return Launch(kernel, (torch.randn(64), torch.zeros(66)))


@innocent
def elements_that_the_compiler_loads_one_by_one():
    rows = T.dynamic('rows')

    @T.prim_func
    def kernel(x: T.Tensor((65,), 'float32'), z: T.Tensor((16, rows), 'float32'), y: T.Tensor((2, 64), 'float32')):
        with T.Kernel(1, threads=16):
            thread = T.get_thread_binding()
            for i in T.vectorized(4):
                y[0, thread * 4 + i] = x[thread * 4 + i + 1]
            for i in T.vectorized(4):
                y[1, thread * 4 + i] = z[thread, i]

    return Launch(kernel, (torch.randn(72)[1:66], torch.randn(65)[1:].view(16, 4), torch.empty(2, 64)))
