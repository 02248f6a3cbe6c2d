"""Map tokens to experts: the position of every slot (token, k) when rows are sorted by expert.

    count[e] = number of slots of expert e                  slots in the order t * num_topk + k
    end[e]   = sum of align(count[e'], alignment) over e' <= e
    position = start[e] + number of earlier slots of e      so inside an expert rows are in the order of tokens

The slots are cut into chunks, and a chunk into one run of slots per warp. The first launch counts the experts of each
chunk. The last launch has one block per chunk and starts at the same time (PDL). Its blocks sort their own slots by
expert: `match_any` finds lanes with the same expert, and scans go over warps and experts. Then they sum the counts of
the chunks before theirs and of all chunks, and write runs of positions. With very many counts, a third launch does the
sums. With few slots, every block counts all of them, and there is one launch. The result does not depend on chunks,
warps or SMs. Latency bound: it reads the choice once and writes the maps once, which are few bytes.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._samples import random_choice
from tile_kernels.moe.fused_mapping_kernels import MIN_CHUNK, fused_mapping_kernel

MAX_EXPERTS = 4096
MAX_PLACES = 2**30  # int32 indices of the last block may exceed the last position by less than that

# Ops ----------------------------------------------------------------------------------------


@op(
    outputs='pos_to_expert pos_to_token pos_to_token_topk token_topk_to_pos '
    'expert_start expert_end num_tokens_per_expert overflow'
)
def fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded: int, alignment: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the position of every slot (token, k): experts one after another, rows in token order.

    Args:
        topk_idx: (num_tokens, num_topk) int64 or int32, contiguous; -1 (or any number that is no expert) = not routed.
        num_experts: up to 4096.
        num_expanded: number of positions; slots beyond get none.
        alignment: every expert begins at a multiple of it.

    Returns:
        All int32. For each position `pos_to_expert`, `pos_to_token`, `pos_to_token_topk` (token * num_topk + k), all -1
        in padding. For each slot `token_topk_to_pos`, -1 if it has no position. For each expert `expert_start` and
        `expert_end` (at most num_expanded), and `num_tokens_per_expert`, its aligned number of rows. `overflow` (1,) is
        the number of missing positions, 0 if all fit.
    """
    num_tokens, num_topk = check.shape(topk_idx, 'topk_idx', 'num_tokens num_topk', dtype=(torch.int64, torch.int32))
    check.at_least(num_topk, 1, 'num_topk')
    check.contiguous(topk_idx, 'topk_idx')
    check.at_least(num_experts, 1, 'num_experts')
    check.at_most(num_experts, MAX_EXPERTS, 'num_experts')
    check.at_least(alignment, 1, 'alignment')
    check.at_least(num_expanded, 0, 'num_expanded')
    check.at_most(num_expanded, MAX_PLACES, 'num_expanded')
    check.at_most(num_tokens * num_topk + num_experts * alignment, MAX_PLACES, 'number of places')

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=topk_idx.device)

    places = (empty(num_expanded), empty(num_expanded), empty(num_expanded), empty(num_tokens, num_topk))
    experts = (empty(num_experts), empty(num_experts), empty(num_experts), empty(1))
    counts = empty(num_tokens * num_topk // MIN_CHUNK + 2, num_experts)
    static = (num_experts, num_topk, topk_idx.dtype)
    # without tokens the kernel still writes padding
    size = torch.sym_max(num_tokens * num_topk, 1)
    launch(fused_mapping_kernel, static, topk_idx, counts, *places, *experts, alignment, size=size)
    return *places, *experts


def places_for(num_tokens: int, num_topk: int, num_experts: int, alignment: int) -> int:
    """Number of positions that any choice of experts fits into."""
    check.integer(num_experts, 'num_experts')
    return (num_tokens * num_topk + (alignment - 1) * num_experts) // alignment * alignment


@check.names(num_expanded='num_expanded_tokens')
def get_fused_mapping(
    topk_idx: Tensor, num_experts: int, num_expanded_tokens: int, alignment: int, force_no_sync: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Map tokens to experts, with maps of the exact size (the host waits) or of a given size (it does not).

    With `num_expanded_tokens` = 0 the maps have as many positions as are in use. The numbers of rows of the experts are
    also returned as a list, so the host waits for the device. With a number, or with `force_no_sync`, the maps have
    exactly that many positions, the host does not wait, and the list is empty. Slots beyond get no position. This
    happened if `num_tokens_per_expert.sum() > num_expanded_tokens`.

    Args:
        topk_idx: (num_tokens, num_topk) int64 or int32, contiguous; -1 = not routed.
        num_experts: up to 4096.
        num_expanded_tokens: number of positions, 0 for as many as needed.
        alignment: every expert begins at a multiple of it.
        force_no_sync: never wait for the device.

    Returns:
        pos_to_expert, pos_to_token, pos_to_token_topk, token_topk_to_pos, expert_start, expert_end,
        num_tokens_per_expert (all int32, see `fused_mapping`) and the list.
    """
    check.at_least(alignment, 1, 'alignment')
    if num_expanded_tokens or force_no_sync:
        return *fused_mapping(topk_idx, num_experts, num_expanded_tokens, alignment)[:7], []
    num_tokens, num_topk = check.shape(topk_idx, 'topk_idx', 'num_tokens num_topk')
    num_expanded = places_for(num_tokens, num_topk, num_experts, alignment)
    maps = fused_mapping(topk_idx, num_experts, num_expanded, alignment)
    rows = maps[6].tolist()
    used = sum(rows)
    return maps[0][:used], maps[1][:used], maps[2][:used], *maps[3:7], rows


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    alignment: int,
    dtype: torch.dtype = torch.int64,
    unrouted: float = 0.2,
    missing: int = 0,
) -> dict:
    """`missing` positions fewer than any choice fits into."""
    num_expanded = places_for(num_tokens, num_topk, num_experts, alignment) - missing
    topk_idx = random_choice(num_tokens, num_topk, num_experts, unrouted).to(dtype)
    return dict(topk_idx=topk_idx, num_experts=num_experts, num_expanded=num_expanded, alignment=alignment)


fused_mapping.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 65], num_topk=[6], num_experts=[9], alignment=[1, 16])
    + grid(
        num_tokens=[600], num_topk=[8], num_experts=[32], alignment=[64], dtype=[torch.int64, torch.int32]
    )  # 3 chunks
    + grid(num_tokens=[40], num_topk=[9], num_experts=[1, 600, 4096], alignment=[2])  # all splits over lanes
    + grid(num_tokens=[50], num_topk=[4], num_experts=[8], alignment=[8], unrouted=[0.0, 1.0])
    + grid(num_tokens=[50], num_topk=[4], num_experts=[8], alignment=[8], unrouted=[0.0], missing=[120]),  # overflow
    full=grid(num_tokens=[4001, 32001], num_topk=[2, 8, 9], num_experts=[4, 32, 72, 256, 4096], alignment=[1, 128])
    + grid(num_tokens=[100003], num_topk=[8], num_experts=[32, 256], alignment=[64]),
    bench=grid(num_tokens=[21987], num_topk=[8], num_experts=[32], alignment=[128])
    + grid(num_tokens=[64, 4096, 16384], num_topk=[8], num_experts=[256], alignment=[128], unrouted=[0.0])
    + grid(num_tokens=[8001], num_topk=[9], num_experts=[4096], alignment=[1], unrouted=[0.0]),
)
