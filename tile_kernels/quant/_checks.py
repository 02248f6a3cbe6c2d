"""Host checks of the casts, and the arguments of their public functions turned into formats."""

import functools
from collections.abc import Collection, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import ELEMENTS, QuantFormat, QuantTensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DTYPE_NAMES = {'bf16': torch.bfloat16, 'fp16': torch.float16, 'fp32': torch.float32}


def dtype_of(fmt: str | torch.dtype) -> torch.dtype:
    """The dtype that 'bf16', 'bfloat16' or `torch.bfloat16` names."""
    if isinstance(fmt, torch.dtype):
        fmt = next((name for name, dtype in DTYPE_NAMES.items() if dtype is fmt), str(fmt))
    name = {'bfloat16': 'bf16', 'float16': 'fp16', 'float32': 'fp32'}.get(fmt, fmt)
    check.one_of(name, DTYPE_NAMES, 'fmt')
    return DTYPE_NAMES[name]


FP8_NAMES = {torch.float8_e4m3fn: 'e4m3', torch.float8_e5m2: 'e5m2'}
ELEMENT_NAMES = {**FP8_NAMES, torch.int8: 'e2m1'}

#: Channels of a row that may share a scale factor.
GROUPS = (16, 32, 64, 128)

#: Rows and channels of the blocks of `per_block_cast`.
BLOCKS = tuple(product((32, 128), (32, 128)))

Pair = tuple[Tensor, Tensor]
Block = tuple[int, int]


# Formats ------------------------------------------------------------------------------------


def whole_format(fmt: Any, given: bool, others: str) -> QuantFormat | None:
    """`fmt`, if it is a format, by object or by name; then the arguments that would describe one are left out."""
    if not isinstance(fmt, QuantFormat) and not (isinstance(fmt, str) and '_' in fmt):
        return None
    if given:
        check.fail(others, 'must be left out when fmt is a whole format', str(fmt))
    return QuantFormat.parse(fmt)


def token_format(
    fmt: Any,
    num_per_channels: int | None,
    shape: Sequence[int],
    *flags: bool,
    elements: tuple[str, ...] = ('e4m3', 'e5m2', 'e2m1', 'e5m6'),
) -> QuantFormat:
    """The format of groups of channels that the arguments describe for a matrix; a whole format is taken as it is."""
    described = num_per_channels is not None or any(flags)
    if whole := whole_format(fmt, described, 'num_per_channels and the sf flags'):
        return whole
    check.one_of(fmt, elements, 'fmt')
    group = num_per_channels
    if group is not None:
        check.integer(group, 'num_per_channels')
    if group not in GROUPS:
        if len(shape) != 2 or group != shape[1]:
            check.one_of(group, (*GROUPS, 'hidden'), 'num_per_channels')
        group = 0
    return QuantFormat.from_flags(fmt, (1, group), *flags)


def block_format(fmt: Any, block_size: Any, *flags: bool, blocks: Collection[Block] = BLOCKS) -> QuantFormat:
    """The format of blocks that the arguments describe; a whole format is taken as it is."""
    if whole := whole_format(fmt, block_size is not None or any(flags), 'block_size and the sf flags'):
        return whole
    check.one_of(fmt, ('e4m3', 'e5m2', 'e2m1'), 'fmt')
    check.one_of(block_size, blocks, 'block_size')
    check_block(block_size, 'block_size')
    return QuantFormat.from_flags(fmt, block_size, *flags)


def channel_format(fmt: str, num_per_tokens: int, round_sf: bool, packed: bool = False) -> QuantFormat:
    """The format of groups of rows that the arguments describe."""
    check.one_of(fmt, FP8_NAMES.values(), 'fmt')
    check.one_of(num_per_tokens, (32, 128), 'num_per_tokens')
    return QuantFormat.from_flags(fmt, (num_per_tokens, 1), False, round_sf, packed)


def check_block(block: object, name: str) -> None:
    """`block` must be two integers; floats that equal them are no extents."""
    if not isinstance(block, (tuple, list)) or len(block) != 2 or not all(isinstance(n, int) for n in block):
        check.fail(name, 'must be two integers, of rows and of channels', repr(block))


# Quantized inputs ---------------------------------------------------------------------------


def with_format(
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
    if cols not in (0, 1, *GROUPS) and cols == data.shape[-1] * 8 // ELEMENTS[name].bits:
        cols = 0  # the whole row
    fmt = QuantFormat.from_flags(name, (rows, cols), column_major, packed, packed, sf.dtype is torch.float8_e4m3fn)
    return QuantTensor(data, sf if column_major else dense_rows(sf), fmt)


def _check_same_blocks(x: QuantTensor, block: Block, name: str) -> None:
    """`block` must be that of the format of `x`; what spans a whole extent may do so by any number."""
    for given, known, size in zip(block, x.fmt.sf_block, x.shape, strict=False):
        if given != known and (given < size or 0 < known < size):
            check.fail(name, f'must be the block of x ({x.fmt}) or be left out', repr(block))


def dense_rows(sf: Tensor) -> Tensor:
    """Row-major scale factors, copied if there is something between the rows; others as they are."""
    return sf.contiguous() if sf.dim() == 2 and sf.stride(1) == 1 else sf


def with_token_format(x: Pair, num_per_channels: int | None, element: str | None = None) -> QuantTensor:
    """A pair with one scale factor for each row and `num_per_channels` channels, with its format."""
    if num_per_channels is not None:
        check.integer(num_per_channels, 'num_per_channels')
    block = None if num_per_channels is None else (1, num_per_channels)
    return with_format(x, block, element, 'num_per_channels')


def plain_or_quantized(x: Tensor | Pair, x_block_size: Block | None) -> Tensor | QuantTensor:
    """`x`; a pair gets its format."""
    if isinstance(x, tuple):
        return with_format(x, x_block_size)
    check.tensor(x, 'x')
    if x_block_size is not None:
        check.fail('x_block_size', 'must be None for a plain x', repr(x_block_size))
    return x


# Memory of the caller -----------------------------------------------------------------------


def into(out: Tensor, value: Tensor, name: str) -> Tensor:
    """Copy a result to where the caller wants it."""
    if check.tensor(out, name).shape != value.shape or out.dtype is not value.dtype or out.device != value.device:
        check.fail(name, f'must be {check.describe(value)}', check.describe(out))
    return out.copy_(value)


def pair_into(out: Pair | None, y: QuantTensor) -> QuantTensor:
    """Copy data and scale factors to where the caller wants them, if that is given."""
    if out is None:
        return y
    data, sf = check.pair(out, 'out')
    return QuantTensor(into(data, y.data, 'out[0]'), into(sf, y.sf, 'out[1]'), y.fmt)


# Arguments of ops ---------------------------------------------------------------------------


def check_matrix(x: Tensor, pack: int = 1) -> tuple[int, int]:
    """Shape of a matrix of model numbers with dense rows, each a multiple of `pack` channels."""
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden', dtype=DTYPES)
    check.unit_stride(x, 'x')
    check.at_least(hidden, 1, 'hidden')
    check.multiple(hidden, pack, 'hidden')
    return num_tokens, hidden


def check_quantized(x: QuantTensor) -> tuple[int, int]:
    """Shape of a quantized matrix with dense rows, whose scale factors have the layout of its format."""
    num_tokens, _ = check.shape(x.data, 'x', 'num_tokens stored', dtype=x.fmt.data.torch)
    check.unit_stride(x.data, 'x')
    hidden = x.shape[1]
    check.at_least(hidden, 1, 'hidden')
    check_sf(x.sf, 'x.sf', x.fmt, num_tokens, hidden)
    check.same_device(x=x.data, x_sf=x.sf)
    return num_tokens, hidden


def check_sf(sf: Tensor, name: str, fmt: QuantFormat, num_tokens: int, hidden: int) -> None:
    """`sf` must have the shape, dtype and layout of the scale factors of a (num_tokens, hidden) tensor."""
    height, width = fmt.sf_shape(num_tokens, hidden)
    check.shape(sf, name, 'sf_rows sf_cols', dtype=fmt.sf_dtype, sf_rows=height, sf_cols=width)
    if not fmt.col:
        check.contiguous(sf, name)
    elif height > 1 and sf.stride(0) != 1:
        check.fail(name, 'must be column-major (stride 1 between rows)', check.describe(sf))


def check_floor(amax_floor: float | None, fmt: QuantFormat) -> float:
    """The floor in force: the format's own unless given; no scale factor may become zero."""
    if amax_floor is None:
        return fmt.amax_floor
    check.at_least(amax_floor, fmt.data.max * (2.0**-9 if fmt.sf == 'e4m3' else 2.0**-126), 'amax_floor')
    return amax_floor


@functools.cache
def check_token_format(fmt: QuantFormat) -> None:
    """`fmt` must be a per-token format; asked once for each."""
    check.one_of(fmt.data.name, ('e4m3', 'e5m2', 'e2m1', 'e5m6'), 'fmt.data')
    check.equal(fmt.sf_block[0], 1, 'fmt.sf_block[0]')
    check.one_of(fmt.sf_block[1], (*GROUPS, 0), 'fmt.sf_block[1]')


def check_channel_format(fmt: QuantFormat) -> None:
    """`fmt` must be a format of groups of rows, with row-major scale factors."""
    check.one_of(fmt.data.name, FP8_NAMES.values(), 'fmt.data')
    check.one_of(fmt.sf_block[0], (32, 128, 0), 'fmt.sf_block[0]')
    check.equal(fmt.sf_block[1], 1, 'fmt.sf_block[1]')
    check.equal(fmt.col, False, 'fmt.col')
