"""Cast back: `dequantize` with the arguments of TileKernels."""

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.front import replayed
from tile_kernels.quant._checks import Block, Pair, dtype_of, with_format
from tile_kernels.quant.dequantize import dequantize


@replayed
def cast_back(
    x: Pair, fmt: str = 'bf16', x_block_size: Block | None = None, x_special_fmt: str | None = None
) -> Tensor:
    """The numbers that a quantized matrix stands for.

    Args:
        x: data and scale factors. Data of any shape is e4m3, e5m2, e2m1 (int8, two to a byte) or e5m6 (uint8). Factors
            are float32, packed exponents or e4m3, row-major or column-major.
        fmt: 'bf16', 'fp32' or 'fp16'.
        x_block_size: rows and channels that share a scale factor; may be left out if `x` is a `QuantTensor`.
        x_special_fmt: 'e5m6' if the bytes of `x` are e5m6.

    Returns:
        (num_tokens, hidden): code * sf, rounded once.
    """
    dtype = dtype_of(fmt)
    check.one_of(x_special_fmt, (None, 'e5m6'), 'x_special_fmt')
    return dequantize(with_format(x, x_block_size, x_special_fmt), dtype)
