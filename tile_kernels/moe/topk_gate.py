"""Top-k gate: the k best experts of every token.

    topk_idx[t, :] = the num_topk experts e of largest scores[t, e], best first, the smaller e first among equals

One warp owns one token or two and keeps their scores in registers, so they are read once; `_selection` has the choice.
Memory bound for many tokens: the floor is reading scores and writing topk_idx.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._macros import WARP, WARP_PASS_CONFIGS, Place, RowLayout, load_rows
from tile_kernels.moe._selection import Ranking, select_topk

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_EXPERTS = 4096
MAX_TOPK = 64


# Config -------------------------------------------------------------------------------------


def choose(num_experts: int, num_topk: int, dtype: torch.dtype, vector_bytes: int, packed: bool, size: int) -> dict:
    """Few tokens spread over the SMs, one per block; from two waves of blocks on a warp ranks two rows at once."""
    if size <= 1024:
        return dict(num_warps=1, rows=1)
    return dict(num_warps=1, rows=2) if size >= 8192 else dict(num_warps=4, rows=1)


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=dict(num_warps=(1, 2, 4, 8), rows=(1, 2)), pass_configs=WARP_PASS_CONFIGS)
def topk_gate_kernel(
    num_experts: int, num_topk: int, dtype: torch.dtype, vector_bytes: int, packed: bool, *, num_warps: int, rows: int
):
    """Choice of one or two tokens per warp."""
    layout = RowLayout.of(num_experts, dtype.itemsize, vector_bytes)
    ranking = Ranking(layout, num_topk)
    rows = max(ranking.rows_by_cut(rows), 1)
    num_tokens = T.dynamic('num_tokens')
    row_stride = num_experts if packed else T.dynamic('row_stride')

    @T.prim_func
    def topk_gate(
        scores: T.StridedTensor((num_tokens, num_experts), (row_stride, 1), T.dtype(dtype)),
        topk_idx: T.Tensor((num_tokens, num_topk), 'int64'),
    ):
        with T.Kernel(T.ceildiv(num_tokens, num_warps * rows), threads=num_warps * WARP) as pid:
            T.assume(row_stride % layout.vec == 0)
            x_local = T.alloc_local((rows, layout.num_slots), 'float32')
            expert_local = T.alloc_local((ranking.num_picks,), 'int32')
            value_local = T.alloc_local((ranking.num_picks,), 'float32')
            tokens_local = T.alloc_local((rows,), 'int32')
            token = T.alloc_var('int32')
            tx = T.get_thread_binding()
            at = Place(num_warps, rows, tx, tokens_local, token)
            first_token = (pid * num_warps + at.warp) * rows

            if first_token < num_tokens:
                for r in T.unroll(rows):
                    tokens_local[r] = T.min(first_token + r, num_tokens - 1)
                token = T.min(first_token + at.part, num_tokens - 1)
                load_rows(scores, at, layout, x_local)
                select_topk(ranking, scores, None, at, x_local, expert_local, value_local)
                for p in T.unroll(ranking.num_picks):
                    if p * WARP + at.sublane < num_topk and first_token + at.part < num_tokens:
                        topk_idx[token, p * WARP + at.sublane] = T.cast(expert_local[p], 'int64')

    return topk_gate


# Op -----------------------------------------------------------------------------------------


@op(outputs='topk_idx')
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """The experts with the largest scores, best first.

    Equal scores take the smaller expert first; NaN ranks below everything, -inf included.

    Args:
        scores: (num_tokens, num_experts) float32, bfloat16 or float16; rows may be strided; 1 to 4096 experts.
        num_topk: experts per token, from 1 to min(num_experts, 64).

    Returns:
        int64 (num_tokens, num_topk).
    """
    num_tokens, num_experts = check.shape(scores, 'scores', 'num_tokens num_experts', dtype=DTYPES)
    check.at_least(num_topk, 1, 'num_topk')
    check.at_most(num_topk, min(num_experts, MAX_TOPK), 'num_topk')
    check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
    check.unit_stride(scores, 'scores')
    topk_idx = scores.new_empty(num_tokens, num_topk, dtype=torch.int64)
    static = (num_experts, num_topk, scores.dtype, check.vector_bytes(scores), scores.is_contiguous())
    launch(topk_gate_kernel, static, scores, topk_idx)
    return topk_idx


# Cases --------------------------------------------------------------------------------------


def make(num_tokens: int, num_experts: int, num_topk: int, dtype: torch.dtype, ties: bool = True) -> dict:
    """Normal scores, rounded to steps of 1/8 where rows shall hold ties (rare in models, so not timed)."""
    scores = torch.randn(num_tokens, num_experts)
    return dict(scores=(scores.mul(8).round().div(8) if ties else scores).to(dtype), num_topk=num_topk)


#: Experts and choices: those of models, then a single expert, odd rows, more choices than lanes, the largest row.
SHAPES = [(72, 6), (32, 6), (64, 6), (96, 6), (16, 6), (36, 6), (108, 6), (128, 6), (144, 6), (256, 8)]
SHAPES += [(1, 1), (130, 17), (384, 8), (512, 33), (1000, 10), (4096, 64)]

topk_gate.cases(
    make=make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 9], num_experts=[256], num_topk=[8], dtype=DTYPES[:1])
    + grid(num_tokens=[5], num_experts=[36, 72], num_topk=[6], dtype=DTYPES)
    + grid(num_tokens=[3], num_experts=[64], num_topk=[64], dtype=DTYPES[:1]),
    full=[
        dict(num_tokens=4001, num_experts=num_experts, num_topk=num_topk, dtype=dtype)
        for num_experts, num_topk in SHAPES
        for dtype in DTYPES
    ],
    bench=grid(num_tokens=[1, 64, 4096, 16384], num_experts=[256], num_topk=[8], dtype=DTYPES[:1], ties=[False])
    + grid(num_tokens=[8192], num_experts=[128], num_topk=[6], dtype=DTYPES[:1], ties=[False])
    + grid(num_tokens=[4001], num_experts=[72], num_topk=[6], dtype=DTYPES[:1], ties=[False])
    + grid(num_tokens=[4096], num_experts=[384], num_topk=[8], dtype=DTYPES[:1], ties=[False])
    + grid(num_tokens=[16384], num_experts=[256], num_topk=[8], dtype=DTYPES[1:2], ties=[False]),
)
