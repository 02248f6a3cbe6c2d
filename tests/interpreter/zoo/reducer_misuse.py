"""Reducers out of order: start, updates, end, and only then the result."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen


@specimen('ReducerMisuse', 'sum_reducer')
def update_ahead_of_the_start(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4,), 'float32')):
        with T.Kernel(1, threads=64):
            sum_reducer = T.alloc_reducer((4,), 'float32', op='sum')
            sum_frag = T.alloc_fragment((4,), 'float32')
            if not bug:
                T.reducer_init(sum_reducer)
            for i, j in T.Parallel(4, 64):
                T.reducer_update(sum_reducer[i], x[i, j])  # BUG
            T.finalize_reducer(sum_reducer, sum_frag)
            T.copy(sum_frag, y)

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4)))


@specimen('ReducerMisuse', 'sum_reducer')
def reducer_without_an_end(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4,), 'float32')):
        with T.Kernel(1, threads=64):
            sum_reducer = T.alloc_reducer((4,), 'float32', op='sum')
            sum_frag = T.alloc_fragment((4,), 'float32')
            T.clear(sum_frag)
            T.reducer_init(sum_reducer)
            for i, j in T.Parallel(4, 64):
                T.reducer_update(sum_reducer[i], x[i, j])  # BUG
            if not bug:
                T.finalize_reducer(sum_reducer, sum_frag)
            T.copy(sum_frag, y)

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4)))


@specimen('ReducerMisuse', 'sum_reducer')
def result_read_from_the_reducer_itself(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4,), 'float32')):
        with T.Kernel(1, threads=64):
            sum_reducer = T.alloc_reducer((4,), 'float32', op='sum')
            sum_frag = T.alloc_fragment((4,), 'float32')
            T.reducer_init(sum_reducer)
            for i, j in T.Parallel(4, 64):
                T.reducer_update(sum_reducer[i], x[i, j])
            T.finalize_reducer(sum_reducer, sum_frag)
            T.copy(sum_reducer if bug else sum_frag, y)  # BUG

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4)))


@specimen('ReducerMisuse', 'sum_reducer')
def older_reducer_read_before_its_end(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 64), 'float32'), y: T.Tensor((4,), 'float32')):
        with T.Kernel(1, threads=64):
            sum_reducer = T.alloc_reducer((4,), 'float32', op='sum', replication='all')
            for _ in T.serial(2):
                T.clear(sum_reducer)
                for i, j in T.Parallel(4, 64):
                    sum_reducer[i] += x[i, j]
                if not bug:
                    T.finalize_reducer(sum_reducer)
                for i in T.Parallel(4):
                    y[i] = sum_reducer[i]  # BUG
            if bug:
                T.finalize_reducer(sum_reducer)

    return Launch(kernel, (torch.randn(4, 64), torch.empty(4)))
