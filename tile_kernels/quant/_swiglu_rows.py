"""What the SwiGLU ops share on the host: the checks of row weights, of the padding between experts and of clamps."""

import torch
from torch import Tensor

from tile_kernels.core import check

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_halves(x: Tensor, up: Tensor | None) -> tuple[int, int]:
    """Rows and channels of the result: `x` holds gate and up side by side, or is the gate of `up`."""
    num_tokens, width = check.shape(x, 'x', 'num_tokens hidden', dtype=DTYPES)
    check.unit_stride(x, 'x')
    check.at_least(width, 1, 'hidden')
    if up is None:
        check.multiple(width, 2, 'columns of x')
        return num_tokens, width // 2
    check.shape(up, 'up', 'num_tokens hidden', dtype=x.dtype, num_tokens=num_tokens, hidden=width)
    check.unit_stride(up, 'up')
    check.same_device(x=x, up=up)
    return num_tokens, width


def check_weights(x: Tensor, num_tokens: int, topk_weights: Tensor | None, pos_to_token_topk: Tensor | None) -> str:
    """Where the weight of a row is: '' (there is none), 'row' (at its number) or 'map' (at pos_to_token_topk)."""
    if topk_weights is None:
        if pos_to_token_topk is not None:
            check.fail('pos_to_token_topk', 'must come with topk_weights', 'no topk_weights')
        return ''
    if pos_to_token_topk is None:
        check.shape(topk_weights, 'topk_weights', 'num_rows', dtype=torch.float32, num_rows=num_tokens)
    else:
        check.shape(topk_weights, 'topk_weights', 'num_tokens num_topk', dtype=torch.float32)
        check.shape(pos_to_token_topk, 'pos_to_token_topk', 'num_rows', dtype=torch.int32, num_rows=num_tokens)
        check.contiguous(pos_to_token_topk, 'pos_to_token_topk')
    check.contiguous(topk_weights, 'topk_weights')
    check.same_device(x=x, topk_weights=topk_weights, pos_to_token_topk=pos_to_token_topk)
    return 'row' if pos_to_token_topk is None else 'map'


def check_layout(x: Tensor, num_tokens: int, pos_to_expert: Tensor | None, psum: Tensor | None, alignment: int) -> str:
    """What says which rows are padding: '' (none is), 'map' (pos_to_expert < 0) or 'psum' (beyond an expert's end)."""
    if psum is not None:
        if pos_to_expert is not None:
            check.fail('psum_num_tokens_per_expert', 'must not be combined with pos_to_expert', 'both')
        check.shape(psum, 'psum_num_tokens_per_expert', 'num_experts', dtype=torch.int32)
        check.contiguous(psum, 'psum_num_tokens_per_expert')
        check.same_device(x=x, psum_num_tokens_per_expert=psum)
        check.at_least(alignment, 1, 'alignment')
        return 'psum'
    if pos_to_expert is not None:
        check.shape(pos_to_expert, 'pos_to_expert', 'num_rows', dtype=torch.int32, num_rows=num_tokens)
        check.contiguous(pos_to_expert, 'pos_to_expert')
        check.same_device(x=x, pos_to_expert=pos_to_expert)
        return 'map'
    return ''


def check_clamp(clamp_value: float | None) -> float:
    """The clamp as a kernel takes it; the number does not matter to a kernel without one."""
    if clamp_value is None:
        return 0.0
    if not clamp_value >= 0:
        check.fail('clamp_value', 'must not be negative', str(clamp_value))
    return clamp_value


def check_counts(x: Tensor, clamp_value: float | None, clamped_count: Tensor | None) -> int:
    """Numbers to count: 0, 3 (gate > c, up > c, up < -c), or 4 (and the elements looked at)."""
    if clamped_count is None:
        return 0
    (num_counts,) = check.shape(clamped_count, 'clamped_count', 'num_counts', dtype=torch.int64)
    if num_counts not in (3, 4):
        check.fail('clamped_count', 'must have 3 or 4 elements', check.describe(clamped_count))
    check.contiguous(clamped_count, 'clamped_count')
    check.same_device(x=x, clamped_count=clamped_count)
    if clamp_value is None:
        check.fail('clamped_count', 'must come with clamp_value', 'clamp_value=None')
    return num_counts
