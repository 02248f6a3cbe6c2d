"""The public casts: TileKernels' flags and the friendly names, each turned into a `QuantFormat` and handed to an op."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.errors import UnsupportedError
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.quant.per_token_cast import GROUPS
from tile_kernels.quant.per_token_cast import per_token_cast as cast_op
from tile_kernels.quant.per_token_cast import per_token_cast_with_precomputed_sf as data_op
from tile_kernels.quant.per_token_cast import per_token_cast_with_sf_only as sf_op

FP8_NAMES = {torch.float8_e4m3fn: 'e4m3', torch.float8_e5m2: 'e5m2'}


def _plain_input(x: Tensor | tuple, x_block_size: tuple[int, int] | None) -> Tensor:
    """`x`, unless it is already quantised."""
    if isinstance(x, tuple) or x_block_size is not None:
        raise UnsupportedError('quant.per_token_cast: x must be a plain tensor; dequantise a quantised one first')
    return check.tensor(x, 'x')


def _format(
    x: Tensor,
    fmt: str | QuantFormat,
    num_per_channels: int | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
) -> QuantFormat:
    """The format that the flags describe; a whole format (object or name) is taken as it is."""
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    if isinstance(fmt, QuantFormat) or '_' in fmt:
        if num_per_channels is not None or any(flags):
            check.fail('num_per_channels and the sf flags', 'must be left out when fmt is a whole format', str(fmt))
        return QuantFormat.parse(fmt)
    check.one_of(fmt, ('e4m3', 'e5m2', 'e2m1', 'e5m6'), 'fmt')
    group = num_per_channels
    if group not in GROUPS[:-1]:
        if x.dim() != 2 or group != x.shape[1]:
            check.one_of(group, (16, 32, 64, 128, 'hidden'), 'num_per_channels')
        group = 0
    return QuantFormat.from_flags(fmt, (1, group), *flags)


def per_token_cast(
    x: Tensor,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: tuple[Tensor, Tensor] | None = None,
) -> QuantTensor:
    """Quantise each row of `x` in groups of channels.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride, any hidden (even for e2m1).
        fmt: 'e4m3', 'e5m2', 'e2m1' or 'e5m6' with the arguments below, or a whole format such as 'e4m3_1x128_f32'
            without them.
        num_per_channels: channels that share a scale factor: 16, 32, 64, 128 or hidden.
        x_block_size: blocks of a quantised `x`; only plain tensors are supported.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: scale factors are rounded up to powers of two.
        use_packed_ue8m0: four exponent bytes in an int32; needs `round_sf`.
        use_e4m3_sf: e4m3 scale factors; excludes `round_sf`.
        stochastic_cast: must be False, casts round to nearest even.
        out: data and scale factors to write the result to.

    Returns:
        `QuantTensor`, which unpacks as (data, sf) with x ~= data * sf.
    """
    x = _plain_input(x, x_block_size)
    if stochastic_cast:
        raise UnsupportedError('quant.per_token_cast: stochastic_cast must be False, casts round to nearest even')
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    y = cast_op(x, _format(x, fmt, num_per_channels, *flags))
    if out is None:
        return y
    return QuantTensor(_into(out[0], y.data, 'out[0]'), _into(out[1], y.sf, 'out[1]'), y.fmt)


def per_token_cast_with_sf_only(
    x: Tensor,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    """The scale factors `per_token_cast` would return; arguments as there."""
    x = _plain_input(x, x_block_size)
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    y_sf = sf_op(x, _format(x, fmt, num_per_channels, *flags))
    return y_sf if out_sf is None else _into(out_sf, y_sf, 'out_sf')


def per_token_cast_with_precomputed_sf(
    x: Tensor,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    sf: Tensor | None = None,
    x_block_size: tuple[int, int] | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_token_cast` with given scale factors; arguments as there.

    The flags describe `sf`, except that row-major float32 factors are accepted with any of them.
    """
    x, sf = _plain_input(x, x_block_size), check.tensor(sf, 'sf')
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    layout = _format(x, fmt, num_per_channels, *flags)
    if sf.dtype is torch.float32 and sf.is_contiguous():
        layout = QuantFormat.from_flags(layout.data.name, layout.sf_block)
    y = data_op(x, sf, layout)
    return y if out is None else _into(out, y, 'out')


def per_token_cast_fp8(
    x: Tensor, group_size: int | None = None, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """Quantise each row of `x` to fp8.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, any hidden.
        group_size: channels that share a scale: 16, 32, 64 or 128; None for one scale per row.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.

    Returns:
        `(x_fp8, scale)`: codes (num_tokens, hidden) and float32 scales (num_tokens, 1) or
        (num_tokens, ceil(hidden / group_size)), with x ~= x_fp8.float() * scale.
    """
    check.one_of(dtype, FP8_NAMES, 'dtype')
    check.one_of(group_size, (None, 16, 32, 64, 128), 'group_size')
    return cast_op(x, QuantFormat.from_flags(FP8_NAMES[dtype], (1, group_size or 0)))


def _into(out: Tensor, value: Tensor, name: str) -> Tensor:
    """Copy a result to where the caller wants it."""
    if out.shape != value.shape or out.dtype is not value.dtype or out.device != value.device:
        check.fail(name, f'must be {check.describe(value)}', check.describe(out))
    return out.copy_(value)
