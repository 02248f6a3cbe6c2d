"""Fake quantization: a matrix rounded to what a format can hold, with the gradient of the identity.

    y[t, h]  = round(x[t, h] * sf_inv[t, h // G]) * sf[t, h // G]       as `per_token_cast_and_cast_back`, not in place
    dx[t, h] = dy[t, h]                                                 straight through, without a copy

The kernel is that of `per_token_cast_and_cast_back`. Memory bound: the floor is reading x and writing y once.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.quant.per_token_cast_and_cast_back import (
    BENCH,
    FULL,
    SMOKE,
    check_there_and_back,
    make_case,
    per_token_cast_and_cast_back_kernel,
)

# Op -----------------------------------------------------------------------------------------


@op(outputs='y', backward='identity')
def _fake_quantize(x: Tensor, fmt: QuantFormat) -> Tensor:
    """Every number of `x` as it comes back from being quantized per token; `x` is left as it is."""
    check_there_and_back(x, fmt)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    static = (x.shape[1], fmt, x.dtype, check.vector_bytes(x), False)
    launch(per_token_cast_and_cast_back_kernel, static, x, y, fmt.amax_floor)
    return y


@_fake_quantize.public
def fake_quantize(x: Tensor, fmt: str | QuantFormat) -> Tensor:
    """What quantizing `x` per token and dequantizing it again gives, for training with quantization in the loop.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any hidden (even for e2m1).
        fmt: a format or its name, e.g. 'e4m3_1x128_f32' or 'e2m1_1x32_f32p2'. Codes are e4m3, e5m2 or e2m1, groups have
            16, 32, 64 or 128 channels, scale factors are f32, f32p2 or e4m3.

    Returns:
        A tensor like `x`. Its gradient is passed straight through: d x is d y, unchanged.
    """
    return fake_quantize.call(check.tensor(x, 'x'), QuantFormat.parse(fmt))


# Cases --------------------------------------------------------------------------------------


fake_quantize.cases(make=make_case, match='bitwise', smoke=SMOKE, full=FULL[::5], bench=BENCH[:3])
