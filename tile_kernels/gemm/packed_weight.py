"""Packed weights: codes of 4 or 8 bits with factors, in the order in which the lanes of a warp multiply them.

    W[n, k] = (code[n, k] - zero[n, k // group]) * scale[n, k // group]        real numbers

A tile is 16 rows by 64 channels of 4 bits, or by 32 channels of 8 bits. A lane owns 16 bytes of it, four words. Lane
4 g + t has rows g and g + 8. Of 16 channels it has 2 t, 2 t + 1, 2 t + 8 and 2 t + 9. So its words are the registers of
the first operand of mma m16n8k16, and of wgmma. One load of 16 bytes serves the whole tile, for both.

| element | a word has | position of a value | a pair to half precision |
|---|---|---|---|
| u4 | 16 channels | nibble `pair + 4 * parity` | and-or with 128 (bf16) or 1024 (fp16), subtract |
| e2m1 | 16 channels | bits `E2M1_BITS[pair]` of half `parity` | mask 0x81C0, multiply by 2^126 (fp16: shift, 2^14) |
| s8 | 8 channels | byte `pair % 2 + 2 * parity` | as u4; bf16 subtracts the sign bit, fp16 inverts it |
| e4m3 | 8 channels | byte `pair % 2 + 2 * parity` | shift, mask, multiply by 2^120 (bf16) or 2^8 (fp16) |

`pair` is 0 or 1 for rows g and g + 8, plus 2 for channels 2 t + 8 on. `parity` is the channel of a pair, and the half
of the word. So a shift and a mask of a word give both numbers of a pair.

Factors and zero points of rows g and g + 8 are adjacent: (tiles of rows, groups, g, 2 * groups in a tile). Only the
factors of blocks of 128 x 128 stay as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import torch
from torch import Tensor

from tile_kernels.core import check

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
#: Dtypes of factors that formats leave open.
SCALES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = 16  # rows of a tile
LANES = 32
BLOCK = 128  # rows of a block of factors
ZERO = 8  # the zero point of u4 unless given
#: Bits of half a word that hold sign, exponent, exponent and mantissa of an e2m1 code, for each of four pairs.
E2M1_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 11, 10, 13))
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # nibble of a word that holds column 0, 1, ...


@dataclass(frozen=True)
class WeightFormat:
    """Element, group and factors of packed weights; `group` 0 is all channels."""

    name: str
    element: str
    group: int
    factor: str  # 'any', 'f32', 'ue8m0' or 'e4m3'
    blocks: bool = False  # factors of 128 rows by 128 channels

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 4 if self.element in ('u4', 'e2m1') else 8

    @property
    def depth(self) -> int:
        """Channels of a tile."""
        return 256 // self.bits

    @property
    def multiple(self) -> int:
        """What the number of channels must be a multiple of."""
        return 8 if self.blocks else self.group or 8

    @property
    def per_tile(self) -> int:
        """Groups in a tile."""
        return max(1, self.depth // self.group) if self.group else 1

    def groups(self, k: int) -> int:
        """Groups of a row of k channels."""
        return -(-k // self.group) if self.group else 1

    def stored_groups(self, k: int) -> int:
        """The same, in multiples of those of a tile."""
        return -(-self.groups(k) // self.per_tile)

    def tiles(self, n: int, k: int) -> tuple[int, int]:
        """Tiles of a matrix."""
        return -(-n // ROWS), -(-k // self.depth)

    def scale_shape(self, n: int, k: int) -> tuple[int, ...]:
        """Shape of the packed factors."""
        if self.blocks:
            return -(-n // BLOCK), self.groups(k)
        return -(-n // ROWS), self.stored_groups(k), 8, 2 * self.per_tile


FORMATS: dict[str, WeightFormat] = {
    fmt.name: fmt
    for fmt in (
        WeightFormat('u4_1x128', 'u4', 128, 'any'),
        WeightFormat('u4_1x64', 'u4', 64, 'any'),
        WeightFormat('u4_1x32', 'u4', 32, 'any'),
        WeightFormat('u4_1xk', 'u4', 0, 'any'),
        WeightFormat('s8_1x128', 's8', 128, 'any'),
        WeightFormat('s8_1xk', 's8', 0, 'any'),
        WeightFormat('e4m3_128x128_f32', 'e4m3', 128, 'f32', blocks=True),
        WeightFormat('e4m3_1xk_f32', 'e4m3', 0, 'f32'),
        WeightFormat('e2m1_1x32_ue8m0', 'e2m1', 32, 'ue8m0'),
        WeightFormat('e2m1_1x16_e4m3', 'e2m1', 16, 'e4m3'),
    )
}


@dataclass(frozen=True)
class PackedWeight:
    """A weight of (n, k), or several of (num_groups, n, k), in a packed format; `pack_weight` makes it.

    Its tensors are `codes`, `scale` and, where the weight has them, `zero`, `global_scale` and `perm`. They are in the
    layout of `gemm_dequant`; `unpack` and `dequantize` give the usual one.
    """

    fmt: str
    n: int
    k: int
    codes: Tensor
    scale: Tensor
    zero: Tensor | None = None
    global_scale: Tensor | None = None
    perm: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Logical shape."""
        return torch.Size((*self.codes.shape[:-4], self.n, self.k))

    @property
    def device(self) -> torch.device:
        """Device of the codes."""
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name, without those that are None."""
        own = {name: getattr(self, name) for name in TENSORS}
        return {name: x for name, x in own.items() if x is not None}

    def to(self, device: torch.device | str | int) -> 'PackedWeight':
        """The same weight on another device."""
        moved = {name: x.to(device) for name, x in self.tensors().items()}
        return PackedWeight(self.fmt, self.n, self.k, **moved)

    def unpack(self) -> Tensor:
        """The codes: (..., n, k) uint8 (u4, e2m1), int8 (s8) or float8_e4m3fn."""
        fmt = FORMATS[self.fmt]
        codes = _own_dtype(_unlay_codes(self.codes, fmt, self.n, self.k), fmt)
        return codes if self.perm is None else codes.index_select(-1, self.perm.argsort())

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Factors and zero points: (..., n, groups), or (..., blocks of rows, groups) for blocks of 128 x 128."""
        fmt = FORMATS[self.fmt]
        if fmt.blocks:
            return self.scale, None
        parts = [None if x is None else _unlay_factors(x, fmt, self.n, self.k) for x in (self.scale, self.zero)]
        return parts[0], parts[1]  # type: ignore[return-value]

    def dequantize(self, dtype: torch.dtype | str = torch.float32) -> Tensor:
        """The matrix (..., n, k); products are computed in float32 and rounded once."""
        dtype = check.to_dtype(dtype, 'dtype')
        fmt = FORMATS[self.fmt]
        codes = _unlay_codes(self.codes, fmt, self.n, self.k)
        values = _values(_own_dtype(codes, fmt), fmt)
        scale, zero = self.factors()
        scale = numbers_of(scale, fmt)
        if self.global_scale is not None:
            scale = scale * self.global_scale.reshape(*self.codes.shape[:-4], 1, 1)
        if fmt.blocks:
            scale = scale.repeat_interleave(BLOCK, dim=-2)[..., : self.n, :]
        wide = _spread(scale, fmt, self.k)
        if fmt.element == 'u4':
            values = values - (float(ZERO) if zero is None else _spread(zero.float(), fmt, self.k))
        matrix = (values * wide).to(dtype)
        return matrix if self.perm is None else matrix.index_select(-1, self.perm.argsort())

    def __repr__(self) -> str:
        return f'PackedWeight({self.fmt}, shape={tuple(self.shape)}, device={self.device})'


TENSORS = tuple(field.name for field in fields(PackedWeight))[3:]


def _flatten(weight: PackedWeight) -> tuple[list[Any], tuple]:
    own = weight.tensors()
    return list(own.values()), (weight.fmt, weight.n, weight.k, tuple(own))


def _restore(children: Any, about: tuple) -> PackedWeight:
    fmt, n, k, names = about
    return PackedWeight(fmt, n, k, **dict(zip(names, children, strict=True)))


torch.utils._pytree.register_pytree_node(
    PackedWeight, _flatten, _restore, serialized_type_name='tile_kernels.PackedWeight'
)


# Layout -------------------------------------------------------------------------------------


def _spread(factors: Tensor, fmt: WeightFormat, k: int) -> Tensor:
    """Factors of groups for every channel."""
    return factors.repeat_interleave(fmt.group, dim=-1)[..., :k] if fmt.group else factors


def _own_dtype(codes: Tensor, fmt: WeightFormat) -> Tensor:
    return codes.view(torch.int8) if fmt.element == 's8' else codes.view(FP8) if fmt.element == 'e4m3' else codes


def _values(codes: Tensor, fmt: WeightFormat) -> Tensor:
    """The numbers of codes, without factors and zero points."""
    if fmt.element != 'e2m1':
        return codes.float()
    table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), device=codes.device)
    return table[codes.long()]


def numbers_of(scale: Tensor, fmt: WeightFormat) -> Tensor:
    """Factors as float32."""
    if fmt.factor != 'ue8m0':
        return scale.view(FP8).float() if fmt.factor == 'e4m3' else scale.float()
    return scale.view(torch.uint8).view(E8M0).float()


def _positions(fmt: WeightFormat) -> tuple[tuple[int, ...], ...]:
    """Bits of a word that hold the bits of each value, the lowest first."""
    if fmt.element != 'e2m1':
        return tuple(tuple(range(fmt.bits * i, fmt.bits * (i + 1))) for i in range(32 // fmt.bits))
    return tuple(tuple(bit + 16 * half for bit in reversed(bits)) for half in range(2) for bits in E2M1_BITS)


def lay_codes(codes: Tensor, fmt: WeightFormat) -> Tensor:
    """Codes (..., n, k) uint8 in tiles: (..., tiles of rows, tiles of channels, lane, 4) int32."""
    *lead, n, k = codes.shape
    rows, cols = fmt.tiles(n, k)
    padded = torch.nn.functional.pad(codes, (0, cols * fmt.depth - k, 0, rows * ROWS - n))
    steps = fmt.depth // 16
    parts = padded.reshape(
        -1, rows, 2, 8, cols, steps, 2, 4, 2
    )  # all, row, half of rows, g, tile, step, half, t, parity
    order = (0, 1, 4, 3, 7, 5, 8, 6, 2) if fmt.bits == 4 else (0, 1, 4, 3, 7, 5, 6, 8, 2)
    values = parts.permute(order).reshape(*lead, rows, cols, LANES, 4, 32 // fmt.bits).int()
    words = torch.zeros(values.shape[:-1], dtype=torch.int32, device=codes.device)
    for value, bits in enumerate(_positions(fmt)):
        if bits == tuple(range(bits[0], bits[0] + fmt.bits)):
            words |= values[..., value] << bits[0]
        else:
            for number, bit in enumerate(bits):
                words |= (values[..., value] >> number & 1) << bit
    return words


def _unlay_codes(words: Tensor, fmt: WeightFormat, n: int, k: int) -> Tensor:
    """The inverse of `lay_codes`."""
    *lead, rows, cols, _, _ = words.shape
    values = []
    for bits in _positions(fmt):
        if bits == tuple(range(bits[0], bits[0] + fmt.bits)):
            values.append((words >> bits[0] & (1 << fmt.bits) - 1).to(torch.uint8))
        else:
            single = [(words >> bit & 1) << number for number, bit in enumerate(bits)]
            values.append(torch.stack(single).sum(0).to(torch.uint8))
    steps = fmt.depth // 16
    stacked = torch.stack(values, dim=-1)
    if fmt.bits == 4:
        parts = stacked.reshape(
            -1, rows, cols, 8, 4, steps, 2, 2, 2
        )  # all, row, tile, g, t, step, parity, half, row half
        order = (0, 1, 8, 3, 2, 5, 7, 4, 6)
    else:
        parts = stacked.reshape(
            -1, rows, cols, 8, 4, steps, 2, 2, 2
        )  # all, row, tile, g, t, step, half, parity, row half
        order = (0, 1, 8, 3, 2, 5, 6, 4, 7)
    return parts.permute(order).reshape(*lead, rows * ROWS, cols * fmt.depth)[..., :n, :k].contiguous()


def lay_factors(factors: Tensor, fmt: WeightFormat) -> Tensor:
    """Factors (..., n, groups) in the order of lanes; padding repeats zeros."""
    *lead, n, groups = factors.shape
    rows, per = -(-n // ROWS), fmt.per_tile
    stored = -(-groups // per)
    bits = factors.view(torch.uint8) if factors.element_size() == 1 else factors
    padded = torch.nn.functional.pad(bits, (0, stored * per - groups, 0, rows * ROWS - n))
    parts = padded.reshape(-1, rows, 2, 8, stored, per)
    return parts.permute(0, 1, 4, 3, 5, 2).reshape(*lead, rows, stored, 8, 2 * per).contiguous()


def _unlay_factors(factors: Tensor, fmt: WeightFormat, n: int, k: int) -> Tensor:
    *lead, rows, stored, _, width = factors.shape
    per = width // 2
    parts = factors.reshape(-1, rows, stored, 8, per, 2).permute(0, 1, 5, 3, 2, 4)
    return parts.reshape(*lead, rows * ROWS, stored * per)[..., :n, : fmt.groups(k)].contiguous()


# Packing ------------------------------------------------------------------------------------


def _fail(argument: str, rule: str, fact: str, op: str = 'pack_weight') -> NoReturn:
    check.fail(argument, rule, fact, op=op)


def format_of(fmt: object) -> WeightFormat:
    """The format of this name."""
    if not isinstance(fmt, str) or fmt not in FORMATS:
        _fail('fmt', f'must be one of {", ".join(FORMATS)}', repr(fmt))
    return FORMATS[fmt]


def pack_weight(
    codes: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    fmt: str,
    order: str = 'nk',
    perm: Tensor | None = None,
    global_scale: Tensor | float | None = None,
) -> PackedWeight:
    """Pack a quantized weight for `gemm_dequant`; exact, once, on any device.

    Args:
        codes: (n, k), or (num_groups, n, k) for `grouped_gemm_dequant`. Integers from 0 to 15 for u4 and e2m1, int8 for
            s8, float8_e4m3fn for e4m3. Two e2m1 codes may share a byte, the first in the low nibble: (n, k / 2).
        scale: (n, k / group); (n,) or (n, 1) if a group is all channels; (ceil(n / 128), ceil(k / 128)) for blocks.
            Its dtype is bfloat16, float16 or float32 for u4 and s8, and float32 for e4m3. It is float8_e8m0fnu or uint8
            for `_ue8m0`, and float8_e4m3fn or uint8 for `_e4m3`.
        zero: zero points of u4 from 0 to 15, in the shape of `scale`; 8 unless given.
        fmt: a name of `FORMATS`.
        order: 'nk', or 'kn' if codes, scale and zero are transposed.
        perm: (k,) a permutation: position i of the packed channels is channel perm[i] of `codes`. Groups are those of
            the packed order.
        global_scale: a float32 factor of the whole matrix, only with `e2m1_1x16_e4m3`; (num_groups,) for several.

    Returns:
        The packed weight; n and k are padded inside it.
    """
    form = format_of(fmt)
    if order not in ('nk', 'kn'):
        _fail('order', "must be 'nk' or 'kn'", repr(order))
    for name, x in dict(codes=codes, scale=scale).items():
        if not isinstance(x, Tensor):
            _fail(name, 'must be a tensor', check.describe(x))
    if codes.dim() not in (2, 3):
        _fail('codes', 'must be (n, k) or (num_groups, n, k)', check.describe(codes))
    if order == 'kn':
        codes = codes.transpose(-1, -2)
        scale = scale if scale.dim() < codes.dim() else scale.transpose(-1, -2)
        zero = zero if zero is None or zero.dim() < codes.dim() else zero.transpose(-1, -2)
    codes = _check_codes(codes, scale, form)
    *lead, n, k = codes.shape
    if n == 0 or k == 0 or 0 in lead:
        _fail('codes', 'must not be empty', check.describe(codes))
    if k % 8:
        _fail('the channels of codes', 'must be a multiple of 8', str(k))
    if form.group and k % form.group and not form.blocks:
        _fail('the channels of codes', f'must be a multiple of the group of {form.group}', str(k))
    scale = _check_scale(scale, form, lead, n, k)
    zero = _check_zero(zero, form, lead, n, k, scale.dtype)
    if perm is not None:
        perm = _check_perm(perm, k)
        codes = codes.index_select(-1, perm)
    whole = _check_global(global_scale, form, lead, codes.device)
    laid = scale.contiguous() if form.blocks else lay_factors(scale, form)
    zeros = None if zero is None else lay_factors(zero, form)
    return PackedWeight(form.name, n, k, lay_codes(codes.contiguous(), form), laid, zeros, whole, perm)


def _check_codes(codes: Tensor, scale: Tensor, form: WeightFormat) -> Tensor:
    """The codes as bytes (..., n, k)."""
    if form.element in ('s8', 'e4m3'):
        wanted = torch.int8 if form.element == 's8' else FP8
        if codes.dtype is not wanted:
            _fail('codes', f'must be {str(wanted).removeprefix("torch.")} for {form.name}', check.describe(codes))
        codes = codes.contiguous().view(torch.uint8)
        if form.element == 'e4m3' and bool(((codes & 127) == 127).any()):
            _fail('codes', 'must be finite', 'NaN')
        return codes
    if codes.is_floating_point() or codes.dtype is torch.bool:
        _fail('codes', f'must be integers for {form.name}', check.describe(codes))
    if form.element == 'e2m1' and scale.dim() and 2 * codes.shape[-1] == scale.shape[-1] * form.group:
        both = codes.contiguous().view(torch.uint8) if codes.element_size() == 1 else codes.to(torch.uint8)
        return torch.stack((both & 15, both >> 4), dim=-1).flatten(-2)
    if codes.numel() and bool((codes < 0).any() | (codes > 15).any()):
        _fail('codes', f'must be from 0 to 15 for {form.name}', f'{int(codes.min())} to {int(codes.max())}')
    return codes.to(torch.uint8)


def _check_scale(scale: Tensor, form: WeightFormat, lead: list[int], n: int, k: int) -> Tensor:
    allowed = dict(any=SCALES, f32=(torch.float32,), ue8m0=(torch.uint8, E8M0), e4m3=(torch.uint8, FP8))[form.factor]
    if scale.dtype not in allowed:
        names = ' or '.join(str(dtype).removeprefix('torch.') for dtype in allowed)
        _fail('scale', f'must be {names} for {form.name}', check.describe(scale))
    if form.group == 0 and scale.dim() == len(lead) + 1:
        scale = scale.unsqueeze(-1)
    shape = (*lead, -(-n // BLOCK) if form.blocks else n, form.groups(k))
    if tuple(scale.shape) != shape:
        _fail('scale', f'must be {shape} for {form.name}', check.describe(scale))
    if form.factor in ('ue8m0', 'e4m3'):
        scale = scale.contiguous().view(torch.uint8)
        if bool((scale == 255).any() if form.factor == 'ue8m0' else ((scale & 127) == 127).any()):
            _fail('scale', 'must be finite', 'NaN')
    return scale


def _check_zero(
    zero: Tensor | None, form: WeightFormat, lead: list[int], n: int, k: int, dtype: torch.dtype
) -> Tensor | None:
    if zero is None:
        return None
    if form.element != 'u4':
        _fail('zero', f'must be None for {form.name}', check.describe(zero))
    if zero.dim() == len(lead) + 1 and form.group == 0:
        zero = zero.unsqueeze(-1)
    shape = (*lead, n, form.groups(k))
    if tuple(zero.shape) != shape:
        _fail('zero', f'must be {shape} for {form.name}', check.describe(zero))
    if bool(((zero < 0) | (zero > 15)).any()) or (zero.is_floating_point() and bool((zero != zero.round()).any())):
        _fail('zero', 'must be integers from 0 to 15', f'{zero.min().item()} to {zero.max().item()}')
    return zero.to(torch.int16)


def _check_perm(perm: Tensor, k: int) -> Tensor:
    if tuple(perm.shape) != (k,) or perm.is_floating_point():
        _fail('perm', f'must be ({k},) integers', check.describe(perm))
    if not torch.equal(perm.sort().values.long(), torch.arange(k, device=perm.device)):
        _fail('perm', f'must have every channel from 0 to {k - 1} once', 'another list')
    return perm.long().contiguous()


def _check_global(
    given: Tensor | float | None, form: WeightFormat, lead: list[int], device: torch.device
) -> Tensor | None:
    if form.factor != 'e4m3':
        if given is not None:
            _fail('global_scale', f'must be None for {form.name}', check.describe(given))
        return None
    number = 1.0 if given is None else given
    whole = torch.as_tensor(number, dtype=torch.float32, device=device)
    shape = tuple(lead) or (1,)
    if whole.numel() not in (1, shape[0]):
        _fail('global_scale', f'must be one number or {shape}', check.describe(given))
    return whole.reshape(-1).expand(shape).contiguous()


# Checkpoints --------------------------------------------------------------------------------


def _nibbles(words: Tensor, dim: int, order: tuple[int, ...] = tuple(range(8)), bits: int = 4) -> Tensor:
    """The unsigned codes of int32 words along a dimension; value j of a word is its nibble order[j]."""
    parts = torch.stack([words >> bits * place & (1 << bits) - 1 for place in order], dim=dim + 1)
    return parts.flatten(dim, dim + 1)


def _words(x: Any, name: str, op: str) -> Tensor:
    if not isinstance(x, Tensor) or x.dtype is not torch.int32 or x.dim() != 2:
        _fail(name, 'must be a matrix of int32 words', check.describe(x), op)
    return x


def _grouped(element: str, groups: int, k: int, op: str) -> str:
    """The format of a checkpoint whose scales have this many groups."""
    sizes = [form.group for form in FORMATS.values() if form.element == element and form.group]
    if groups == 0 or k % groups:
        _fail('the groups of scales', f'must divide the {k} channels', str(groups), op)
    if groups > 1 and k // groups not in sizes:
        _fail('the group of scales', f'must be all channels or one of {sizes}', str(k // groups), op)
    return f'{element}_1x{k // groups}' if groups > 1 else f'{element}_1xk'


def _sorted_groups(g_idx: Tensor | None, k: int, groups: int, name: str, op: str) -> Tensor | None:
    """The order of channels that makes groups contiguous; None if they are."""
    if g_idx is None or g_idx.numel() == 0 or (g_idx.numel() == k and bool((g_idx < 0).all())):
        return None
    if tuple(g_idx.shape) != (k,):
        _fail(name, f'must be ({k},)', check.describe(g_idx), op)
    expected = torch.arange(k, device=g_idx.device) // (k // groups)
    if torch.equal(g_idx.long(), expected):
        return None
    perm = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx.long()[perm], expected):
        _fail(name, f'must have {k // groups} channels of every group', 'another number', op)
    return perm


def _matching(scales: Tensor, shape: tuple[int | None, int], name: str, op: str) -> Tensor:
    wanted = tuple('groups' if extent is None else extent for extent in shape)
    if not isinstance(scales, Tensor) or scales.dim() != 2 or scales.dtype not in SCALES:
        _fail(name, f'must be {wanted} of floating point', check.describe(scales), op)
    if any(want is not None and want != extent for want, extent in zip(shape, scales.shape, strict=True)):
        _fail(name, f'must be {wanted}', check.describe(scales), op)
    return scales


def from_gptq(
    *, qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None, g_idx: Tensor | None = None, version: int = 1
) -> PackedWeight:
    """Pack the tensors of a GPTQ checkpoint of 4 bits.

    Args:
        qweight: (k / 8, n) int32; the nibbles of a word are eight channels.
        scales: (groups, n).
        qzeros: (groups, n / 8) int32; the nibbles of a word are eight columns. 8 unless given.
        g_idx: (k,) the group of every channel, for files made with activation order.
        version: 1 if zero points are stored minus one (modulo 16), 2 if they are stored as they are.

    Returns:
        The packed weight of (n, k).
    """
    op = 'from_gptq'
    words = _words(qweight, 'qweight', op)
    if version not in (1, 2):
        _fail('version', 'must be 1 or 2', repr(version), op)
    k, n = words.shape[0] * 8, words.shape[1]
    groups = _matching(scales, (None, n), 'scales', op).shape[0]
    fmt = _grouped('u4', groups, k, op)
    zero = None
    if qzeros is not None:
        if tuple(_words(qzeros, 'qzeros', op).shape) != (groups, -(-n // 8)):
            _fail('qzeros', f'must be ({groups}, {-(-n // 8)})', check.describe(qzeros), op)
        zero = (_nibbles(qzeros, 1)[:, :n] + (2 - version) & 15).T
    perm = _sorted_groups(g_idx, k, groups, 'g_idx', op)
    return pack_weight(_nibbles(words, 0).T, scales.T, zero, fmt=fmt, perm=perm)


def from_awq(*, qweight: Tensor, scales: Tensor, qzeros: Tensor | None = None) -> PackedWeight:
    """Pack the tensors of an AWQ checkpoint of 4 bits.

    Args:
        qweight: (k, n / 8) int32; the nibbles of a word are columns 0, 2, 4, 6, 1, 3, 5, 7.
        scales: (groups, n).
        qzeros: (groups, n / 8) int32 in the same order; 8 unless given.

    Returns:
        The packed weight of (n, k).
    """
    op = 'from_awq'
    words = _words(qweight, 'qweight', op)
    k, n = words.shape[0], words.shape[1] * 8
    groups = _matching(scales, (None, n), 'scales', op).shape[0]
    fmt = _grouped('u4', groups, k, op)
    zero = None
    if qzeros is not None:
        if tuple(_words(qzeros, 'qzeros', op).shape) != (groups, n // 8):
            _fail('qzeros', f'must be ({groups}, {n // 8})', check.describe(qzeros), op)
        zero = _nibbles(qzeros, 1, AWQ_ORDER).T
    return pack_weight(_nibbles(words, 1, AWQ_ORDER).T, scales.T, zero, fmt=fmt)


def from_compressed_tensors(
    *,
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_zero_point: Tensor | None = None,
    weight_shape: Tensor | tuple[int, int] | None = None,
    weight_g_idx: Tensor | None = None,
    num_bits: int = 4,
) -> PackedWeight:
    """Pack the tensors of a compressed-tensors checkpoint in the format `pack-quantized`.

    Args:
        weight_packed: (n, k / 8) int32, or (n, k / 4) for 8 bits; codes are stored plus 8 or 128.
        weight_scale: (n, groups).
        weight_zero_point: (n / 8, groups) int32, packed along n, also stored plus 8; only 4 bits have zero points.
        weight_shape: n and k, if a row is padded to whole words.
        weight_g_idx: (k,) the group of every channel, for files made with activation order.
        num_bits: 4 or 8.

    Returns:
        The packed weight of (n, k).
    """
    op = 'from_compressed_tensors'
    words = _words(weight_packed, 'weight_packed', op)
    if num_bits not in (4, 8):
        _fail('num_bits', 'must be 4 or 8', repr(num_bits), op)
    n, k = words.shape[0], words.shape[1] * 32 // num_bits
    if weight_shape is not None:
        shape = tuple(int(extent) for extent in weight_shape)
        if len(shape) != 2 or shape[0] != n or not k - 32 // num_bits < shape[1] <= k:
            _fail('weight_shape', f'must be ({n}, {k}) without padding', repr(shape), op)
        k = shape[1]
    groups = _matching(weight_scale, (n, None), 'weight_scale', op).shape[1]  # type: ignore[arg-type]
    fmt = _grouped('u4' if num_bits == 4 else 's8', groups, k, op)
    codes = _nibbles(words, 1, tuple(range(32 // num_bits)), num_bits)[:, :k]
    zero = None
    if weight_zero_point is not None:
        if num_bits == 8:
            _fail('weight_zero_point', 'must be None for 8 bits', check.describe(weight_zero_point), op)
        if tuple(_words(weight_zero_point, 'weight_zero_point', op).shape) != (-(-n // 8), groups):
            _fail('weight_zero_point', f'must be ({-(-n // 8)}, {groups})', check.describe(weight_zero_point), op)
        zero = _nibbles(weight_zero_point, 0)[:n]
    if num_bits == 8:
        codes = (codes - 128).to(torch.int8)
    perm = _sorted_groups(weight_g_idx, k, groups, 'weight_g_idx', op)
    return pack_weight(codes, weight_scale, zero, fmt=fmt, perm=perm)


# Quantizing ---------------------------------------------------------------------------------


def _integers(weight: Tensor, form: WeightFormat, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Symmetric codes of u4 or s8, nearest even: factors are amax / 7 or amax / 127."""
    *lead, n, k = weight.shape
    group = form.group or k
    parts = weight.reshape(*lead, n, k // group, group)
    top, offset = (7, ZERO) if form.element == 'u4' else (127, 0)
    scale = (parts.abs().amax(-1) / top).to(scale_dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    codes = (parts / scale.float().unsqueeze(-1)).round().clamp(-top - 1, top) + offset
    return codes.reshape(weight.shape).to(torch.uint8 if form.element == 'u4' else torch.int8), scale


def _e4m3(weight: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor]:
    *lead, n, k = weight.shape
    if form.blocks:
        rows, cols = -(-n // BLOCK), -(-k // BLOCK)
        padded = torch.nn.functional.pad(weight, (0, cols * BLOCK - k, 0, rows * BLOCK - n))
        amax = padded.reshape(*lead, rows, BLOCK, cols, BLOCK).abs().amax((-3, -1))
    else:
        amax = weight.abs().amax(-1, keepdim=True)
    scale = amax.clamp(min=1e-4) / 448
    wide = scale.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)[..., :n, :k] if form.blocks else scale
    return (weight / wide).clamp(-448, 448).to(FP8), scale


def _nearest_e2m1(values: Tensor) -> Tensor:
    """e2m1 codes, nearest, ties to the even code, saturating."""
    table = torch.tensor(E2M1_VALUES, device=values.device)
    bounds = (table[1:] + table[:-1]) / 2
    size = values.abs()
    low, high = torch.bucketize(size, bounds, right=False), torch.bucketize(size, bounds, right=True)
    return (torch.where(low % 2 == 0, low, high) | (values.signbit().long() << 3)).to(torch.uint8)


def _e2m1(weight: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor, Tensor | None]:
    *lead, n, k = weight.shape
    parts = weight.reshape(*lead, n, k // form.group, form.group)
    amax = parts.abs().amax(-1)
    if form.factor == 'ue8m0':
        exponent = torch.log2(amax.clamp(min=6 * 2.0**-126) / 6).ceil().clamp(-127, 127)
        scale, wide, whole = (exponent + 127).to(torch.uint8), torch.exp2(exponent), None
    else:
        top = weight.abs().amax((-2, -1)).clamp(min=1e-30)
        whole = (top / (6 * 448)).reshape(-1)
        each = whole.reshape(*lead, 1, 1)
        codes = (amax / 6 / each).clamp(2.0**-9, 448).to(FP8)
        scale, wide = codes, codes.float() * each
    return _nearest_e2m1(parts / wide.unsqueeze(-1)).reshape(weight.shape), scale, whole


def quantize_weight(weight: Tensor, fmt: str, *, scale_dtype: torch.dtype | None = None) -> PackedWeight:
    """Quantize a matrix to the nearest codes and pack it.

    Args:
        weight: (n, k) or (num_groups, n, k) of floating point.
        fmt: a name of `FORMATS`. u4 and s8 are symmetric: their factors are amax / 7 and amax / 127 of a group.
        scale_dtype: of the factors of u4 and s8; that of a half-precision weight, else bfloat16, unless given.

    Returns:
        The packed weight.
    """
    form = format_of(fmt)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.dim() not in (2, 3):
        _fail('weight', 'must be a matrix of floating point', check.describe(weight), 'quantize_weight')
    k = weight.shape[-1]
    if k % form.multiple:
        _fail('the channels of weight', f'must be a multiple of {form.multiple} for {fmt}', str(k), 'quantize_weight')
    wide = weight.detach().float()
    if not bool(torch.isfinite(wide).all()):
        _fail('weight', 'must be finite', 'NaN or Inf', 'quantize_weight')
    dtype = scale_dtype or (weight.dtype if weight.dtype in SCALES[:2] else torch.bfloat16)
    makers: dict[str, Callable[[], tuple]] = dict(
        u4=lambda: (*_integers(wide, form, dtype), None),
        s8=lambda: (*_integers(wide, form, dtype), None),
        e4m3=lambda: (*_e4m3(wide, form), None),
        e2m1=lambda: _e2m1(wide, form),
    )
    codes, scale, whole = makers[form.element]()
    return pack_weight(codes, scale, fmt=fmt, global_scale=whole)
