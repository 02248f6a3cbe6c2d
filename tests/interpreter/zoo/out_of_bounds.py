"""Indices outside a buffer: shared, fragment and local memory, and unguarded global memory."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen

UNGUARDED = {'tl.disable_safe_memory_legalize': True}


@specimen('OutOfBounds', 'x_shared')
def shared_store_past_the_end(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64 + 1 - bug,), 'float32')
            x_shared[thread + 1] = x[thread]  # BUG
            T.sync_threads()
            y[thread] = T.if_then_else(thread > 0, x_shared[thread], 0.0)

    return Launch(kernel, (torch.randn(64), torch.empty(64)))


@specimen('OutOfBounds', 'x_shared')
def shared_stencil_forgets_the_last_thread(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            x_shared[thread] = x[thread]
            T.sync_threads()
            y[thread] = x_shared[thread]
            if thread < 63 + bug:
                y[thread] = x_shared[thread + 1] - x_shared[thread]  # BUG

    return Launch(kernel, (torch.randn(64), torch.empty(64)))


@specimen('OutOfBounds', 'x_shared')
def shared_column_runs_into_the_next_row(bug):
    @T.prim_func
    def kernel(x: T.Tensor((8, 16), 'float32'), y: T.Tensor((8, 16), 'float32')):
        with T.Kernel(1, threads=128):
            x_shared = T.alloc_shared((8, 16), 'float32')
            T.copy(x, x_shared)
            for i, j in T.Parallel(7, 16):
                y[i, j] = x_shared[i, (j + 1) % (16 + bug)]  # BUG
            for j in T.Parallel(16):
                y[7, j] = 0.0

    return Launch(kernel, (torch.randn(8, 16), torch.empty(8, 16)))


@specimen('OutOfBounds', 'x_shared')
def shared_tile_copied_to_an_offset(bug):
    @T.prim_func
    def kernel(x: T.Tensor((96,), 'float32'), y: T.Tensor((96,), 'float32')):
        with T.Kernel(1, threads=32):
            x_shared = T.alloc_shared((96,), 'float32')
            T.copy(x[0:32], x_shared[0:32])
            T.copy(x[32:96], x_shared[32 + bug * 8 : 96 + bug * 8])  # BUG
            T.copy(x_shared[0:32], y[0:32])
            T.copy(x_shared[32 + bug * 8 : 96], y[32 + bug * 8 : 96])
            if bug:
                T.clear(y[32:40])

    return Launch(kernel, (torch.randn(96), torch.empty(96)))


@specimen('OutOfBounds', 'x_frag')
def fragment_loop_longer_than_the_tile(bug):
    @T.prim_func
    def kernel(y: T.Tensor((128,), 'float32')):
        with T.Kernel(1, threads=64):
            x_frag = T.alloc_fragment((128,), 'float32')
            for i in T.Parallel(128 + 64 * bug):
                x_frag[i] = 1.0  # BUG
            T.copy(x_frag, y)

    return Launch(kernel, (torch.empty(128),))


@specimen('OutOfBounds', 'amax_frag')
def fragment_group_index_rounds_up(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4, 64), 'float32')):
        with T.Kernel(1, threads=64):
            x_frag = T.alloc_fragment((4, 64), 'float32')
            amax_frag = T.alloc_fragment((4, 4), 'float32')
            T.copy(x, x_frag)
            T.reduce_absmax(T.reshape(x_frag, (4, 4, 16)), amax_frag, dim=2)
            for i, j in T.Parallel(4, 64):
                y[i, j] = x_frag[i, j] / amax_frag[i, (j + 15 * bug) // 16]  # BUG

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4, 64)))


@specimen('OutOfBounds', 'sum_frag')
def fragment_reduced_along_the_other_axis(bug):
    @T.prim_func
    def kernel(x: T.Tensor((32, 64), 'float32'), y: T.Tensor((32, 64), 'float32')):
        with T.Kernel(1, threads=64):
            x_frag = T.alloc_fragment((32, 64), 'float32')
            sum_frag = T.alloc_fragment((32,), 'float32')
            T.copy(x, x_frag)
            T.reduce_sum(x_frag, sum_frag, dim=1)
            for i, j in T.Parallel(32, 64):
                y[i, j] = x_frag[i, j] - sum_frag[j if bug else i]  # BUG

    return Launch(kernel, (torch.randn(32, 64), torch.empty(32, 64)))


@specimen('OutOfBounds', 'x_local')
def local_loop_one_too_far(bug):
    @T.prim_func
    def kernel(x: T.Tensor((256,), 'float32'), y: T.Tensor((256,), 'float32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            x_local = T.alloc_local((8,), 'float32')
            for i in T.serial(8 + bug):
                x_local[i] = x[thread * 8 + i]  # BUG
            for i in T.serial(8):
                y[thread * 8 + i] = x_local[i]

    return Launch(kernel, (torch.randn(256), torch.empty(256)))


@specimen('OutOfBounds', 'x_local')
def local_index_from_data(bug):
    @T.prim_func
    def kernel(ids: T.Tensor((32,), 'int32'), y: T.Tensor((32,), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            x_local = T.alloc_local((4,), 'int32')
            for i in T.unroll(4):
                x_local[i] = i * i
            y[thread] = x_local[ids[thread]]  # BUG

    ids = torch.arange(32, dtype=torch.int32) % 4
    ids[17] += 4 * bug
    return Launch(kernel, (ids, torch.empty(32, dtype=torch.int32)))


@specimen('OutOfBounds', 'x_local')
def local_two_dimensional_swapped(bug):
    @T.prim_func
    def kernel(y: T.Tensor((32, 8), 'int32')):
        with T.Kernel(1, threads=32):
            thread = T.get_thread_binding()
            x_local = T.alloc_local((2, 4), 'int32')
            for i in T.unroll(2):
                for j in T.unroll(4):
                    x_local[j if bug else i, i if bug else j] = i * 4 + j  # BUG
            for i in T.unroll(8):
                y[thread, i] = x_local[i // 4, i % 4]

    return Launch(kernel, (torch.empty(32, 8, dtype=torch.int32),))


@specimen('OutOfBounds', 'x')
def global_load_past_the_end_unguarded(bug):
    @T.prim_func
    def kernel(x: T.Tensor((100,), 'float32'), y: T.Tensor((128,), 'float32')):
        with T.Kernel(2, threads=64) as pid:
            for i in T.Parallel(64):
                y[pid * 64 + i] = x[pid * 64 + i]  # BUG

    return Launch(kernel, (torch.randn(100), torch.empty(128)), UNGUARDED if bug else {})


@specimen('OutOfBounds', 'y')
def global_store_past_the_end_unguarded(bug):
    @T.prim_func
    def kernel(x: T.Tensor((100,), 'float32'), y: T.Tensor((100,), 'float32')):
        with T.Kernel(2, threads=64) as pid:
            token_idx = pid * 64 + T.get_thread_binding()
            if token_idx < (128 if bug else 100):
                y[token_idx] = T.if_then_else(token_idx < 100, x[token_idx], 0.0)  # BUG

    return Launch(kernel, (torch.randn(100), torch.empty(100)), UNGUARDED)


@specimen('OutOfBounds', 'x')
def global_tile_past_the_last_row_unguarded(bug):
    @T.prim_func
    def kernel(x: T.Tensor((40, 32), 'float32'), y: T.Tensor((40, 32), 'float32')):
        with T.Kernel(T.ceildiv(40, 16), threads=64) as pid:
            x_frag = T.alloc_fragment((16, 32), 'float32')
            for i, j in T.Parallel(16, 32):
                x_frag[i, j] = x[pid * 16 + i, j]  # BUG
            T.copy(x_frag, y[pid * 16, 0])

    return Launch(kernel, (torch.randn(40, 32), torch.empty(40, 32)), UNGUARDED if bug else {})


@specimen('OutOfBounds', 'x')
def global_gather_below_zero(bug):
    @T.prim_func
    def kernel(x: T.Tensor((50, 32), 'float32'), ids: T.Tensor((8,), 'int32'), y: T.Tensor((8, 32), 'float32')):
        with T.Kernel(8, threads=32) as pid:
            for j in T.Parallel(32):
                y[pid, j] = x[ids[pid], j]  # BUG

    ids = torch.tensor([4, 0, 49, 7, -1 if bug else 1, 2, 2, 3], dtype=torch.int32)
    return Launch(kernel, (torch.randn(50, 32), ids, torch.empty(8, 32)), UNGUARDED)


@specimen('OutOfBounds', 'y')
def global_scatter_below_zero(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            y[63 - thread - bug] = x[thread]  # BUG
            if bug:
                y[63] = 0.0

    return Launch(kernel, (torch.randn(64), torch.empty(64)), UNGUARDED)


@specimen('OutOfBounds', 'x_shared')
def shared_neighbour_below_zero(bug):
    @T.prim_func
    def kernel(x: T.Tensor((64,), 'float32'), y: T.Tensor((64,), 'float32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            x_shared = T.alloc_shared((64,), 'float32')
            x_shared[thread] = x[thread]
            T.sync_threads()
            y[thread] = x_shared[T.max(thread - 1, 0 - bug)]  # BUG

    return Launch(kernel, (torch.randn(64), torch.empty(64)))
