"""Softmax over blocks of scores: maximum and sum of a row grow with every block, earlier results are rescaled.

Scores are logarithms to base 2. A row that has seen nothing has the maximum -inf and the sum 0.
"""

import math
from typing import Any

from tile_kernels.core.lang import T, macro


def finite_top(top: Any) -> Any:
    """The maximum of a row to subtract; a row that has seen nothing must not give inf - inf."""
    return T.if_then_else(top == -math.inf, T.float32(0.0), top)


@macro
def softmax_step(scores, top, total, factor, block_top, block_sum):
    """Turn a block of scores into weights relative to the new maximum.

    `factor` is what earlier sums of weighted values are to be multiplied with; `block_top` and `block_sum` are scratch.
    """
    rows, columns = scores.shape
    T.reduce_max(scores, block_top, dim=1)
    for i in T.Parallel(rows):
        block_top[i] = T.max(top[i], block_top[i])
        factor[i] = T.exp2(top[i] - finite_top(block_top[i]))
        top[i] = block_top[i]
    for i, j in T.Parallel(rows, columns):
        scores[i, j] = T.exp2(scores[i, j] - finite_top(top[i]))
    T.reduce_sum(scores, block_sum, dim=1)
    for i in T.Parallel(rows):
        total[i] = total[i] * factor[i] + block_sum[i]
