"""Barriers that only some of their threads reach."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen


@specimen('BarrierDivergence')
def barrier_inside_a_thread_condition(bug):
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            x_shared[thread] = x[thread]
            if bug:
                if thread < 64:
                    T.sync_threads()  # BUG
            else:
                T.sync_threads()
            y[thread] = x_shared[thread]

    return Launch(kernel, (torch.randn(128), torch.empty(128)))


@specimen('BarrierDivergence')
def barrier_in_a_loop_of_uneven_length(bug):
    @T.prim_func
    def kernel(x: T.Tensor((200,), 'int32'), y: T.Tensor((1,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            total_shared = T.alloc_shared((1,), 'int32')
            if thread == 0:
                total_shared[0] = 0
            T.sync_threads()
            for step in T.serial(T.ceildiv(200 - thread, 64) if bug else 4):
                if step * 64 + thread < 200:
                    T.atomic_add(total_shared[0], x[step * 64 + thread])
                T.sync_threads()  # BUG
            if thread == 0:
                y[0] = total_shared[0]

    return Launch(kernel, (torch.arange(200, dtype=torch.int32), torch.empty(1, dtype=torch.int32)))


@specimen('BarrierDivergence')
def barrier_skipped_by_the_tail_tokens(bug):
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def kernel(x: T.Tensor((num_tokens,), 'int32'), y: T.Tensor((num_tokens,), 'int32')):
        with T.Kernel(T.ceildiv(num_tokens, 64), threads=64) as pid:
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'int32')
            x_shared[thread] = 0
            T.sync_threads()
            if pid * 64 + thread < num_tokens:
                x_shared[thread] = x[pid * 64 + thread]
                if bug:
                    T.sync_threads()  # BUG
            if not bug:
                T.sync_threads()
            if pid * 64 + thread < num_tokens:
                y[pid * 64 + thread] = x_shared[thread // 32 * 32]

    return Launch(kernel, (torch.arange(100, dtype=torch.int32), torch.empty(100, dtype=torch.int32)))


@specimen('BarrierDivergence')
def warp_barrier_inside_a_lane_condition(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            x_shared[thread] = x[thread]
            if bug:
                if thread % 32 < 16:
                    T.sync_warp()  # BUG
            else:
                if thread < 32:
                    T.sync_warp()
            y[thread] = x_shared[thread]

    return Launch(kernel, (torch.randn(64), torch.empty(64)))


@specimen('BarrierDivergence')
def shuffle_reads_a_lane_that_stays_away(bug):
    @T.prim_func
    def kernel(x: T.Tensor((32,), 'int32'), y: T.Tensor((32,), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            y[thread] = 0
            if thread < 16:
                y[thread] = T.shfl_xor(x[thread], 16 if bug else 8, mask=0xFFFF)  # BUG

    return Launch(kernel, (torch.arange(32, dtype=torch.int32), torch.empty(32, dtype=torch.int32)))
