"""Memory read before anything was written to it."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen


@specimen('UninitializedRead', 'c_frag')
def gemm_accumulates_into_nothing(bug):
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), 'float16'), b: T.Tensor((64, 64), 'float16'), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((64, 64), 'float16')
            b_shared = T.alloc_shared((64, 64), 'float16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            T.copy(a, a_shared)
            T.copy(b, b_shared)
            if not bug:
                T.clear(c_frag)
            T.gemm(a_shared, b_shared, c_frag)  # BUG
            T.copy(c_frag, c)

    return Launch(kernel, (torch.randn(64, 64).half(), torch.randn(64, 64).half(), torch.empty(64, 64)))


@specimen('UninitializedRead', 'x_shared')
def shared_half_filled(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            if thread < 64 - 32 * bug:
                x_shared[thread] = x[thread]
            T.sync_threads()
            y[thread] = x_shared[63 - thread]  # BUG

    return Launch(kernel, (torch.randn(64), torch.empty(64)))


@specimen('UninitializedRead', 'best_local')
def variable_without_a_start_value(bug):
    @T.prim_func
    def kernel(x: T.Tensor((32, 8), 'float32'), y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            best_local = T.alloc_local((1,), 'float32')
            if not bug:
                best_local[0] = -T.infinity('float32')
            for i in T.serial(8):
                best_local[0] = T.max(best_local[0], x[thread, i])  # BUG
            y[thread] = best_local[0]

    return Launch(kernel, (torch.randn(32, 8), torch.empty(32)))


@specimen('UninitializedRead', 'x_local')
def local_element_skipped_by_some_threads(bug):
    @T.prim_func
    def kernel(x: T.Tensor((32,), 'float32'), y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            x_local = T.alloc_local((2,), 'float32')
            x_local[0] = x[thread]
            if thread >= bug:
                x_local[1] = x[31 - thread]
            y[thread] = x_local[0] + x_local[1]  # BUG

    return Launch(kernel, (torch.randn(32), torch.empty(32)))


@specimen('UninitializedRead', 'max_frag')
def running_maximum_starts_nowhere(bug):
    @T.prim_func
    def kernel(x: T.Tensor((32, 64), 'float32'), y: T.Tensor((32,), 'float32')):
        with T.Kernel(1, threads=64):
            x_frag = T.alloc_fragment((32, 64), 'float32')
            max_frag = T.alloc_fragment((32,), 'float32')
            T.copy(x, x_frag)
            T.reduce_max(x_frag, max_frag, dim=1, clear=not bug)  # BUG
            T.copy(max_frag, y)

    return Launch(kernel, (torch.randn(32, 64), torch.empty(32)))


@specimen('UninitializedRead', 'x_frag')
def fragment_written_under_a_condition(bug):
    @T.prim_func
    def kernel(x: T.Tensor((100,), 'float32'), y: T.Tensor((1,), 'float32')):
        with T.Kernel(1, threads=64):
            x_frag = T.alloc_fragment((128,), 'float32')
            sum_frag = T.alloc_fragment((1,), 'float32')
            if not bug:
                T.clear(x_frag)
            for i in T.Parallel(128):
                if i < 100:
                    x_frag[i] = x[i]
            T.reduce_sum(x_frag, sum_frag, dim=0)  # BUG
            y[0] = sum_frag[0]

    return Launch(kernel, (torch.randn(100), torch.empty(1)))


@specimen('UninitializedRead', 'y')
def output_read_before_it_is_written(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            if not bug:
                y[thread] = 0.0
            y[thread] = y[thread] + x[thread]  # BUG

    return Launch(kernel.with_attr('tilelang_out_idx', [1]), (torch.randn(64), torch.empty(64)))
