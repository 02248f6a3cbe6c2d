"""Output elements that nobody writes."""

import tilelang.language as T
import torch

from .specimen import Launch, specimen


@specimen('UnwrittenOutput', 'y')
def grid_rounds_down(bug):
    @T.prim_func
    def kernel(x: T.Tensor((100,), 'float32'), y: T.Tensor((100,), 'float32')):
        with T.Kernel(100 // 32 if bug else T.ceildiv(100, 32), threads=32) as pid:
            for i in T.Parallel(32):
                y[pid * 32 + i] = x[pid * 32 + i]

    return Launch(kernel, (torch.randn(100), torch.empty(100)))


@specimen('UnwrittenOutput', 'y')
def guard_off_by_one(bug):
    num_tokens = T.dynamic('num_tokens')

    @T.prim_func
    def kernel(x: T.Tensor((num_tokens,), 'float32'), y: T.Tensor((num_tokens,), 'float32')):
        with T.Kernel(T.ceildiv(num_tokens, 64), threads=64) as pid:
            token_idx = pid * 64 + T.get_thread_binding()
            if token_idx < num_tokens - bug:
                y[token_idx] = x[token_idx]

    return Launch(kernel, (torch.randn(70), torch.empty(70)))


@specimen('UnwrittenOutput', 'y_sf')
def scale_factors_of_the_last_group_forgotten(bug):
    @T.prim_func
    def kernel(x: T.Tensor((4, 256), 'float32'), y: T.Tensor((4, 256), 'float32'), y_sf: T.Tensor((4, 4), 'float32')):
        with T.Kernel(4, threads=64) as pid:
            x_frag = T.alloc_fragment((256,), 'float32')
            amax_frag = T.alloc_fragment((4,), 'float32')
            T.copy(x[pid, 0:256], x_frag)
            T.reduce_absmax(T.reshape(x_frag, (4, 64)), amax_frag, dim=1)
            for g in T.Parallel(4):
                if g < 4 - bug:
                    y_sf[pid, g] = amax_frag[g]
            for j in T.Parallel(256):
                y[pid, j] = x_frag[j] / amax_frag[j // 64]

    return Launch(kernel, (torch.randn(4, 256), torch.empty(4, 256), torch.empty(4, 4)))


@specimen('UnwrittenOutput', 'y')
def branch_for_invalid_ids_stores_nothing(bug):
    @T.prim_func
    def kernel(ids: T.Tensor((64,), 'int32'), y: T.Tensor((64,), 'int32')):
        with T.Kernel(1, threads=64):
            thread = T.get_thread_binding()
            if ids[thread] >= 0:
                y[thread] = ids[thread] * 2
            elif not bug:
                y[thread] = -1

    ids = torch.arange(64, dtype=torch.int32)
    ids[5] = -1
    return Launch(kernel, (ids, torch.empty(64, dtype=torch.int32)))
