"""Waits that can never end."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen

BY_HAND = {'tl.disable_thread_storage_sync': True}


@specimen('Deadlock')
def fewer_arrivals_than_the_barrier_counts(bug):
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            full = T.alloc_barrier([64 + 64 * bug])
            if thread >= 64:
                x_shared[thread - 64] = x[thread]
                T.barrier_arrive(full[0])
            else:
                T.mbarrier_wait_parity(full[0], 0)  # BUG
                y[thread] = x_shared[63 - thread]

    return Launch(kernel, (torch.randn(128), torch.empty(64)), BY_HAND)


@specimen('Deadlock')
def consumer_waits_for_a_slot_nobody_fills(bug):
    @T.prim_func
    def kernel(x: T.Tensor((2, 64), 'float32'), y: T.Tensor((2, 64), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((2, 64), 'float32')
            full = T.alloc_barrier([64, 64])
            if thread >= 64:
                for slot in T.serial(2 - bug):
                    x_shared[slot, thread - 64] = x[slot, thread - 64]
                    T.barrier_arrive(full[slot])
            else:
                for slot in T.serial(2):
                    T.mbarrier_wait_parity(full[slot], 0)  # BUG
                    y[slot, thread] = x_shared[slot, 63 - thread]

    return Launch(kernel, (torch.randn(2, 64), torch.empty(2, 64)), BY_HAND)


@specimen('Deadlock')
def producer_waits_for_a_free_that_never_comes(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4, 64), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((2, 64), 'float32')
            full = T.alloc_barrier([64, 64])
            free = T.alloc_barrier([64, 64])
            if thread >= 64:
                for row in T.serial(4):
                    T.mbarrier_wait_parity(free[row % 2], (row // 2 + 1) % 2)  # BUG
                    x_shared[row % 2, thread - 64] = x[row, thread - 64]
                    T.barrier_arrive(full[row % 2])
            else:
                for row in T.serial(4):
                    T.mbarrier_wait_parity(full[row % 2], row // 2)  # BUG
                    y[row, thread] = x_shared[row % 2, 63 - thread]
                    if not bug:
                        T.barrier_arrive(free[row % 2])

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4, 64)), BY_HAND)


@specimen('Deadlock')
def producer_starts_with_the_wrong_parity(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4, 64), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            full = T.alloc_barrier([64])
            free = T.alloc_barrier([64])
            if thread >= 64:
                for row in T.serial(4):
                    T.mbarrier_wait_parity(free[0], (row + 1 - bug) % 2)  # BUG
                    x_shared[thread - 64] = x[row, thread - 64]
                    T.barrier_arrive(full[0])
            else:
                for row in T.serial(4):
                    T.mbarrier_wait_parity(full[0], row % 2)  # BUG
                    y[row, thread] = x_shared[63 - thread]
                    T.barrier_arrive(free[0])

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4, 64)), BY_HAND)


@specimen('Deadlock')
def named_barrier_expects_threads_that_never_come(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            if thread < 64:
                x_shared[thread] = x[thread]
                T.sync_threads(8, 64 + 64 * bug)  # BUG
                y[thread] = x_shared[63 - thread]

    return Launch(kernel, (torch.randn(64), torch.empty(64)), BY_HAND)
