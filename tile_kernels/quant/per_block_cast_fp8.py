"""Per-block cast to fp8 with float32 scales: the friendly name of `per_block_cast`."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.quant._checks import BLOCKS, FP8_NAMES, Block, check_block
from tile_kernels.quant.per_block_cast import per_block_cast


def per_block_cast_fp8(
    w: Tensor, block_size: int | Block = 128, dtype: torch.dtype | str = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantize `w` to fp8 in square or rectangular blocks.

    Args:
        w: (m, n) bfloat16, float16 or float32, any shape.
        block_size: 32 or 128, or a pair of rows and columns.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2, also as 'e4m3' or 'e5m2'.

    Returns:
        `(w_fp8, scale)`: codes (m, n) and float32 scales (ceil(m / b), ceil(n / b)); w ~= w_fp8.float() * scale.
    """
    code = check.to_dtype(dtype, 'dtype')
    check.one_of(code, FP8_NAMES, 'dtype')
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    check.one_of(block, BLOCKS, 'block_size')
    check_block(block, 'block_size')
    return per_block_cast.call(w, QuantFormat.from_flags(FP8_NAMES[code], block))
