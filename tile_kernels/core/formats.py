"""Quantized formats: the data element, and the blocks, rounding and layout of scale factors.

A format has one name, `<data>_<rows>x<cols>_<sf>[_col]`. Operator schemas, case ids, cache keys and docs all use this
name:

    e4m3_1x128_f32          fp8 data, one fp32 scale factor per token and 128 channels
    e4m3_1x128_ue8m0x4_col  power-of-two factors, four exponent bytes per int32, tokens contiguous (TMA-aligned)
    e2m1_1x16_e4m3          fp4 data with fp8 factors (NVFP4 style)
    e4m3_1xall_f32          one factor per token

`rows` and `cols` are the extent of the block that has one factor (`all` = the whole extent, stored as 0). A factor is
the *de*quantization multiplier: `x ~= data * sf`. No other module handles bits and scale layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.errors import ArgumentError


@dataclass(frozen=True)
class Element:
    """One number format: bits per value, the torch dtype of the container and the largest finite value."""

    name: str
    bits: int
    torch: torch.dtype
    max: float

    def stored(self, count: int) -> int:
        """The number of container elements of `count` values: e2m1 has two per byte, e5m6 eight per twelve bytes."""
        return count * self.bits // (8 * self.torch.itemsize)

    @property
    def pack(self) -> int:
        """The number of values that fill whole container elements; a row length must be a multiple of it."""
        return {4: 2, 12: 8}.get(self.bits, 1)


ELEMENTS: dict[str, Element] = {
    e.name: e
    for e in (
        Element('e4m3', 8, torch.float8_e4m3fn, 448.0),
        Element('e5m2', 8, torch.float8_e5m2, 57344.0),
        Element('e2m1', 4, torch.int8, 6.0),
        Element('e5m6', 12, torch.uint8, 65024.0),
    )
}

#: The smallest amax that a block is scaled by, so that a block of zeros has a finite factor.
AMAX_FLOOR = {'e4m3': 1e-4, 'e5m2': 1e-4, 'e5m6': 1e-4, 'e2m1': 6.0 * 2.0**-126}

#: The same for e4m3 factors: the smallest factor is 2^-9, the smallest positive e4m3 number.
AMAX_FLOOR_E4M3_SF = {name: element.max * 2.0**-9 for name, element in ELEMENTS.items()}

#: Storage of scale factors: dtype, factors per stored element, whether factors are powers of two.
SF_STORAGE = {
    'f32': (torch.float32, 1, False),
    'f32p2': (torch.float32, 1, True),
    'ue8m0x4': (torch.int32, 4, True),
    'e4m3': (torch.float8_e4m3fn, 1, False),
}

_NAME = re.compile(r'(?P<data>e\dm\d)_(?P<rows>\d+|all)x(?P<cols>\d+|all)_(?P<sf>[a-z0-9]+)(?P<col>_col)?')
_USUAL_BLOCKS = ('1x128', '1x32', '1x16', '128x128', '128x1', '1xall')
_formats: dict[str, QuantFormat] = {}
_flagged: dict[tuple, QuantFormat] = {}


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


@dataclass(frozen=True, eq=False)
class QuantFormat:
    """A quantized format. There is one instance per name, so `is` and `==` agree and hashing is free."""

    name: str
    data: Element
    sf_block: tuple[int, int]
    sf: str
    col: bool

    @staticmethod
    def parse(name: str | QuantFormat) -> QuantFormat:
        """The format called `name`."""
        return name if isinstance(name, QuantFormat) else _parse(name)

    @staticmethod
    def from_flags(
        fmt: str,
        block: tuple[int, int],
        use_tma_aligned_col_major_sf: bool = False,
        round_sf: bool = False,
        use_packed_ue8m0: bool = False,
        use_e4m3_sf: bool = False,
    ) -> QuantFormat:
        """The format that TileKernels' flag arguments describe; meaningless combinations are errors."""
        return _from_flags(fmt, block, use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, use_e4m3_sf)

    @property
    def power_of_two(self) -> bool:
        """Whether factors are rounded up to a power of two (`rceil`)."""
        return SF_STORAGE[self.sf][2]

    @property
    def sf_dtype(self) -> torch.dtype:
        """Dtype of the scale factor tensor."""
        return SF_STORAGE[self.sf][0]

    @property
    def sf_pack(self) -> int:
        """Factors per element of the scale factor tensor."""
        return SF_STORAGE[self.sf][1]

    @property
    def column_packed(self) -> bool:
        """Whether the four bytes of a packed factor come from four row blocks (per-channel formats)."""
        return self.sf_pack > 1 and self.sf_block[1] == 1

    @property
    def amax_floor(self) -> float:
        """The smallest amax that a block is scaled by."""
        return (AMAX_FLOOR_E4M3_SF if self.sf == 'e4m3' else AMAX_FLOOR)[self.data.name]

    def blocks(self, rows: int, cols: int) -> tuple[int, int]:
        """The number of scale blocks along each dimension of a (rows, cols) tensor."""
        block_rows, block_cols = self.sf_block
        return (
            _ceil_div(rows, block_rows) if block_rows else min(rows, 1),
            _ceil_div(cols, block_cols) if block_cols else min(cols, 1),
        )

    def sf_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the scale factor tensor of a (rows, cols) tensor."""
        block_rows, block_cols = self.blocks(rows, cols)
        if self.column_packed:
            return _ceil_div(block_rows, self.sf_pack), block_cols
        return block_rows, _ceil_div(block_cols, self.sf_pack)

    def data_shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the data tensor of a (rows, cols) tensor."""
        check.multiple(cols, self.data.pack, 'hidden')
        return rows, self.data.stored(cols)

    def empty_data(self, rows: int, cols: int, device: torch.device) -> Tensor:
        """Uninitialized data of a (rows, cols) tensor."""
        return torch.empty(self.data_shape(rows, cols), dtype=self.data.torch, device=device)

    def empty_sf(self, rows: int, cols: int, device: torch.device) -> Tensor:
        """Uninitialized factors of a (rows, cols) tensor; the columns of column-major factors are 16-byte aligned."""
        height, width = self.sf_shape(rows, cols)
        if not self.col:
            return torch.empty((height, width), dtype=self.sf_dtype, device=device)
        aligned = 16 // self.sf_dtype.itemsize
        pitch = _ceil_div(height, aligned) * aligned
        if isinstance(height, int) and height == 0:
            pitch = 1  # an empty tensor needs no alignment, and a stride of 0 would mean a broadcast
        columns = torch.empty_strided((pitch, width), (1, pitch), dtype=self.sf_dtype, device=device)
        # a symbolic height is always sliced: comparing it would specialize the graph
        return columns if isinstance(height, int) and height == pitch else columns.narrow(0, 0, height)

    def empty(self, rows: int, cols: int, device: torch.device) -> QuantTensor:
        """An uninitialized quantized (rows, cols) tensor."""
        return QuantTensor(self.empty_data(rows, cols, device), self.empty_sf(rows, cols, device), self)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"QuantFormat('{self.name}')"

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantFormat.parse, (self.name,)


def _constant(fn: Callable) -> Callable:
    """Let `torch.compile` call `fn` while tracing and keep the result, instead of tracing through it.

    This is `torch.compiler.assume_constant_result` without its import of the whole compiler.
    """
    fn._dynamo_marked_constant = True
    return fn


@_constant
def _parse(name: str) -> QuantFormat:
    known = _formats.get(name)
    return known if known is not None else _define(name)


@_constant
def _from_flags(
    fmt: str, block: tuple[int, int], col: bool, round_sf: bool, packed: bool, e4m3_sf: bool
) -> QuantFormat:
    flags = fmt, tuple(block) if isinstance(block, (list, tuple)) else block, col, round_sf, packed, e4m3_sf
    known = _flagged.get(flags)
    if known is not None:
        return known
    check.one_of(fmt, ELEMENTS, 'fmt')
    if not isinstance(flags[1], tuple) or len(block) != 2 or not all(isinstance(n, int) and n >= 0 for n in block):
        check.fail('block', 'must be two integers, of rows and of channels', repr(block))
    if packed and not round_sf:
        check.fail(
            'use_packed_ue8m0', 'must come with round_sf=True (an exponent byte holds a power of two)', 'round_sf=False'
        )
    if e4m3_sf and (round_sf or packed):
        check.fail('use_e4m3_sf', 'must not be combined with round_sf or use_packed_ue8m0', 'both')
    sf = 'ue8m0x4' if packed else 'e4m3' if e4m3_sf else 'f32p2' if round_sf else 'f32'
    rows, cols = (str(extent) if extent else 'all' for extent in block)
    _flagged[flags] = _parse(f'{fmt}_{rows}x{cols}_{sf}' + ('_col' if col else ''))
    return _flagged[flags]


def _define(name: str) -> QuantFormat:
    """Parse, validate and intern a format."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    if match is None:
        _fail('be a whole format <data>_<rows>x<cols>_<sf>[_col], e.g. e4m3_1x128_f32', name)
    data, sf = match['data'], match['sf']
    if data not in ELEMENTS:
        _fail(f'have data of {", ".join(ELEMENTS)}', name)
    if sf not in SF_STORAGE:
        _fail(f'have scale factors of {", ".join(SF_STORAGE)}', name)
    rows, cols = (0 if extent == 'all' else int(extent) for extent in (match['rows'], match['cols']))
    if '0' in (match['rows'], match['cols']):
        _fail('have a scale block of at least one row and one column, or all for the whole extent', name)
    fmt = QuantFormat(name, ELEMENTS[data], (rows, cols), sf, match['col'] is not None)
    return _formats.setdefault(name, fmt)


def _fail(rule: str, name: object) -> NoReturn:
    """Raise the error sentence on behalf of the function that received this format name."""
    check.fail('fmt', f'must {rule}', repr(name), _near(name), op='QuantFormat.parse')


def _near(name: object) -> str | None:
    """The format that a misspelled name probably means, with the scale block of the name if it has one."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    blocks = [f'{match["rows"]}x{match["cols"]}'] if match else _USUAL_BLOCKS
    names = (f'{data}_{block}_{sf}' for data in ELEMENTS for block in blocks for sf in SF_STORAGE)
    return check.did_you_mean(name, [n + col for n in names for col in ('', '_col')])


class QuantTensor(tuple):
    """A quantized tensor: `data`, scale factors `sf` and the format `fmt` that describes both.

    It unpacks as `(data, sf)`, so code that expects the plain pair keeps working.
    """

    fmt: QuantFormat

    def __new__(cls, data: Tensor, sf: Tensor, fmt: QuantFormat | str) -> QuantTensor:
        """Combine codes with their factors."""
        pair = super().__new__(cls, (data, sf))
        pair.fmt = QuantFormat.parse(fmt)
        return pair

    @property
    def data(self) -> Tensor:
        """The codes, in the container dtype of the format."""
        return self[0]

    @property
    def sf(self) -> Tensor:
        """The scale factors (dequantization multipliers)."""
        return self[1]

    @property
    def shape(self) -> torch.Size:
        """Logical shape: values, not container elements."""
        *rows, stored = self.data.shape
        return torch.Size((*rows, stored * 8 * self.data.dtype.itemsize // self.fmt.data.bits))

    @property
    def device(self) -> torch.device:
        """Device of the data."""
        return self.data.device

    def to(self, device: torch.device | str | int) -> QuantTensor:
        """The same codes and factors on another device, or `self` if they are there; `quant.cast_back` gives values."""
        if isinstance(device, (torch.dtype, Tensor)):
            check.fail('device', 'must be a device', repr(device), 'quant.cast_back gives numbers', 'QuantTensor.to')
        data = self.data.to(device)
        if data is self.data and self.sf.device == data.device:
            return self
        if not self.fmt.col or self.sf.dim() != 2:
            return QuantTensor(data, self.sf.to(device), self.fmt)
        rows, cols = self.shape
        sf = self.fmt.empty_sf(rows, cols, data.device).copy_(self.sf)  # `to` would drop the padding of the columns
        return QuantTensor(data, sf, self.fmt)

    def cpu(self) -> QuantTensor:
        """`to('cpu')`."""
        return self.to('cpu')

    def cuda(self) -> QuantTensor:
        """`to('cuda')`."""
        return self.to('cuda')

    def __repr__(self) -> str:
        return f'QuantTensor({self.fmt}, shape={tuple(self.shape)}, device={self.device})'

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantTensor, (self.data, self.sf, self.fmt.name)

    def __add__(self, other: object) -> Any:
        """Join with another tuple, as the plain pair does."""
        return super().__add__(other) if isinstance(other, tuple) else self._no_arithmetic(other)

    def _no_arithmetic(self, *_: object) -> NoReturn:
        raise ArgumentError('QuantTensor: has no arithmetic; quant.cast_back gives numbers to compute with')

    __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _no_arithmetic
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = _no_arithmetic


def quant_tensor(pair: tuple[Tensor, Tensor], fmt: QuantFormat) -> QuantTensor:
    """A `QuantTensor` of a parsed format; the constructor would look it up again."""
    made = tuple.__new__(QuantTensor, pair)
    made.fmt = fmt
    return made


def _rebuild(children: Iterable[Any], name: Any) -> QuantTensor:
    data, sf = children
    return QuantTensor(data, sf, name)


torch.utils._pytree.register_pytree_node(
    QuantTensor,
    lambda q: ([q.data, q.sf], q.fmt.name),
    _rebuild,
    serialized_type_name='tile_kernels.QuantTensor',
)

torch.serialization.add_safe_globals([QuantTensor])  # `torch.load` with `weights_only=True`, its default
