"""The public casts in blocks, per channel and back: TileKernels' arguments and the friendly names, handed to ops."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.quant.convert import convert
from tile_kernels.quant.dequantise import dequantise
from tile_kernels.quant.front import FP8_NAMES, Block, Pair, _into, _quantised, check_block, dense_rows
from tile_kernels.quant.per_block_cast import per_block_cast as block_op
from tile_kernels.quant.per_block_cast import per_block_cast_with_precomputed_sf as block_data_op
from tile_kernels.quant.per_block_cast import per_block_cast_with_sf_only as block_sf_op
from tile_kernels.quant.per_block_cast_lossless import per_block_cast_lossless as lossless_op
from tile_kernels.quant.per_channel_cast import per_channel_cast as channel_op
from tile_kernels.quant.per_channel_cast import per_channel_recast as channel_recast_op
from tile_kernels.quant.per_channel_cast_and_transpose import per_channel_cast_and_transpose as transpose_op
from tile_kernels.quant.per_token_cast_and_cast_back import per_token_cast_and_cast_back as back_and_forth_op
from tile_kernels.quant.transpose_weight_sf import transpose_weight_sf

BLOCKS = tuple(product((32, 128), (32, 128)))
LOSSLESS_BLOCKS = tuple(product((1, 32, 128), (16, 32, 64, 128)))
BACK = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}


def _block_format(fmt: str | QuantFormat, block_size: Any, *flags: bool) -> QuantFormat:
    """The format that the arguments describe; a whole format (object or name) is taken as it is."""
    if isinstance(fmt, QuantFormat) or (isinstance(fmt, str) and '_' in fmt):
        if block_size is not None or any(flags):
            check.fail('block_size and the sf flags', 'must be left out when fmt is a whole format', str(fmt))
        return QuantFormat.parse(fmt)
    check.one_of(fmt, ('e4m3', 'e5m2', 'e2m1'), 'fmt')
    check.one_of(block_size, BLOCKS, 'block_size')
    check_block(block_size, 'block_size')
    return QuantFormat.from_flags(fmt, block_size, *flags)


# Per block ----------------------------------------------------------------------------------


def per_block_cast(
    x: Tensor,
    fmt: str | QuantFormat,
    block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Pair | None = None,
) -> QuantTensor:
    """Quantise `x` in blocks of rows and channels.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any shape and row stride (hidden even for
            e2m1).
        fmt: 'e4m3', 'e5m2' or 'e2m1' with the arguments below, or a whole format such as 'e4m3_128x128_f32' without
            them.
        block_size: rows and channels that share a scale factor, each 32 or 128.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: scale factors are rounded up to powers of two.
        use_packed_ue8m0: four exponent bytes in an int32; needs `round_sf`.
        out: data and scale factors to write the result to.

    Returns:
        `QuantTensor`, which unpacks as (data, sf) with x ~= data * sf.
    """
    y = block_op(x, _block_format(fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0))
    if out is None:
        return y
    data, sf = check.pair(out, 'out')
    return QuantTensor(_into(data, y.data, 'out[0]'), _into(sf, y.sf, 'out[1]'), y.fmt)


def per_block_cast_with_sf_only(
    x: Tensor,
    fmt: str | QuantFormat,
    block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    """The scale factors `per_block_cast` would return; arguments as there."""
    y_sf = block_sf_op(x, _block_format(fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0))
    return y_sf if out_sf is None else _into(out_sf, y_sf, 'out_sf')


def per_block_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str | QuantFormat,
    block_size: Block | None = None,
    sf: Tensor | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_block_cast` with given scale factors; arguments as there.

    The flags describe `sf`, except that row-major float32 factors are accepted with any of them.
    """
    sf = dense_rows(check.tensor(sf, 'sf'))
    layout = _block_format(fmt, block_size, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0)
    if sf.dtype is torch.float32 and sf.is_contiguous():
        layout = QuantFormat.from_flags(layout.data.name, layout.sf_block)
    y = block_data_op(x, sf, layout)
    return y if out is None else _into(out, y, 'out')


def per_block_cast_lossless(
    x: Pair,
    fmt: str,
    x_block_size: Block | None,
    out_block_size: Block,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Turn fp4 into fp8 with larger scale blocks without changing a value.

    Args:
        x: e2m1 data and power-of-two scale factors, float32 or packed.
        fmt: 'e4m3'.
        x_block_size: scale blocks of `x`; None if `x` carries its format.
        out_block_size: scale blocks of the result, multiples of those of `x`.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: accepted for symmetry; the factors are powers of two anyway.
        use_packed_ue8m0: four exponent bytes in an int32.

    Returns:
        `QuantTensor` with the values of `x`, if the factors within a block differ by at most 2^14.
    """
    check.equal(fmt, 'e4m3', 'fmt')
    del round_sf
    check.one_of(out_block_size, LOSSLESS_BLOCKS, 'out_block_size')
    check_block(out_block_size, 'out_block_size')
    x = _quantised(x, x_block_size)
    for extent, part in zip(out_block_size, x.fmt.sf_block, strict=True):
        check.multiple(extent, part or 1, 'out_block_size')
    layout = QuantFormat.from_flags('e4m3', out_block_size, use_tma_aligned_col_major_sf, True, use_packed_ue8m0)
    return lossless_op(x, layout)


def per_block_cast_fp8(
    w: Tensor, block_size: int | Block = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantise `w` to fp8 in square or rectangular blocks.

    Args:
        w: (m, n) bfloat16, float16 or float32, any shape.
        block_size: 32 or 128, or a pair of rows and columns.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        `(w_fp8, scale)`: codes (m, n) and float32 scales (ceil(m / b), ceil(n / b)); w ~= w_fp8.float() * scale.
    """
    check.one_of(dtype, FP8_NAMES, 'dtype')
    block = (block_size, block_size) if isinstance(block_size, int) else block_size
    check.one_of(block, BLOCKS, 'block_size')
    check_block(block, 'block_size')
    return block_op(w, QuantFormat.from_flags(FP8_NAMES[dtype], block))


# Per channel --------------------------------------------------------------------------------


def per_channel_cast(
    x: Tensor | Pair,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    use_packed_ue8m0: bool = False,
) -> QuantTensor:
    """Quantise each channel of `x` in groups of rows.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32 of any shape; or fp8 data and scale factors, one for each
            row and `num_per_channels` channels.
        fmt: 'e4m3' or 'e5m2'.
        num_per_tokens: rows that share a scale factor, 32 or 128.
        round_sf: scale factors are rounded up to powers of two.
        num_per_channels: channels that share a scale factor of a quantised `x`, 32, 64 or 128.
        use_packed_ue8m0: the exponent bytes of four groups of rows in an int32; needs `round_sf`.

    Returns:
        `QuantTensor`: data (num_tokens, hidden), sf (ceil(num_tokens / num_per_tokens), hidden).
    """
    layout = _channel_format(fmt, num_per_tokens, round_sf, use_packed_ue8m0)
    return _per_channel(x, layout, num_per_channels, None)


def per_channel_cast_fused(
    x: Tensor | Pair,
    fmt: str,
    num_per_tokens: int,
    round_sf: bool = False,
    num_per_channels: int | None = None,
    pos_to_token: Tensor | None = None,
) -> QuantTensor:
    """Gather rows of `x`, dequantise them if it is quantised, and quantise each channel in groups of rows.

    Args:
        x: as for `per_channel_cast`.
        fmt: 'e4m3' or 'e5m2'.
        num_per_tokens: rows of the result that share a scale factor, 32 or 128.
        round_sf: scale factors are rounded up to powers of two.
        num_per_channels: channels that share a scale factor of a quantised `x`.
        pos_to_token: (num_rows,) int32, the row of `x` for each row of the result; -1 for a row of zeros.

    Returns:
        `QuantTensor`: data (num_rows, hidden), sf (ceil(num_rows / num_per_tokens), hidden).
    """
    return _per_channel(x, _channel_format(fmt, num_per_tokens, round_sf), num_per_channels, pos_to_token)


def _channel_format(fmt: str, num_per_tokens: int, round_sf: bool, packed: bool = False) -> QuantFormat:
    check.one_of(fmt, FP8_NAMES.values(), 'fmt')
    check.one_of(num_per_tokens, (32, 128), 'num_per_tokens')
    return QuantFormat.from_flags(fmt, (num_per_tokens, 1), False, round_sf, packed)


def _per_channel(
    x: Tensor | Pair, layout: QuantFormat, num_per_channels: int | None, pos_to_token: Tensor | None
) -> QuantTensor:
    if isinstance(x, Tensor):
        return channel_op(x, layout, pos_to_token)
    check.one_of(num_per_channels, (None, 32, 64, 128), 'num_per_channels')
    return channel_recast_op(_per_token(x, num_per_channels), layout, pos_to_token)


def _per_token(x: Pair, num_per_channels: int | None, element: str | None = None) -> QuantTensor:
    """A pair with one scale factor for each row and `num_per_channels` channels, with its format."""
    if num_per_channels is not None:
        check.integer(num_per_channels, 'num_per_channels')
    block = None if num_per_channels is None else (1, num_per_channels)
    return _quantised(x, block, element, 'num_per_channels')


def per_channel_cast_and_transpose(
    x: Tensor, fmt: str, num_per_tokens: int, round_sf: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantise each channel of `x` in groups of rows and store the codes transposed.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32 of any shape.
        fmt: 'e4m3' or 'e5m2'.
        num_per_tokens: rows that share a scale factor, 32 or 128.
        round_sf: scale factors are rounded up to powers of two.

    Returns:
        Codes (hidden, num_tokens), contiguous, and scale factors (ceil(num_tokens / num_per_tokens), hidden).
    """
    return transpose_op(x, _channel_format(fmt, num_per_tokens, round_sf))


def per_channel_cast_fp8(
    x: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantise each column of `x` to fp8.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, any shape.
        group_size: rows that share a scale, 32 or 128; None for one scale per column.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        `(x_fp8, scale)`: codes (num_tokens, hidden) and float32 scales (1, hidden) or
        (ceil(num_tokens / group_size), hidden), with x ~= x_fp8.float() * scale.
    """
    check.one_of(dtype, FP8_NAMES, 'dtype')
    check.one_of(group_size, (None, 32, 128), 'group_size')
    return channel_op(x, QuantFormat.from_flags(FP8_NAMES[dtype], (group_size or 0, 1)))


# Back ---------------------------------------------------------------------------------------


def cast_back(
    x: Pair, fmt: str = 'bf16', x_block_size: Block | None = None, x_special_fmt: str | None = None
) -> Tensor:
    """The numbers that a quantised matrix stands for.

    Args:
        x: data and scale factors: e4m3, e5m2, e2m1 (int8, two to a byte) or e5m6 (uint8), any shape; factors float32,
            packed exponents or e4m3, row-major or column-major.
        fmt: 'bf16', 'fp32' or 'fp16'.
        x_block_size: rows and channels that share a scale factor; may be left out if `x` is a `QuantTensor`.
        x_special_fmt: 'e5m6' if the bytes of `x` are e5m6.

    Returns:
        (num_tokens, hidden): code * sf, rounded once.
    """
    check.one_of(fmt, BACK, 'fmt')
    check.one_of(x_special_fmt, (None, 'e5m6'), 'x_special_fmt')
    return dequantise(_quantised(x, x_block_size, x_special_fmt), BACK[fmt])


def per_token_cast_back(
    x: Pair, fmt: str = 'bf16', num_per_channels: int | None = None, x_special_fmt: str | None = None
) -> Tensor:
    """`cast_back` of one scale factor for each row and `num_per_channels` channels."""
    check.one_of(fmt, BACK, 'fmt')
    check.one_of(x_special_fmt, (None, 'e5m6'), 'x_special_fmt')
    return dequantise(_per_token(x, num_per_channels, x_special_fmt), BACK[fmt])


def per_token_cast_and_cast_back(
    x: Tensor, fmt: str, num_per_channels: int, round_sf: bool = False, use_e4m3_sf: bool = False
) -> None:
    """Replace every number of `x` by what quantising it per token and dequantising it again gives.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense; overwritten.
        fmt: 'e4m3', 'e5m2' or 'e2m1'.
        num_per_channels: channels that share a scale factor: 16, 32, 64 or 128.
        round_sf: scale factors are rounded up to powers of two.
        use_e4m3_sf: e4m3 scale factors; excludes `round_sf`.
    """
    check.one_of(fmt, ('e4m3', 'e5m2', 'e2m1'), 'fmt')
    check.one_of(num_per_channels, (16, 32, 64, 128), 'num_per_channels')
    back_and_forth_op(x, QuantFormat.from_flags(fmt, (1, num_per_channels), False, round_sf, use_e4m3_sf=use_e4m3_sf))


# Single numbers and scale factors -----------------------------------------------------------


def cast(x: Tensor, dtype: torch.dtype, stochastic_rounding: bool = False) -> Tensor:
    """Convert every number of `x` to another dtype.

    Args:
        x: contiguous, any shape: bfloat16, float16, float32, float8_e4m3fn or float8_e5m2.
        dtype: one of these; fp8 saturates.
        stochastic_rounding: round up or down at random, unbiased and reproducible: float32 to bfloat16 or
            float8_e4m3fn, bfloat16 to float8_e4m3fn; on every GPU.

    Returns:
        A contiguous tensor of the shape of `x`.
    """
    return convert(x, dtype, stochastic_rounding)


def batched_transpose_weight_sf(
    sf: Sequence[Tensor],
    block_size: int | Block,
    transpose_sf1s: Sequence[bool],
    outs: Sequence[Pair | None] | None = None,
) -> list[Pair]:
    """Packed scale factors of weights for both of their GEMM operands.

    Args:
        sf: for each weight (n / b, k / b) or (batch, n / b, k / b) float32 powers of two, contiguous.
        block_size: b, 32 or 128.
        transpose_sf1s: for each weight whether the second result is stored (ceil(n / b / 4), k).
        outs: for each weight where to write the two results, or None.

    Returns:
        For each weight `(sf0, sf1)`, int32: sf0 (..., n, ceil(k / b / 4)) with stride 1 along n, four blocks of k to a
        word; sf1 (..., k, ceil(n / b / 4)) with stride 1 along k, four blocks of n to a word.
    """
    for name, values in (('sf', sf), ('transpose_sf1s', transpose_sf1s), ('outs', outs)):
        if not isinstance(values, Sequence) and not (name == 'outs' and values is None):
            check.fail(name, 'must be a sequence with an entry for each weight', check.describe(values))
    check.one_of(block_size, (32, 128, (32, 32), (128, 128)), 'block_size')
    block = block_size if isinstance(block_size, int) else block_size[0]
    targets = outs if outs is not None else [None] * len(sf)
    if not len(sf) == len(transpose_sf1s) == len(targets):
        lengths = f'{len(sf)}, {len(transpose_sf1s)} and {len(targets)}'
        check.fail('sf, transpose_sf1s and outs', 'must have the same length', lengths)
    results = []
    for weight_sf, transposed, out in zip(sf, transpose_sf1s, targets, strict=True):
        single = check.tensor(weight_sf, 'sf').dim() == 2
        row_sf, col_sf = transpose_weight_sf(weight_sf.unsqueeze(0) if single else weight_sf, block)
        if single:
            row_sf, col_sf = row_sf.squeeze(0), col_sf.squeeze(0)
        pair = row_sf.mT, col_sf if transposed else col_sf.mT
        results.append(pair if out is None else (_into(out[0], pair[0], 'outs[0]'), _into(out[1], pair[1], 'outs[1]')))
    return results
