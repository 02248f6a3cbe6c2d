"""Right kernels that a careless checker would accuse."""

import tilelang.language as T
import torch

from .specimen import Launch, innocent

BY_HAND = {'tl.disable_thread_storage_sync': True}


@innocent
def own_element_needs_no_barrier():
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            x_shared[thread] = x[thread]
            x_shared[thread] = x_shared[thread] + 1.0
            y[thread] = x_shared[thread]

    return Launch(kernel, (torch.randn(128), torch.empty(128)), BY_HAND)


@innocent
def exchange_within_a_warp():
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            x_shared[thread] = x[thread]
            T.sync_warp()
            y[thread] = x_shared[thread // 32 * 32 + 31 - thread % 32]

    return Launch(kernel, (torch.randn(128), torch.empty(128)), BY_HAND)


@innocent
def two_buffers_and_one_barrier_per_step():
    @T.prim_func
    def kernel(x: T.Tensor((6, 64), 'float32'), y: T.Tensor((6, 64), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((2, 64), 'float32')
            for row in T.serial(6):
                x_shared[row % 2, thread] = x[row, thread]
                T.sync_threads()
                y[row, thread] = x_shared[row % 2, 63 - thread]

    return Launch(kernel, (torch.randn(6, 64), torch.empty(6, 64)), BY_HAND)


@innocent
def atomics_on_one_shared_element():
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'int32'), y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            total_shared = T.alloc_shared((1,), 'int32')
            if thread == 0:
                total_shared[0] = 0
            T.sync_threads()
            T.atomic_add(total_shared[0], x[thread])
            T.sync_threads()
            y[thread] = total_shared[0]

    return Launch(kernel, (torch.arange(64, dtype=torch.int32), torch.empty(64, dtype=torch.int32)), BY_HAND)


@innocent
def barrier_that_whole_blocks_skip():
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4, 64), 'float32')):
        with T.Kernel(4, threads=64) as pid:
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            if pid % 2 == 0:
                x_shared[thread] = x[pid, thread]
                T.sync_threads()
                y[pid, thread] = x_shared[63 - thread]
            else:
                y[pid, thread] = 0.0

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4, 64)), BY_HAND)


@innocent
def each_half_has_its_own_barrier():
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            x_shared[thread] = x[thread]
            if thread < 64:
                T.sync_threads(8, 64)
                y[thread] = x_shared[63 - thread]
            else:
                T.sync_threads(9, 64)
                y[thread] = x_shared[191 - thread]

    return Launch(kernel, (torch.randn(128), torch.empty(128)), BY_HAND)


@innocent
def mbarrier_orders_the_whole_block():
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            stored = T.alloc_barrier([128])
            x_shared[thread] = x[thread]
            T.barrier_arrive(stored[0])
            T.mbarrier_wait_parity(stored[0], 0)
            y[thread] = x_shared[127 - thread]

    return Launch(kernel, (torch.randn(128), torch.empty(128)), BY_HAND)


@innocent
def blocks_agree_on_the_value():
    @T.prim_func
    def kernel(x: T.Tensor((1,), 'float32'), y: T.Tensor((1,), 'float32')):
        with T.Kernel(8, threads=32):
            if T.get_thread_binding() == 0:
                y[0] = x[0] * 2.0

    return Launch(kernel, (torch.randn(1), torch.empty(1)))


@innocent
def tail_left_to_the_guards():
    @T.prim_func
    def kernel(x: T.Tensor((37, 50), 'float32'), y: T.Tensor((37, 50), 'float32')):
        with T.Kernel(T.ceildiv(50, 32), T.ceildiv(37, 16), threads=64) as (pid_n, pid_m):
            x_shared = T.alloc_shared((16, 32), 'float32')
            T.copy(x[pid_m * 16, pid_n * 32], x_shared)
            for i, j in T.Parallel(16, 32):
                y[pid_m * 16 + i, pid_n * 32 + j] = x_shared[i, j] * 2.0

    return Launch(kernel, (torch.randn(37, 50), torch.empty(37, 50)))


@innocent
def unused_elements_are_never_read():
    @T.prim_func
    def kernel(x: T.Tensor((100,), 'float32'), y: T.Tensor((100,), 'float32')):
        with T.Kernel(1, threads=128):
            thread = T.get_thread_binding()
            x_local = T.alloc_local((4,), 'float32')
            x_shared = T.alloc_shared((128,), 'float32')
            if thread < 100:
                x_local[1] = x[thread]
                x_shared[thread] = x_local[1]
            T.sync_threads()
            if thread < 100:
                y[thread] = x_shared[99 - thread]

    return Launch(kernel, (torch.randn(100), torch.empty(100)), BY_HAND)


@innocent
def oldest_copy_is_ready_while_the_newest_flies():
    @T.prim_func
    def kernel(x: T.Tensor((2, 128), 'float32'), y: T.Tensor((2, 128), 'float32')):
        with T.Kernel(1, threads=32):
            x_shared = T.alloc_shared((2, 128), 'float32')
            for slot in T.unroll(2):
                T.async_copy(x[slot, 0:128], x_shared[slot, 0:128])
            T.ptx_wait_group(1)
            T.sync_threads()
            T.copy(x_shared[0, 0:128], y[0, 0:128])
            T.ptx_wait_group(0)
            T.sync_threads()
            T.copy(x_shared[1, 0:128], y[1, 0:128])

    return Launch(kernel, (torch.randn(2, 128), torch.empty(2, 128)))


@innocent
def output_that_the_caller_started():
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            if thread < 40:
                y[thread] = y[thread] + x[thread]

    return Launch(kernel, (torch.randn(64), torch.zeros(64)))


@innocent
def last_block_by_ticket_reads_all_partials():
    @T.prim_func
    def kernel(
        x: T.Tensor((8,), 'int32'),
        partial: T.Tensor((8,), 'int32'),
        ticket: T.Tensor((1,), 'int32'),
        total: T.Tensor((1,), 'int32'),
    ):
        with T.Kernel(8, threads=32) as pid:
            if T.get_thread_binding() == 0:
                T.atomic_add(partial[pid], x[pid])
                if T.atomic_add(ticket[0], 1, return_prev=True) == 7:
                    for i in T.serial(8):
                        T.atomic_add(total[0], T.atomic_add(partial[i], 0, return_prev=True))

    counts = [torch.zeros(n, dtype=torch.int32) for n in (8, 1, 1)]
    return Launch(kernel, (torch.arange(8, dtype=torch.int32), *counts))


@innocent
def conditions_protect_the_index_behind_them():
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            x_shared[thread] = x[thread]
            T.sync_threads()
            y[thread] = T.if_then_else(thread > 0, x_shared[thread - 1], 0.0)
            if thread < 63 and x_shared[thread + 1] > 0.0:
                y[thread] = 1.0
            if thread == 63 or x_shared[thread + 1] < 0.0:
                y[thread] = 2.0

    return Launch(kernel, (torch.randn(64), torch.empty(64)), BY_HAND)


@innocent
def every_thread_sets_the_flag_it_reads():
    @T.prim_func
    def kernel(y: T.Tensor((64,), 'int32')):
        with T.Kernel(2, threads=64):
            thread = T.get_thread_binding()
            flag_shared = T.alloc_shared((2,), 'int32')
            flag_shared[0] = 3
            y[thread] = flag_shared[0]
            if thread < 16:
                flag_shared[1] = 1
            if thread < 32:
                flag_shared[1] = 1
                y[thread] = flag_shared[1] + 2

    return Launch(kernel, (torch.empty(64, dtype=torch.int32),), BY_HAND)


@innocent
def neighbours_of_four_bits_share_a_byte():
    @T.prim_func
    def kernel(x: T.Tensor((2, 64), 'float32'), y: T.Tensor((2, 64), 'float4_e2m1fn')):
        with T.Kernel(2, threads=64) as pid:
            x_shared = T.alloc_shared((64,), 'float4_e2m1fn')
            for i in T.Parallel(64):
                x_shared[i] = T.cast(x[pid, i], 'float4_e2m1fn')
            T.sync_threads()
            for i in T.Parallel(64):
                y[pid, i] = x_shared[63 - i]

    return Launch(kernel, (torch.randn(2, 64), torch.empty(2, 32, dtype=torch.int8)), BY_HAND)


@innocent
def each_thread_reads_what_it_copied_itself():
    @T.prim_func
    def kernel(x: T.Tensor((128,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            T.ptx_cp_async(T.access_ptr(x_shared[thread * 4], 'w', 4), T.access_ptr(x[thread * 4], 'r', 4), 4)
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            for i in T.unroll(4):
                y[thread * 4 + i] = x_shared[thread * 4 + i]

    return Launch(kernel, (torch.randn(128), torch.empty(128)), BY_HAND)


@innocent
def what_was_read_is_used_ahead_of_the_arrival():
    @T.prim_func
    def kernel(x: T.Tensor((4, 128), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((128,), 'float32')
            sum_frag = T.alloc_fragment((128,), 'float32')
            x_frag = T.alloc_fragment((128,), 'float32')
            loaded, used = T.alloc_barrier([128]), T.alloc_barrier([128])
            if thread < 128:
                for row in T.serial(4):
                    if row > 0:
                        T.mbarrier_wait_parity(used[0], (row - 1) % 2)
                    T.tma_copy(x[row, 0:128], x_shared, barrier=loaded[0])
                    T.barrier_arrive(loaded[0])
            else:
                T.clear(sum_frag)
                for row in T.serial(4):
                    T.mbarrier_wait_parity(loaded[0], row % 2)
                    T.copy(x_shared, x_frag)
                    for i in T.Parallel(128):
                        sum_frag[i] = sum_frag[i] + x_frag[i]
                    T.barrier_arrive(used[0])
                T.copy(sum_frag, y)

    return Launch(kernel, (torch.randn(4, 128), torch.empty(128)))


@innocent
def fence_that_the_compiler_sets():
    @T.prim_func
    def kernel(a: T.Tensor((64, 64), 'bfloat16'), b: T.Tensor((64, 64), 'bfloat16'), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=128):
            a_shared = T.alloc_shared((64, 64), 'bfloat16')
            b_shared = T.alloc_shared((64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            for i, j in T.Parallel(64, 64):
                a_shared[i, j] = a[i, j]
            T.copy(b, b_shared)
            T.sync_threads()
            T.clear(c_frag)
            T.wgmma_gemm(a_shared, b_shared, c_frag)
            T.wait_wgmma(0)
            T.copy(c_frag, c)

    tensors = (torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.empty(64, 64))
    return Launch(kernel, tensors, BY_HAND)


@innocent
def blocks_that_hand_back_operands_at_different_times():
    @T.prim_func
    def kernel(
        a: T.Tensor((12, 64, 64), 'bfloat16'), b: T.Tensor((64, 64), 'bfloat16'), c: T.Tensor((3, 64, 64), 'float32')
    ):
        with T.Kernel(3, threads=256) as pid:
            thread = T.get_thread_binding()
            a_shared = T.alloc_shared((4, 64, 64), 'bfloat16')
            b_shared = T.alloc_shared((64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            loaded, used = T.alloc_barrier([128] * 4), T.alloc_barrier([128] * 4)
            T.copy(b, b_shared)
            T.sync_threads()
            if thread < 128:
                for step in T.serial(pid * 4 + 4):
                    if step > 3:
                        T.mbarrier_wait_parity(used[step % 4], (step // 4 - 1) % 2)
                    T.tma_copy(a[step, 0:64, 0:64], a_shared[step % 4, 0:64, 0:64], barrier=loaded[step % 4])
                    T.barrier_arrive(loaded[step % 4])
            else:
                T.clear(c_frag)
                for step in T.serial(pid * 4 + 4):
                    T.mbarrier_wait_parity(loaded[step % 4], step // 4 % 2)
                    T.wgmma_gemm(a_shared[step % 4, 0:64, 0:64], b_shared, c_frag)
                    T.wait_wgmma(1)
                    if step > 0:
                        T.barrier_arrive(used[(step - 1) % 4])
                T.wait_wgmma(0)
                T.copy(c_frag, c[pid, 0:64, 0:64])

    return Launch(kernel, (torch.randn(12, 64, 64).bfloat16(), torch.randn(64, 64).bfloat16(), torch.empty(3, 64, 64)))


@innocent
def compiler_fences_for_a_role_that_stores_in_its_loop():
    @T.prim_func
    def kernel(a: T.Tensor((2, 64, 64), 'bfloat16'), c: T.Tensor((64, 64), 'float32')):
        with T.Kernel(1, threads=256):
            thread = T.get_thread_binding()
            a_shared = T.alloc_shared((64, 64), 'bfloat16')
            b_shared = T.alloc_shared((64, 64), 'bfloat16')
            b_frag = T.alloc_fragment((64, 64), 'bfloat16')
            c_frag = T.alloc_fragment((64, 64), 'float32')
            stored, free = T.alloc_barrier([128]), T.alloc_barrier([128])
            if thread < 128:
                for k in T.serial(2):
                    T.mbarrier_wait_parity(free[0], (k & 1) ^ 1)
                    for i, j in T.Parallel(64, 64):
                        a_shared[i, j] = a[k, i, j]
                    T.barrier_arrive(stored[0])
            else:
                T.clear(c_frag)
                for k in T.serial(2):
                    T.mbarrier_wait_parity(stored[0], k & 1)
                    T.copy(a[k, :, :], b_frag)
                    T.copy(b_frag, b_shared)
                    T.wgmma_gemm(a_shared, b_shared, c_frag)
                    T.wait_wgmma(0)
                    T.barrier_arrive(free[0])
                T.copy(c_frag, c)

    return Launch(kernel, (torch.randn(2, 64, 64).bfloat16(), torch.empty(64, 64)))
