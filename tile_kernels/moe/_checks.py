"""Host checks and argument translation that several ops share."""

import math

import torch
from torch import Tensor

from tile_kernels.core import check

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_EXPERTS = 4096
MAX_TOPK = 64

#: Type that moves an element of so many bytes as bits.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Gates --------------------------------------------------------------------------------------


def check_groups(
    num_experts: int, top_k: int, num_groups: int | None, num_topk_groups: int | None, name: str = 'top_k'
) -> tuple[int, int]:
    """Check the groups. Without groups, all experts form one group."""
    if num_groups is None and num_topk_groups is None:
        return 1, 1
    if num_groups is None or num_topk_groups is None:
        check.fail('num_groups', 'must come with num_topk_groups', f'{num_groups} and {num_topk_groups}')
    check.integer(num_groups, 'num_groups', 1)
    check.equal(num_experts % num_groups, 0, 'num_experts % num_groups')
    check.integer(num_topk_groups, 'num_topk_groups', 1)
    check.at_most(num_topk_groups, num_groups, 'num_topk_groups')
    check.at_most(top_k, num_experts // num_groups * num_topk_groups, name)
    return num_groups, num_topk_groups


def num_shared_slots(num_shared_experts: int, use_shared_as_routed: bool) -> int:
    """Shared experts among the slots of a token."""
    check.at_least(num_shared_experts, 0, 'num_shared_experts')
    return num_shared_experts if use_shared_as_routed else 0


def empty_slots(logits: Tensor, num_topk: int, num_shared: int) -> tuple[Tensor, Tensor]:
    """Memory for the experts and the weights of all tokens."""
    num_tokens, _ = check.shape(logits, 'logits', 'num_tokens num_experts')
    check.integer(num_topk, 'num_topk')
    check.at_least(num_topk, 1, 'num_topk')
    num_slots = num_topk + num_shared
    topk_idx = logits.new_empty(num_tokens, num_slots, dtype=torch.int64)
    return topk_idx, logits.new_empty(num_tokens, num_slots, dtype=torch.float32)


# Rows ---------------------------------------------------------------------------------------


def check_places(token_topk_to_pos: Tensor, pos_to_expert: Tensor, num_tokens: int) -> tuple[int, int]:
    """Check the two maps of an expansion; returns num_topk and num_expanded."""
    _, num_topk = check.shape(
        token_topk_to_pos, 'token_topk_to_pos', 'num_tokens num_topk', dtype=torch.int32, num_tokens=num_tokens
    )
    (num_expanded,) = check.shape(pos_to_expert, 'pos_to_expert', 'num_expanded', dtype=torch.int32)
    check.at_least(num_topk, 1, 'num_topk')
    check.contiguous(token_topk_to_pos, 'token_topk_to_pos')
    check.contiguous(pos_to_expert, 'pos_to_expert')
    return num_topk, num_expanded


def row_width(hidden: int, *tensors: Tensor) -> int:
    """Elements of the widest access that divides a row and is aligned in every row of the tensors."""
    return math.gcd(hidden, *(check.vector_bytes(x) // x.element_size() for x in tensors))


def bits_of(x: Tensor) -> Tensor:
    """The same elements as integers of their size."""
    if x.element_size() not in BITS:
        check.fail('x', 'must have elements of 1, 2, 4 or 8 bytes', check.describe(x))
    return x.view(BITS[x.element_size()])
