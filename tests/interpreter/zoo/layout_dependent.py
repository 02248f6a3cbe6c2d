"""Fragments whose threads hold different values where only one of the values can count."""

import tilelang.language as T
import torch

from .specimen import Launch, innocent, specimen


@specimen('LayoutDependent', 'x_frag')
def value_of_a_thread_stored_for_all_of_them(bug):
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_frag = T.alloc_fragment((1,), 'float32')
            x_frag[0] = x[thread if bug else 5]
            for i in T.Parallel(64):
                y[i] = x_frag[0] * 2.0  # BUG

    return Launch(kernel, (torch.randn(128), torch.empty(64)))


@specimen('LayoutDependent', 'x_frag')
def rows_of_threads_copied_as_one_tile(bug):
    @T.prim_func
    def kernel(x: T.Tensor((32, 4), 'float32'), y: T.Tensor((32, 4), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            x_frag = T.alloc_fragment((4,), 'float32')
            for i in T.serial(4):
                x_frag[i] = x[thread, i]
            if bug:
                T.copy(x_frag, y[0, 0:4])  # BUG
                T.clear(y[1:32, 0:4])
            else:
                for i in T.serial(4):
                    y[thread, i] = x_frag[i]

    return Launch(kernel, (torch.randn(32, 4), torch.empty(32, 4)))


@specimen('LayoutDependent', 'sum_frag')
def one_thread_corrects_the_sum_of_all(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 128), 'float32'), y: T.Tensor((4, 128), 'float32')):
        with T.Kernel(4, threads=64) as pid:
            x_frag = T.alloc_fragment((128,), 'float32')
            sum_frag = T.alloc_fragment((1,), 'float32')
            T.copy(x[pid, 0:128], x_frag)
            T.reduce_sum(x_frag, sum_frag, dim=0)
            if not bug or T.get_thread_binding() == 0:
                sum_frag[0] = sum_frag[0] + 1.0
            for i in T.Parallel(128):
                y[pid, i] = x_frag[i] / sum_frag[0]  # BUG

    return Launch(kernel, (torch.rand(4, 128), torch.empty(4, 128)))


@specimen('LayoutDependent', 'x_frag')
def thread_number_in_a_parallel_loop(bug):
    @T.prim_func
    def kernel(y: T.Tensor((128,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_frag = T.alloc_fragment((128,), 'int32')
            for i in T.Parallel(128):
                x_frag[i] = thread if bug else i  # BUG
            T.copy(x_frag, y)

    return Launch(kernel, (torch.empty(128, dtype=torch.int32),))


@innocent
def every_thread_works_on_its_own_copy():
    @T.prim_func
    def kernel(x: T.Tensor((2, 64, 8), 'float32'), y: T.Tensor((2, 64), 'float32')):
        with T.Kernel(2, threads=64) as pid:
            thread = T.get_thread_binding()
            x_frag = T.alloc_fragment((8,), 'float32')
            square_frag = T.alloc_fragment((8,), 'float32')
            sum_frag = T.alloc_fragment((1,), 'float32')
            for i in T.serial(8):
                x_frag[i] = x[pid, thread, i]
            for i in T.Parallel(8):
                square_frag[i] = x_frag[i] * x_frag[i]
            T.reduce_sum(square_frag, sum_frag, dim=0)
            square_frag[0] = 0.0
            y[pid, thread] = sum_frag[0]

    return Launch(kernel, (torch.randn(2, 64, 8), torch.empty(2, 64)))


@innocent
def roles_fill_their_own_copies():
    @T.prim_func
    def kernel(x: T.Tensor((2, 64), 'float32'), y: T.Tensor((2, 64), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_frag = T.alloc_fragment((64,), 'float32')
            sum_frag = T.alloc_fragment((1,), 'float32')
            if thread < 64:
                T.copy(x[0, 0:64], x_frag)
                T.reduce_sum(x_frag, sum_frag, dim=0)
                for i in T.Parallel(64):
                    y[0, i] = sum_frag[0]
            else:
                T.copy(x[1, 0:64], x_frag)
                T.reduce_sum(x_frag, sum_frag, dim=0)
                sum_frag[0] = sum_frag[0] * 2.0
                for i in T.Parallel(64):
                    y[1, i] = sum_frag[0]

    return Launch(kernel, (torch.randn(2, 64), torch.empty(2, 64)))
