"""Load fraction of every expert, as the auxiliary balance loss takes it.

    f[e] = count[e] * num_experts / (num_tokens * num_aux_topk)

The kernel is that of `group_count`, which writes fractions instead of counts.
"""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.op import op
from tile_kernels.moe.group_count import BENCH, FULL, SMOKE, launch_count, make_choice

# Op -----------------------------------------------------------------------------------------


@op(outputs='fraction')
def aux_fi(topk_idx: Tensor, num_experts: int, num_aux_topk: int) -> Tensor:
    """Load fraction of each expert, f of the auxiliary balance loss; 1 everywhere if the load is even.

    Args:
        topk_idx: (num_tokens, num_topk) int64 or int32, contiguous; numbers that are no expert are ignored.
        num_experts: up to 8192.
        num_aux_topk: choices per token that count as an even load.

    Returns:
        (num_experts,) float32, count * num_experts / (num_tokens * num_aux_topk); 0 without tokens. Deterministic.
    """
    check.at_least(num_aux_topk, 1, 'num_aux_topk')
    return launch_count(topk_idx, 'topk_idx', num_experts, num_aux_topk)


# Cases --------------------------------------------------------------------------------------

aux_fi.cases(
    make=lambda num_groups, num_topk, **case: dict(
        topk_idx=make_choice(num_groups=num_groups, num_topk=num_topk, **case),
        num_experts=num_groups,
        num_aux_topk=num_topk,
    ),
    match='bitwise',
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
)
