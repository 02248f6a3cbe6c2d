"""The public casts: TileKernels' flags and the friendly names, each turned into a `QuantFormat` and handed to an op."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import ELEMENTS, QuantFormat, QuantTensor
from tile_kernels.quant.fake_quantise import _StraightThrough
from tile_kernels.quant.per_token_cast import GROUPS
from tile_kernels.quant.per_token_cast import per_token_cast as cast_op
from tile_kernels.quant.per_token_cast import per_token_cast_with_precomputed_sf as data_op
from tile_kernels.quant.per_token_cast import per_token_cast_with_sf_only as sf_op
from tile_kernels.quant.per_token_recast import per_token_recast as recast_op
from tile_kernels.quant.per_token_recast import per_token_recast_with_precomputed_sf as recast_data_op
from tile_kernels.quant.per_token_recast import per_token_recast_with_sf_only as recast_sf_op

FP8_NAMES = {torch.float8_e4m3fn: 'e4m3', torch.float8_e5m2: 'e5m2'}
ELEMENT_NAMES = {**FP8_NAMES, torch.int8: 'e2m1'}

Pair = tuple[Tensor, Tensor]
Block = tuple[int, int]


def _quantised(
    x: Pair, block: Block | None, element: str | None = None, block_name: str = 'x_block_size'
) -> QuantTensor:
    """A pair with its format: what it carries, or what `block`, the dtypes and the strides of the factors say.

    Factors are column-major if only their first stride is 1: so are those of a single column, unless it is dense.
    """
    data, sf = check.pair(x, 'x')
    if block is not None:
        check_block(block, block_name)
    if isinstance(x, QuantTensor):
        if block is not None and block != x.fmt.sf_block:
            _check_same_blocks(x, block, block_name)
        if element is not None and element != x.fmt.data.name:
            check.fail('x_special_fmt', f'must be None for data of {x.fmt}', repr(element))
        return x
    if block is None:
        check.fail(block_name, 'must be given for a plain pair of data and scale factors', 'None')
    if element is None and data.dtype is torch.uint8:
        check.fail('x[0]', "must come with x_special_fmt='e5m6' if it is uint8 (e2m1 is int8)", check.describe(data))
    check.one_of(data.dtype, (torch.uint8,) if element else ELEMENT_NAMES, 'x[0].dtype')
    check.one_of(sf.dtype, (torch.float32, torch.int32, torch.float8_e4m3fn), 'x[1].dtype')
    if sf.dim() != 2:
        check.fail('x[1]', 'must be a matrix', check.describe(sf))
    packed, column_major = sf.dtype is torch.int32, False
    if sf.stride(0) == 1 and sf.stride(1) != 1:  # a branch: torch.compile would keep the expression symbolic
        column_major = True
    name = element or ELEMENT_NAMES[data.dtype]
    rows, cols = block
    if cols not in (1, *GROUPS) and cols == data.shape[-1] * 8 // ELEMENTS[name].bits:
        cols = 0  # the whole row
    fmt = QuantFormat.from_flags(name, (rows, cols), column_major, packed, packed, sf.dtype is torch.float8_e4m3fn)
    return QuantTensor(data, sf if column_major else dense_rows(sf), fmt)


def dense_rows(sf: Tensor) -> Tensor:
    """Row-major scale factors, copied if there is something between the rows; others as they are."""
    return sf.contiguous() if sf.dim() == 2 and sf.stride(1) == 1 else sf


def check_block(block: object, name: str) -> None:
    """`block` must be two integers; floats that equal them are no extents."""
    if not isinstance(block, (tuple, list)) or len(block) != 2 or not all(isinstance(n, int) for n in block):
        check.fail(name, 'must be two integers, of rows and of channels', repr(block))


def _check_same_blocks(x: QuantTensor, block: Block, name: str) -> None:
    """`block` must be that of the format of `x`; what spans a whole extent may do so by any number."""
    for given, known, size in zip(block, x.fmt.sf_block, x.shape, strict=False):
        if given != known and (given < size or 0 < known < size):
            check.fail(name, f'must be the block of x ({x.fmt}) or be left out', repr(block))


def _input(x: Tensor | Pair, x_block_size: Block | None) -> Tensor | QuantTensor:
    """`x`, a pair with its format."""
    if isinstance(x, tuple):
        return _quantised(x, x_block_size)
    check.tensor(x, 'x')
    if x_block_size is not None:
        check.fail('x_block_size', 'must be None for a plain x', repr(x_block_size))
    return x


def _format(
    x: Tensor | QuantTensor,
    fmt: str | QuantFormat,
    num_per_channels: int | None,
    use_tma_aligned_col_major_sf: bool,
    round_sf: bool,
    use_packed_ue8m0: bool,
    use_e4m3_sf: bool,
) -> QuantFormat:
    """The format that the flags describe; a whole format (object or name) is taken as it is."""
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    if isinstance(fmt, QuantFormat) or (isinstance(fmt, str) and '_' in fmt):
        if num_per_channels is not None or any(flags):
            check.fail('num_per_channels and the sf flags', 'must be left out when fmt is a whole format', str(fmt))
        return QuantFormat.parse(fmt)
    check.one_of(fmt, ('e4m3', 'e5m2', 'e2m1', 'e5m6'), 'fmt')
    group = num_per_channels
    if group is not None:
        check.integer(group, 'num_per_channels')
    if group not in GROUPS[:-1]:
        if len(x.shape) != 2 or group != x.shape[1]:
            check.one_of(group, (16, 32, 64, 128, 'hidden'), 'num_per_channels')
        group = 0
    return QuantFormat.from_flags(fmt, (1, group), *flags)


def per_token_cast(
    x: Tensor | Pair,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    x_block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    use_e4m3_sf: bool = False,
    stochastic_cast: bool = False,
    out: Pair | None = None,
) -> QuantTensor:
    """Quantise each row of `x` in groups of channels.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any row stride, any hidden (even for e2m1);
            or e4m3, e5m2 or e2m1 data and their scale factors, which are quantised again.
        fmt: 'e4m3', 'e5m2', 'e2m1' or 'e5m6' with the arguments below, or a whole format such as 'e4m3_1x128_f32'
            without them.
        num_per_channels: channels that share a scale factor: 16, 32, 64, 128 or hidden.
        x_block_size: rows and channels (a multiple of 8) that share a scale factor of a quantised `x`; may be left out
            if `x` is a `QuantTensor`.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns.
        round_sf: scale factors are rounded up to powers of two.
        use_packed_ue8m0: four exponent bytes in an int32; needs `round_sf`.
        use_e4m3_sf: e4m3 scale factors; excludes `round_sf`.
        stochastic_cast: round codes up or down at random, unbiased and reproducible, on every GPU (not e5m6).
        out: data and scale factors to write the result to.

    Returns:
        `QuantTensor`, which unpacks as (data, sf) with x ~= data * sf.
    """
    x = _input(x, x_block_size)
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    layout = _format(x, fmt, num_per_channels, *flags)
    y = (cast_op if isinstance(x, Tensor) else recast_op)(x, layout, None, stochastic_cast)
    if out is None:
        return y
    data, sf = check.pair(out, 'out')
    return QuantTensor(_into(data, y.data, 'out[0]'), _into(sf, y.sf, 'out[1]'), y.fmt)


def per_token_cast_with_sf_only(
    x: Tensor | Pair,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    x_block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    out_sf: Tensor | None = None,
) -> Tensor:
    """The scale factors `per_token_cast` would return; arguments as there."""
    x = _input(x, x_block_size)
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    layout = _format(x, fmt, num_per_channels, *flags)
    y_sf = sf_op(x, layout) if isinstance(x, Tensor) else recast_sf_op(x, layout)
    return y_sf if out_sf is None else _into(out_sf, y_sf, 'out_sf')


def per_token_cast_with_precomputed_sf(
    x: Tensor | Pair,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    sf: Tensor | None = None,
    x_block_size: Block | None = None,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    *,
    use_e4m3_sf: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The data of `per_token_cast` with given scale factors; arguments as there.

    The flags describe `sf`, except that row-major float32 and e4m3 factors are accepted with any of them.
    """
    x, sf = _input(x, x_block_size), check.tensor(sf, 'sf')
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf
    layout, sf = _format(x, fmt, num_per_channels, *flags), dense_rows(sf)
    if sf.dtype in (torch.float32, torch.float8_e4m3fn) and sf.is_contiguous():
        e4m3_sf = sf.dtype is torch.float8_e4m3fn
        layout = QuantFormat.from_flags(layout.data.name, layout.sf_block, use_e4m3_sf=e4m3_sf)
    y = data_op(x, sf, layout) if isinstance(x, Tensor) else recast_data_op(x, sf, layout)
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


def fake_quantise(x: Tensor, fmt: str | QuantFormat) -> Tensor:
    """What quantising `x` per token and dequantising it again gives, for training with quantisation in the loop.

    Args:
        x: (num_tokens, hidden) bfloat16, float16 or float32, rows dense, any hidden (even for e2m1).
        fmt: a format or its name, e.g. 'e4m3_1x128_f32' or 'e2m1_1x32_f32p2': e4m3, e5m2 or e2m1, groups of 16, 32, 64
            or 128 channels, scale factors f32, f32p2 or e4m3.

    Returns:
        A tensor like `x`. Its gradient is passed straight through: d x is d y, unchanged.
    """
    return _StraightThrough.apply(check.tensor(x, 'x'), QuantFormat.parse(fmt).name)


def _into(out: Tensor, value: Tensor, name: str) -> Tensor:
    """Copy a result to where the caller wants it."""
    if check.tensor(out, name).shape != value.shape or out.dtype is not value.dtype or out.device != value.device:
        check.fail(name, f'must be {check.describe(value)}', check.describe(out))
    return out.copy_(value)
