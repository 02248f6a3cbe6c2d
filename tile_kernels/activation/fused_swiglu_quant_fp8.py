"""SwiGLU of separate gate and up, quantized to fp8: the friendly name of two ops.

They are `swiglu_forward_and_per_token_cast` and `swiglu_forward_and_per_block_cast`.
"""

import torch
from torch import Tensor

from tile_kernels.activation.swiglu_forward_and_per_block_cast import SWIGLU_BLOCKS, swiglu_forward_and_per_block_cast
from tile_kernels.activation.swiglu_forward_and_per_token_cast import swiglu_forward_and_per_token_cast
from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.quant._checks import FP8_NAMES, GROUPS, Block, check_block


def fused_swiglu_quant_fp8(
    gate: Tensor,
    up: Tensor,
    group_size: int | None = None,
    dtype: torch.dtype | str = torch.float8_e4m3fn,
    *,
    variant: str = 'per_token',
    block_size: int | Block | None = None,
) -> tuple[Tensor, Tensor]:
    """`silu(gate) * up`, quantized to fp8; gate and up are read once.

    Args:
        gate: (num_tokens, intermediate) bfloat16, float16 or float32, any row stride, any width.
        up: shape and dtype of `gate`.
        group_size: for 'per_token', channels that share a scale: 16, 32, 64 or 128; None for one scale per row.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2, also as 'e4m3' or 'e5m2'.
        variant: 'per_token' or 'per_block'.
        block_size: for 'per_block', rows and channels that share a scale: 32, 128, a pair of these, or (1, 128); None
            for 128.

    Returns:
        `(out_fp8, scale)`: codes (num_tokens, intermediate) and float32 scales, with
        silu(gate) * up ~= out_fp8.float() * scale. Scales are (num_tokens, 1) or
        (num_tokens, ceil(intermediate / group_size)); those of blocks are (ceil(num_tokens / rows),
        ceil(intermediate / channels)).
    """
    code = check.to_dtype(dtype, 'dtype')
    check.one_of(code, FP8_NAMES, 'dtype')
    check.one_of(variant, ('per_token', 'per_block'), 'variant')
    name, value = ('group_size', group_size) if variant == 'per_block' else ('block_size', block_size)
    if value is not None:
        check.fail(name, f'must be None for {variant}', repr(value))
    if variant == 'per_token':
        check.one_of(group_size, (None, *GROUPS), 'group_size')
        layout = QuantFormat.from_flags(FP8_NAMES[code], (1, group_size or 0))
        return swiglu_forward_and_per_token_cast.call(gate, layout, up)
    block_size = 128 if block_size is None else block_size
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    check.one_of(block, SWIGLU_BLOCKS, 'block_size')
    check_block(block, 'block_size')
    return swiglu_forward_and_per_block_cast.call(gate, QuantFormat.from_flags(FP8_NAMES[code], block), up)
