"""Host checks of SwiGLU, and the arguments of its public functions.

Rows are described in one of two ways. Maps: `pos_to_token_topk` says where the weight of a row is, `pos_to_expert`
which rows are padding. Prefix sums: `psum_num_tokens_per_expert` says where the rows of an expert end, they start at
multiples of `config.get_token_alignment()`, and weights are given by row. Padding rows come out as 0.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.quant._checks import DTYPES, FP8_NAMES, GROUPS, dense_rows

# Arguments of ops ---------------------------------------------------------------------------


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


# Arguments of public functions --------------------------------------------------------------


def weight_scale_of(routed_scaling_factor: float | None, topk_weights: Tensor | None) -> float:
    """The factor of the weights, which must be there if it is given."""
    if routed_scaling_factor is None:
        return 1.0
    if topk_weights is None:
        check.fail('routed_scaling_factor', 'must come with topk_weights', 'no topk_weights')
    return routed_scaling_factor


def check_place(pos_to_token_topk: Tensor | None, topk_weights: Tensor | None, num_rows: int) -> Tensor | None:
    """The map of weights; one to no weights says nothing, but has to be one."""
    if topk_weights is None and pos_to_token_topk is not None:
        check.shape(pos_to_token_topk, 'pos_to_token_topk', 'num_rows', dtype=torch.int32, num_rows=num_rows)
        return None
    return pos_to_token_topk


def counted_clamp(clamp_value: float | None, clamped_count: Tensor | None) -> float | None:
    """The clamp: infinity if there is none but clamped elements are to be counted."""
    return math.inf if clamp_value is None and clamped_count is not None else clamp_value


def quantized_rows(x: tuple[Tensor, Tensor], num_per_channels: int | None) -> QuantTensor:
    """A plain pair is fp8 codes with row-major float32 factors for `num_per_channels` channels each."""
    if isinstance(x, QuantTensor):
        return x
    data, sf = check.pair(x, 'x')
    check.dtype(data, 'x', tuple(FP8_NAMES))
    check.dtype(sf, 'x.sf', torch.float32)
    if num_per_channels is None:
        check.fail('num_per_channels', 'must be given with a pair that is no QuantTensor', 'None')
    check.one_of(num_per_channels, GROUPS, 'num_per_channels')
    if data.dim() > 2:
        data, sf = data.flatten(0, -2), sf.flatten(0, -2)
    return QuantTensor(data, dense_rows(sf), QuantFormat.from_flags(FP8_NAMES[data.dtype], (1, num_per_channels)))
