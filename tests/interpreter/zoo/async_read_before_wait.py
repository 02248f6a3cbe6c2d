"""Asynchronous data used before the wait that makes it visible."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen


@specimen('AsyncReadBeforeWait', 'x_shared')
def cp_async_without_a_wait(bug):
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=32):
            x_shared = T.alloc_shared((128,), 'float32')
            T.async_copy(x[0:128], x_shared)
            if not bug:
                T.ptx_wait_group(0)
            T.sync_threads()
            for i in T.Parallel(128):
                y[i] = x_shared[i]  # BUG

    return Launch(kernel, (torch.randn(128), torch.empty(128)))


@specimen('AsyncReadBeforeWait', 'x_shared')
def wait_leaves_the_newest_group_in_flight(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 128), 'float32'), y: T.Tensor((4, 128), 'float32')):
        with T.Kernel(1, threads=32):
            x_shared = T.alloc_shared((2, 128), 'float32')
            T.async_copy(x[0, 0:128], x_shared[0, 0:128])
            for row in T.serial(4):
                if row + 1 < 4:
                    T.async_copy(x[row + 1, 0:128], x_shared[(row + 1) % 2, 0:128])
                    T.ptx_wait_group(1)
                else:
                    T.ptx_wait_group(1 if bug else 0)
                T.sync_threads()
                for i in T.Parallel(128):
                    y[row, i] = x_shared[row % 2, i]  # BUG
                T.sync_threads()

    return Launch(kernel, (torch.randn(4, 128), torch.empty(4, 128)))


@specimen('AsyncReadBeforeWait', 'x_shared')
def tma_load_without_its_barrier_wait(bug):
    @T.prim_func
    def kernel(x: T.Tensor((16, 64), 'float16'), y: T.Tensor((16, 64), 'float16')):
        with T.Kernel(1, threads=128):
            x_shared = T.alloc_shared((16, 64), 'float16')
            loaded = T.alloc_barrier([128])
            T.tma_copy(x[0:16, 0:64], x_shared[0:16, 0:64], barrier=loaded[0])
            T.barrier_arrive(loaded[0])
            if not bug:
                T.mbarrier_wait_parity(loaded[0], 0)
            for i, j in T.Parallel(16, 64):
                y[i, j] = x_shared[i, j]  # BUG

    return Launch(kernel, (torch.randn(16, 64).half(), torch.empty(16, 64).half()))


@specimen('AsyncReadBeforeWait', 'x_shared')
def tma_ring_waits_for_the_wrong_slot(bug):
    @T.prim_func
    def kernel(x: T.Tensor((2, 16, 64), 'float16'), y: T.Tensor((2, 16, 64), 'float16')):
        with T.Kernel(1, threads=128):
            x_shared = T.alloc_shared((2, 16, 64), 'float16')
            loaded = T.alloc_barrier([128, 128])
            for slot in T.unroll(2):
                T.tma_copy(x[slot, 0:16, 0:64], x_shared[slot, 0:16, 0:64], barrier=loaded[slot])
                T.barrier_arrive(loaded[slot])
            for slot in T.unroll(2):
                T.mbarrier_wait_parity(loaded[0 if bug else slot], 0)
                for i, j in T.Parallel(16, 64):
                    y[slot, i, j] = x_shared[slot, i, j]  # BUG

    return Launch(kernel, (torch.randn(2, 16, 64).half(), torch.empty(2, 16, 64).half()))


@specimen('AsyncReadBeforeWait', 'c_frag')
def matrix_product_stored_before_its_wait(bug):
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), 'bfloat16'), b: T.Tensor((64, 64), 'bfloat16'), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((64, 64), 'bfloat16')
            b_shared = T.alloc_shared((64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.clear(c_frag)
            T.wgmma_gemm(a_shared, b_shared, c_frag)
            T.wait_wgmma(1 if bug else 0)
            T.copy(c_frag, c)  # BUG

    return Launch(kernel, (torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.empty(64, 64)))


@specimen('AsyncReadBeforeWait', 'x_shared')
def buffer_cleared_under_a_copy_in_flight(bug):
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((2, 128), 'float32')):
        with T.Kernel(1, threads=32):
            x_shared = T.alloc_shared((128,), 'float32')
            T.async_copy(x[0:128], x_shared)
            if not bug:
                T.ptx_wait_group(0)
                T.sync_threads()
                T.copy(x_shared, y[0, 0:128])
                T.sync_threads()
            for i in T.Parallel(128):
                x_shared[i] = 0.0  # BUG
            T.ptx_wait_group(0)
            T.sync_threads()
            T.copy(x_shared, y[1, 0:128])
            if bug:
                T.clear(y[0, 0:128])

    return Launch(kernel, (torch.randn(128), torch.empty(2, 128)))


@specimen('AsyncReadBeforeWait', 'a_shared')
def operand_overwritten_under_a_product_in_flight(bug):
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), 'bfloat16'), b: T.Tensor((64, 64), 'bfloat16'), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((64, 64), 'bfloat16')
            b_shared = T.alloc_shared((64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.clear(c_frag)
            T.wgmma_gemm(a_shared, b_shared, c_frag)
            if not bug:
                T.wait_wgmma(0)
            T.clear(a_shared)  # BUG
            T.wgmma_gemm(a_shared, b_shared, c_frag)
            T.wait_wgmma(0)
            T.copy(c_frag, c)

    return Launch(kernel, (torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.empty(64, 64)))


@specimen('AsyncReadBeforeWait', 'a_shared')
def operand_of_the_newest_product_overwritten(bug):
    @T.prim_func
    def kernel(
        a: T.Tensor((2, 64, 64), 'bfloat16'), b: T.Tensor((64, 64), 'bfloat16'), c: T.Tensor((64, 64), 'float32')
    ):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((2, 64, 64), 'bfloat16')
            b_shared = T.alloc_shared((64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            T.clear(c_frag)
            for slot in T.unroll(2):
                T.wgmma_gemm(a_shared[slot, 0:64, 0:64], b_shared, c_frag)
            T.wait_wgmma(1)
            T.clear(a_shared[1 if bug else 0, 0:64, 0:64])  # BUG
            T.wait_wgmma(0)
            T.copy(c_frag, c)

    return Launch(kernel, (torch.randn(2, 64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.empty(64, 64)))
