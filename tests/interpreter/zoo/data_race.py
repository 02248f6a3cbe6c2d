"""Two threads of a block, or two blocks, at one element with nothing that orders them."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen

BY_HAND = {'tl.disable_thread_storage_sync': True}


@specimen('DataRace', 'x_shared')
def neighbour_read_without_a_barrier(bug):
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            x_shared[thread] = x[thread]
            if not bug:
                T.sync_threads()
            y[thread] = x_shared[127 - thread]  # BUG

    return Launch(kernel, (torch.randn(128), torch.empty(128)), BY_HAND)


@specimen('DataRace', 'x_shared')
def two_threads_store_to_one_element(bug):
    @T.prim_func
    def kernel(y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'int32')
            x_shared[thread] = 0
            T.sync_threads()
            x_shared[thread // (1 + bug)] = thread  # BUG
            T.sync_threads()
            y[thread] = x_shared[thread]

    return Launch(kernel, (torch.empty(64, dtype=torch.int32),), BY_HAND)


@specimen('DataRace', 'total_shared')
def warp_barrier_between_two_warps(bug):
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'int32'), y: T.Tensor((128,), 'int32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            total_shared = T.alloc_shared((4,), 'int32')
            total = T.warp_reduce_sum(x[thread])
            if thread % 32 == 0:
                total_shared[thread // 32] = total
            if bug:
                T.sync_warp()
            else:
                T.sync_threads()
            y[thread] = total_shared[0] + total_shared[1] + total_shared[2] + total_shared[3]  # BUG

    return Launch(kernel, (torch.arange(128, dtype=torch.int32), torch.empty(128, dtype=torch.int32)), BY_HAND)


@specimen('DataRace', 'x_shared')
def buffer_refilled_while_others_still_read(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 128), 'float32'), y: T.Tensor((4, 128), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            for row in T.serial(4):
                x_shared[thread] = x[row, thread]  # BUG
                T.sync_threads()
                y[row, thread] = x_shared[(thread + 64) % 128]  # BUG
                if not bug:
                    T.sync_threads()

    return Launch(kernel, (torch.randn(4, 128), torch.empty(4, 128)), BY_HAND)


@specimen('DataRace', 'x_shared')
def consumer_does_not_wait_for_its_producer(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4, 64), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((4, 64), 'float32')
            full = T.alloc_barrier([64, 64, 64, 64])
            if thread < 64:
                for row in T.serial(4):
                    x_shared[row, thread] = x[row, thread]
                    T.barrier_arrive(full[row])
            else:
                for row in T.serial(4):
                    if not bug:
                        T.mbarrier_wait_parity(full[row], 0)
                    y[row, thread - 64] = x_shared[row, 127 - thread]  # BUG

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4, 64)), BY_HAND)


@specimen('DataRace', 'y')
def two_threads_store_to_one_global_element(bug):
    @T.prim_func
    def kernel(y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            y[63 - thread // (1 + bug)] = thread  # BUG
            if bug and thread < 32:
                y[thread] = 0

    return Launch(kernel, (torch.empty(64, dtype=torch.int32),), BY_HAND)


@specimen('DataRace', 'y')
def two_blocks_store_to_one_element(bug):
    @T.prim_func
    def kernel(x: T.Tensor((8,), 'float32'), y: T.Tensor((8,), 'float32')):
        with T.Kernel(8, threads=32) as pid:
            if T.get_thread_binding() == 0:
                y[pid - pid % (1 + bug)] = x[pid]  # BUG
                if bug and pid % 2 == 1:
                    y[pid] = 0.0

    return Launch(kernel, (torch.arange(8.0), torch.empty(8)))


@specimen('DataRace', 'y')
def tiles_overlap(bug):
    @T.prim_func
    def kernel(y: T.Tensor((256,), 'int32')):
        with T.Kernel(4, threads=64) as pid:
            for i in T.Parallel(64 + bug * 8):
                y[pid * 64 + i] = pid  # BUG

    return Launch(kernel, (torch.empty(256, dtype=torch.int32),))


@specimen('DataRace', 'total')
def blocks_accumulate_without_atomics(bug):
    @T.prim_func
    def kernel(x: T.Tensor((16,), 'int32'), total: T.Tensor((1,), 'int32')):
        with T.Kernel(16, threads=32) as pid:
            if T.get_thread_binding() == 0:
                if bug:
                    total[0] = total[0] + x[pid]  # BUG
                else:
                    T.atomic_add(total[0], x[pid])

    return Launch(kernel, (torch.arange(16, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)))


@specimen('DataRace', 'scratch')
def block_reads_what_another_block_writes(bug):
    @T.prim_func
    def kernel(x: T.Tensor((8,), 'float32'), scratch: T.Tensor((8,), 'float32'), y: T.Tensor((8,), 'float32')):
        with T.Kernel(8, threads=32) as pid:
            if T.get_thread_binding() == 0:
                scratch[pid] = x[pid] * 2.0  # BUG
            if not bug:
                T.sync_grid()
            if T.get_thread_binding() == 0:
                y[pid] = scratch[7 - pid]  # BUG

    return Launch(kernel, (torch.randn(8), torch.zeros(8), torch.empty(8)))
