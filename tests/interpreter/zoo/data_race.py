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


@specimen('DataRace', 'total_shared')
def plain_read_right_after_an_atomic(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'int32'), y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            total_shared = T.alloc_shared((1,), 'int32')
            if thread == 0:
                total_shared[0] = 0
            T.sync_threads()
            T.atomic_add(total_shared[0], x[thread])
            if not bug:
                T.sync_threads()
            y[thread] = total_shared[0]  # BUG

    return Launch(kernel, (torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)), BY_HAND)


@specimen('DataRace', 'total_shared')
def atomic_right_after_the_element_is_cleared(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'int32'), y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            total_shared = T.alloc_shared((1,), 'int32')
            if thread == 0:
                total_shared[0] = 0
            if not bug:
                T.sync_threads()
            T.atomic_add(total_shared[0], x[thread])  # BUG
            T.sync_threads()
            y[thread] = total_shared[0]

    return Launch(kernel, (torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)), BY_HAND)


@specimen('DataRace', 'x_shared')
def own_copies_are_waited_for_but_not_those_of_others(bug):
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=32):
            x_shared = T.alloc_shared((128,), 'float32')
            T.async_copy(x[0:128], x_shared)
            T.ptx_wait_group(0)
            if not bug:
                T.sync_threads()
            for i in T.Parallel(128):
                y[i] = x_shared[i]  # BUG

    return Launch(kernel, (torch.randn(128), torch.empty(128)), BY_HAND)


@specimen('DataRace', 'x_shared')
def slot_refilled_while_others_still_read_it(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 128), 'float32'), y: T.Tensor((4, 128), 'float32')):
        with T.Kernel(1, threads=32):
            x_shared = T.alloc_shared((128,), 'float32')
            for row in T.serial(4):
                T.async_copy(x[row, 0:128], x_shared)  # BUG
                T.ptx_wait_group(0)
                T.sync_threads()
                for i in T.Parallel(128):
                    y[row, i] = x_shared[i]
                if not bug:
                    T.sync_threads()

    return Launch(kernel, (torch.randn(4, 128), torch.empty(4, 128)), BY_HAND)


@specimen('DataRace', 'x_shared')
def slot_handed_back_before_it_is_read(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 16, 64), 'float16'), y: T.Tensor((4, 16, 64), 'float16')):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((16, 64), 'float16')
            loaded = T.alloc_barrier([128])
            used = T.alloc_barrier([128])
            if thread < 128:
                for row in T.serial(4):
                    if row > 0:
                        T.mbarrier_wait_parity(used[0], (row - 1) % 2)
                    T.tma_copy(x[row, 0:16, 0:64], x_shared, barrier=loaded[0])  # BUG
                    T.barrier_arrive(loaded[0])
            else:
                for row in T.serial(4):
                    T.mbarrier_wait_parity(loaded[0], row % 2)
                    if bug:
                        T.barrier_arrive(used[0])
                    for i, j in T.Parallel(16, 64):
                        y[row, i, j] = x_shared[i, j]
                    if not bug:
                        T.barrier_arrive(used[0])

    return Launch(kernel, (torch.randn(4, 16, 64).half(), torch.empty(4, 16, 64).half()))


@specimen('DataRace', 'found_shared')
def flag_read_by_threads_that_did_not_set_it(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            found_shared = T.alloc_shared((1,), 'int32')
            found_shared[0] = 0
            T.sync_threads()
            if x[thread] > 0.0:
                found_shared[0] = 1
            if not bug:
                T.sync_threads()
            y[thread] = found_shared[0]  # BUG

    return Launch(kernel, (torch.randn(64), torch.empty(64, dtype=torch.int32)), BY_HAND)


@specimen('DataRace', 'x_shared')
def arrival_right_behind_a_read(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 16, 64), 'float16'), y: T.Tensor((4, 16, 64), 'float16')):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((16, 64), 'float16')
            x_frag = T.alloc_fragment((16, 64), 'float16')
            loaded = T.alloc_barrier([128])
            used = T.alloc_barrier([128])
            if thread < 128:
                for row in T.serial(4):
                    if row > 0:
                        T.mbarrier_wait_parity(used[0], (row - 1) % 2)
                    T.tma_copy(x[row, 0:16, 0:64], x_shared, barrier=loaded[0])  # BUG
                    T.barrier_arrive(loaded[0])
            else:
                for row in T.serial(4):
                    T.mbarrier_wait_parity(loaded[0], row % 2)
                    T.copy(x_shared, x_frag)
                    if not bug:
                        T.fence_proxy_async()
                    T.barrier_arrive(used[0])
                    T.copy(x_frag, y[row, 0:16, 0:64])

    return Launch(kernel, (torch.randn(4, 16, 64).half(), torch.empty(4, 16, 64).half()))


@specimen('DataRace', 'x_shared')
def arrival_ahead_of_the_store(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 128), 'float32'), y: T.Tensor((4, 128), 'float32')):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            x_local = T.alloc_local((1,), 'float32')
            loaded = T.alloc_barrier([128])
            used = T.alloc_barrier([128])
            if thread < 128:
                for row in T.serial(4):
                    if row > 0:
                        T.mbarrier_wait_parity(used[0], (row - 1) % 2)
                    T.tma_copy(x[row, 0:128], x_shared, barrier=loaded[0])  # BUG
                    T.barrier_arrive(loaded[0])
            else:
                for row in T.serial(4):
                    T.mbarrier_wait_parity(loaded[0], row % 2)
                    x_local[0] = x_shared[thread - 128]
                    if bug:
                        T.barrier_arrive(used[0])
                    y[row, thread - 128] = x_local[0] * 2.0
                    if not bug:
                        T.barrier_arrive(used[0])

    return Launch(kernel, (torch.randn(4, 128), torch.empty(4, 128)))


@specimen('DataRace', 'a_shared')
def product_of_what_another_role_stored(bug):
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), 'bfloat16'), b: T.Tensor((64, 64), 'bfloat16'), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            a_shared = T.alloc_shared((64, 64), 'bfloat16')
            b_shared = T.alloc_shared((64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            stored = T.alloc_barrier([128])
            if thread < 128:
                for i, j in T.Parallel(64, 64):
                    a_shared[i, j] = a[i, j]
                for i, j in T.Parallel(64, 64):
                    b_shared[i, j] = b[i, j]
                if not bug:
                    T.fence_proxy_async()
                T.barrier_arrive(stored[0])
            else:
                T.mbarrier_wait_parity(stored[0], 0)
                T.clear(c_frag)
                T.wgmma_gemm(a_shared, b_shared, c_frag)  # BUG
                T.wait_wgmma(0)
                T.copy(c_frag, c)

    return Launch(kernel, (torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.empty(64, 64)))


@specimen('DataRace', 'y_shared')
def copy_engine_stores_what_another_role_wrote(bug):
    @T.prim_func
    def kernel(x: T.Tensor((16, 64), 'float16'), y: T.Tensor((16, 64), 'float16')):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            y_shared = T.alloc_shared((16, 64), 'float16')
            stored = T.alloc_barrier([128])
            if thread < 128:
                for i, j in T.Parallel(16, 64):
                    y_shared[i, j] = x[i, j] * T.float16(2.0)
                if not bug:
                    T.fence_proxy_async()
                T.barrier_arrive(stored[0])
            else:
                T.mbarrier_wait_parity(stored[0], 0)
                T.tma_copy(y_shared, y)  # BUG
                T.tma_store_wait(0)

    return Launch(kernel, (torch.randn(16, 64).half(), torch.empty(16, 64).half()))


@specimen('DataRace', 'a_shared')
def operand_handed_back_before_the_product_is_done(bug):
    @T.prim_func
    def kernel(
        a: T.Tensor((3, 64, 64), 'bfloat16'), b: T.Tensor((64, 64), 'bfloat16'), c: T.Tensor((64, 64), 'float32')
    ):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            a_shared = T.alloc_shared((64, 64), 'bfloat16')
            b_shared = T.alloc_shared((64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            loaded, used = T.alloc_barrier([128]), T.alloc_barrier([128])
            T.copy(b, b_shared)
            T.sync_threads()
            if thread < 128:
                for step in T.serial(3):
                    if step > 0:
                        T.mbarrier_wait_parity(used[0], (step - 1) % 2)
                    T.tma_copy(a[step, 0:64, 0:64], a_shared, barrier=loaded[0])  # BUG
                    T.barrier_arrive(loaded[0])
            else:
                T.clear(c_frag)
                for step in T.serial(3):
                    T.mbarrier_wait_parity(loaded[0], step % 2)
                    T.wgmma_gemm(a_shared, b_shared, c_frag)
                    if bug:
                        T.barrier_arrive(used[0])
                    T.wait_wgmma(0)
                    if not bug:
                        T.barrier_arrive(used[0])
                T.copy(c_frag, c)

    return Launch(kernel, (torch.randn(3, 64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.empty(64, 64)))


@specimen('DataRace', 'scratch')
def read_ahead_of_the_wait_for_the_kernel_before(bug):
    @T.prim_func
    def kernel(x: T.Tensor((8,), 'float32'), scratch: T.Tensor((8,), 'float32'), y: T.Tensor((8,), 'float32')):
        with T.Kernel(8, threads=32) as pid:
            if T.get_thread_binding() == 0:
                scratch[pid] = x[pid] * 2.0
            T.pdl_trigger()
        with T.Kernel(8, threads=32) as pid:
            x_local = T.alloc_local((2,), 'float32')
            x_local[0] = x[pid]
            if bug:
                x_local[1] = scratch[7 - pid]  # BUG
            T.pdl_sync()
            if not bug:
                x_local[1] = scratch[7 - pid]
            if T.get_thread_binding() == 0:
                y[pid] = x_local[0] + x_local[1]

    return Launch(kernel, (torch.randn(8), torch.zeros(8), torch.empty(8)))


@specimen('DataRace', 'data')
def flag_that_releases_nothing(bug):
    order = ('relaxed', 'relaxed') if bug else ('release', 'acquire')

    @T.prim_func
    def kernel(x: T.Tensor((32,), 'float32'), data: T.Tensor((32,), 'float32'), flag: T.Tensor((1,), 'int32')):
        with T.Kernel(2, threads=32) as pid:
            thread = T.get_thread_binding()
            if pid == 0:
                data[thread] = x[thread] * 2.0
                T.sync_threads()
                if thread == 0:
                    T.atomic_add(flag[0], 1, memory_order=order[0])
            else:
                if thread == 0:
                    seen = T.alloc_var('int32', init=0)
                    while seen == 0:
                        seen = T.atomic_load(flag[0], memory_order=order[1])
                T.sync_threads()
                data[thread] = data[thread] + 1.0  # BUG

    return Launch(kernel, (torch.randn(32), torch.zeros(32), torch.zeros(1, dtype=torch.int32)))
