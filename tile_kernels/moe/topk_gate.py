"""Top-k gate: the k best experts of every token.

    topk_idx[t, :] = the num_topk experts e of largest scores[t, e], best first, the smaller e first among equals

One warp owns one or two tokens and keeps their scores in registers, so scores are read once. `topk_gate_kernels` has
the method. Memory bound for many tokens: the floor is reading scores and writing topk_idx.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._checks import DTYPES, MAX_EXPERTS, MAX_TOPK
from tile_kernels.moe.topk_gate_kernels import topk_gate_kernel

# Op -----------------------------------------------------------------------------------------


@op(outputs='topk_idx')
def topk_gate(scores: Tensor, num_topk: int) -> Tensor:
    """The experts with the largest scores, best first.

    Of equal scores the smaller expert comes first. NaN ranks below everything, including -inf.

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
    """Normal scores; with `ties` rounded to steps of 1/8. Models rarely have ties, so timed cases have none."""
    scores = torch.randn(num_tokens, num_experts)
    return dict(scores=(scores.mul(8).round().div(8) if ties else scores).to(dtype), num_topk=num_topk)


#: Experts and top-k: those of models, then one expert, odd rows, more than 32 chosen, the largest row.
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
