"""The `k` largest values of a row and where they are, by one warp per row.

Lane `l` holds the columns `l, l + 32, l + 64, ...` in registers. Each of the `k` rounds finds the largest value left:
first within the lane, then between lanes by five exchanges (a butterfly). Of equal values the smaller column wins, in
the lane because columns ascend, between lanes because the columns are compared. The winner is struck out and kept by
the lane with the number of the round, so that one store per warp writes all results.
"""

import tilelang.language as T
import torch
from _run import Example, main


def warp_topk_kernel(num_columns: int, k: int, num_warps: int = 4):
    """Build the kernel for one row length and one `k <= 32`."""
    num_rows = T.dynamic('num_rows')
    per_lane = -(-num_columns // 32)

    @T.prim_func
    def warp_topk(
        x: T.Tensor((num_rows, num_columns), 'float32'),
        values: T.Tensor((num_rows, k), 'float32'),
        columns: T.Tensor((num_rows, k), 'int32'),
    ):
        with T.Kernel(T.ceildiv(num_rows, num_warps), threads=32 * num_warps) as pid:
            lane = T.get_thread_binding() % 32
            row = pid * num_warps + T.get_thread_binding() // 32
            x_local = T.alloc_local((per_lane,), 'float32')
            best = T.alloc_var('float32')
            best_column = T.alloc_var('int32')
            other = T.alloc_var('float32')
            other_column = T.alloc_var('int32')
            kept = T.alloc_var('float32', init=0.0)
            kept_column = T.alloc_var('int32', init=0)
            if row < num_rows:
                for i in T.unroll(per_lane):
                    x_local[i] = T.if_then_else(
                        i * 32 + lane < num_columns, x[row, i * 32 + lane], -T.infinity('float32')
                    )
                for step in T.serial(k):
                    best = -T.infinity('float32')
                    best_column = num_columns
                    for i in T.unroll(per_lane):
                        if x_local[i] > best:
                            best = x_local[i]
                            best_column = i * 32 + lane
                    for level in T.unroll(5):
                        other = T.shfl_xor(best, 16 >> level)
                        other_column = T.shfl_xor(best_column, 16 >> level)
                        if other > best or (other == best and other_column < best_column):
                            best = other
                            best_column = other_column
                    for i in T.unroll(per_lane):
                        if i * 32 + lane == best_column:
                            x_local[i] = -T.infinity('float32')
                    if lane == step:
                        kept = best
                        kept_column = best_column
                if lane < k:
                    values[row, lane] = kept
                    columns[row, lane] = kept_column

    return warp_topk


def example(num_rows: int = 45, num_columns: int = 200, k: int = 8) -> Example:
    """Few distinct values, so that ties decide; a stable sort takes the smaller column, too."""
    x = torch.randint(-20, 20, (num_rows, num_columns), generator=torch.Generator().manual_seed(0)).float()
    values, columns = (result[:, :k] for result in x.sort(dim=1, descending=True, stable=True))
    outputs = (torch.empty(num_rows, k), torch.empty(num_rows, k, dtype=torch.int32))
    return Example(warp_topk_kernel(num_columns, k), (x,), outputs, (values, columns.int()))


if __name__ == '__main__':
    main('warp_topk', example())
