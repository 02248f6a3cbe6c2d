"""RMS norm and per-token cast in one pass: what `norm_forward` rounds to the dtype of x is quantized before it leaves.

    y            = norm_forward(x + residual)               see `norm_forward`; the same bits
    codes, sf    = per_token_cast(y, fmt)                   see `per_token_cast`; the same bits

One launch, one read of x and of the residual; y itself is only written where it is asked for. Memory bound: the floor
is reading x (and residual) and writing codes and scale factors (and y and z).
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import needs_gradient
from tile_kernels.core.cases import grid
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.core.front import replayed
from tile_kernels.core.op import Mut, Out, op
from tile_kernels.norm._checks import (
    as_rows,
    check_like,
    check_residual_out,
    check_rows,
    out_rows,
    shaped_like,
    viewed,
)
from tile_kernels.norm._samples import sample_rows, sample_weight, small_integers
from tile_kernels.norm.norm_forward import norm_forward
from tile_kernels.norm.norm_forward_kernels import launch_norm
from tile_kernels.quant._checks import check_floor, check_token_format, token_format

# Ops ----------------------------------------------------------------------------------------


def _empty_batched_sf(fmt: QuantFormat, num_batches: int, num_tokens: int, hidden: int, device: torch.device) -> Tensor:
    """Column-major factors of `num_batches` matrices, one behind the other: (num_batches, num_tokens, words)."""
    height, words = fmt.sf_shape(num_tokens // num_batches, hidden)
    aligned = 16 // fmt.sf_dtype.itemsize
    pitch = -(-height // aligned) * aligned
    strides = (words * pitch, 1, pitch)
    return torch.empty_strided((num_batches, pitch, words), strides, dtype=fmt.sf_dtype, device=device)[:, :height]


def _mega_places(num_tokens: int, block_rows: int) -> int:
    """Rows that scale factors in tiles of 128 take: every block of `block_rows` tokens begins a tile."""
    return -(-num_tokens // block_rows) * -(-block_rows // 128) * 128


def _check_mega(x: Tensor, fmt: QuantFormat, mega_sf: Tensor | None, mega_rows: int) -> None:
    """Scale factors in tiles are exponent bytes of groups of 32 channels, four to a word."""
    if mega_sf is None:
        return
    if not fmt.power_of_two or fmt.sf_block[1] != 32:
        check.fail('mega_sf', 'must come with power-of-two scale factors of 32 channels', str(fmt))
    check.multiple(x.shape[1], 128, 'hidden')
    check.at_least(mega_rows, 1, 'mega_rows')
    places = _mega_places(x.shape[0], mega_rows)
    check.shape(mega_sf, 'mega_sf', 'places words', dtype=torch.int32, places=places, words=x.shape[1] // 128)
    if places > 1 and mega_sf.stride(0) != 1:
        check.fail('mega_sf', 'must have stride 1 between rows', check.describe(mega_sf))
    check.same_device(x=x, mega_sf=mega_sf)


def _check_input(x: Tensor, fmt: QuantFormat, residual: Tensor | None) -> tuple[int, int]:
    check_token_format(fmt)
    num_tokens, hidden = check_rows(x)
    check.multiple(hidden, fmt.data.pack, 'hidden')
    check_like(x, residual=residual)
    return num_tokens, hidden


def _check_sf(x: Tensor, sf: Tensor, fmt: QuantFormat) -> None:
    """Scale factors must have the shape and layout of the format, those of batches one behind the other."""
    check.dtype(sf, 'sf', fmt.sf_dtype)
    num_batches = sf.shape[0] if sf.dim() == 3 and fmt.col else 1
    check.multiple(x.shape[0], max(num_batches, 1), 'num_tokens')
    height, words = fmt.sf_shape(x.shape[0] // max(num_batches, 1), x.shape[1])
    expected = (height, words) if sf.dim() != 3 else (num_batches, height, words)
    if tuple(sf.shape) != expected:
        check.fail('sf', f'must be {expected}', check.describe(sf))
    if not fmt.col:
        check.contiguous(sf, 'sf')
    elif height > 1 and sf.stride(-2) != 1:
        check.fail('sf', 'must be column-major (stride 1 between rows)', check.describe(sf))
    elif sf.dim() == 3 and num_batches > 1 and sf.stride(0) != words * sf.stride(2):
        check.fail('sf', 'must have its batches one behind the other', check.describe(sf))


@op(outputs='codes sf y rstd z')
def _norm_forward_and_per_token_cast(
    x: Tensor,
    fmt: QuantFormat,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    with_y: bool = False,
    num_batches: int = 1,
    amax_floor: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """RMS norm of each row of `x` (plus `residual`), rounded to the dtype of x, then quantized in groups of channels.

    Column-major scale factors of `num_batches` matrices of equal height stand apart: (num_batches, rows, words). y is
    empty unless asked for, z without a residual.
    """
    num_tokens, hidden = _check_input(x, fmt, residual)
    check.at_least(num_batches, 1, 'num_batches')
    check.multiple(num_tokens, num_batches, 'num_tokens')
    codes = fmt.empty_data(num_tokens, hidden, x.device)
    if fmt.col and num_batches > 1:
        sf = _empty_batched_sf(fmt, num_batches, num_tokens, hidden, x.device)
    else:
        sf = fmt.empty_sf(num_tokens, hidden, x.device)
    y = torch.empty((num_tokens if with_y else 0, hidden), dtype=x.dtype, device=x.device)
    z = torch.empty((0 if residual is None else num_tokens, hidden), dtype=x.dtype, device=x.device)
    written = (y if with_y else None, None if residual is None else z)
    rstd = launch_norm(x, weight, residual, *written, eps, out_scale, fmt, codes, sf, check_floor(amax_floor, fmt))
    return codes, sf, y, rstd, z


@op(outputs='rstd')
def norm_forward_and_per_token_cast_(
    codes: Out,
    sf: Out,
    x: Tensor,
    fmt: QuantFormat,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    y: Out | None = None,
    residual_out: Out | None = None,
    mega_sf: Mut | None = None,
    mega_rows: int = 1,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    amax_floor: float | None = None,
) -> Tensor:
    """The same into memory of the caller; returns rstd.

    Args:
        codes: data of `fmt`, contiguous.
        sf: scale factors in the shape and layout of `fmt`; (num_batches, rows, words) for several batches.
        x: (num_tokens, hidden).
        fmt: what to store.
        weight: (hidden,) or None.
        residual: shape and dtype of x, or None.
        y: (num_tokens, hidden) in the dtype of x for the result before the cast, or None.
        residual_out: where the sum x + residual goes; comes with `residual`, and may be x or residual itself.
        mega_sf: (places, hidden / 128) int32, tokens contiguous: exponent bytes once more, in tiles of 128 tokens.
        mega_rows: tokens of a block of `mega_sf`; every block begins a tile. Token i of a block has place
            i // 128 * 128 + i % 32 * 4 + i % 128 // 32 in it.
        eps: added to the mean square.
        out_scale: factor of the result.
        amax_floor: smallest amax a group is scaled by; the format's own if None.
    """
    num_tokens, hidden = _check_input(x, fmt, residual)
    check_like(x, y=y, residual_out=residual_out)
    if (residual is None) != (residual_out is None):
        check.fail('residual_out', 'must come with residual', 'one of them')
    rows, stored = fmt.data_shape(num_tokens, hidden)
    check.shape(codes, 'codes', 'num_tokens stored', dtype=fmt.data.torch, num_tokens=rows, stored=stored)
    check.contiguous(codes, 'codes')
    _check_sf(x, sf, fmt)
    check.same_device(x=x, codes=codes, sf=sf)
    _check_mega(x, fmt, mega_sf, mega_rows)
    cast = (fmt, codes, sf, check_floor(amax_floor, fmt), mega_sf, mega_rows)
    return launch_norm(x, weight, residual, y, residual_out, eps, out_scale, *cast)


# Public function ----------------------------------------------------------------------------


@_norm_forward_and_per_token_cast.public
@replayed
def norm_forward_and_per_token_cast(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    fmt: str | QuantFormat,
    num_per_channels: int | None = None,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    use_tma_aligned_col_major_sf: bool = False,
    round_sf: bool = False,
    use_packed_ue8m0: bool = False,
    with_out_bf16: bool = False,
    out: Tensor | tuple[Tensor, Tensor] | None = None,
    out_bf16: Tensor | None = None,
    residual_out: Tensor | None = None,
    mega_moe_sf: Tensor | None = None,
    mega_moe_block_m: int = 0,
    with_rstd: bool = False,
) -> tuple[QuantTensor, Tensor | None, Tensor | None, Tensor]:
    """`per_token_cast` of `norm_forward` in one pass, bit for bit.

    Args:
        x: (num_tokens, hidden) or (batch, num_tokens, hidden) bfloat16, float16 or float32, rows dense.
        weight: (hidden,) bfloat16, float16 or float32, or None.
        eps: added to the mean square.
        fmt: 'e4m3', 'e5m2', 'e2m1' or 'e5m6' with the arguments below, or a whole format such as 'e4m3_1x128_f32'.
        num_per_channels: channels that share a scale factor: 16, 32, 64, 128 or hidden.
        residual: shape and dtype of x, or None.
        out_scale: factor of the result.
        use_tma_aligned_col_major_sf: column-major scale factors with 16-byte aligned columns, each batch apart.
        round_sf: scale factors are rounded up to powers of two.
        use_packed_ue8m0: four exponent bytes in an int32; needs `round_sf`.
        with_out_bf16: whether to return the result before the cast, in the dtype of x.
        out: data to write to, or data and scale factors.
        out_bf16: where to write the result before the cast; implies `with_out_bf16`.
        residual_out: where to write the sum; may be x or residual itself.
        mega_moe_sf: int32, (num_tokens, hidden / 128), tokens contiguous: the exponent bytes once more in tiles of 128
            tokens, with groups of 32 channels and power-of-two factors. Rows of tiles lie beyond `num_tokens`: its
            memory must have room for them.
        mega_moe_block_m: tokens of a block of `mega_moe_sf`; every block begins a tile.
        with_rstd: whether to return 1 / sqrt(mean square + eps).

    Returns:
        `QuantTensor` (data, sf), the result before the cast or None, rstd or None, and what was normalized: x itself,
        or the sum. The second and last are differentiable, which costs a second launch; codes and factors are not.
    """
    check_residual_out(residual, residual_out)
    rows = as_rows(x, 'x')
    residual_rows = None if residual is None else as_rows(residual, 'residual')
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0
    layout = token_format(fmt, num_per_channels, rows.shape, *flags)
    num_tokens, hidden = rows.shape
    num_batches = x.shape[0] if x.dim() == 3 and layout.col and x.shape[0] > 1 else 1
    given = (out, out_bf16, residual_out, mega_moe_sf)
    if needs_gradient(x, weight, residual) and all(tensor is None for tensor in given):
        before, _, total = norm_forward(rows, weight, eps, residual_rows, out_scale)
        with torch.no_grad():
            data, sf, _, rstd, _ = norm_forward_and_per_token_cast.call(
                rows, layout, weight, residual_rows, eps, out_scale, False, num_batches
            )
        y, z = before if with_out_bf16 else None, total if residual is not None else None
    elif all(tensor is None for tensor in given):
        data, sf, cast, rstd, total = norm_forward_and_per_token_cast.call(
            rows, layout, weight, residual_rows, eps, out_scale, with_out_bf16, num_batches
        )
        y, z = cast if with_out_bf16 else None, total if residual is not None else None
    else:
        if num_batches > 1:
            sf = _empty_batched_sf(layout, num_batches, num_tokens, hidden, x.device)
        else:
            sf = layout.empty_sf(num_tokens, hidden, x.device)
        if out is None:
            data = layout.empty_data(num_tokens, hidden, x.device)
        else:
            data, sf = (out, sf) if isinstance(out, Tensor) else check.pair(out, 'out')
            data = viewed(data, 'the data of out', *layout.data_shape(num_tokens, hidden))
            sf = sf if num_batches > 1 else viewed(sf, 'out[1]', *layout.sf_shape(num_tokens, hidden))
        y, z = out_rows(out_bf16, x, 'out_bf16'), out_rows(residual_out, x, 'residual_out')
        if y is None and with_out_bf16:
            y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        if z is None and residual is not None:
            z = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        tiles, block = _mega_rows(mega_moe_sf, num_tokens, mega_moe_block_m)
        options = (weight, residual_rows, y, z, tiles, block, eps, out_scale)
        rstd = norm_forward_and_per_token_cast_(data, sf, rows, layout, *options)
    if x.dim() == 3:
        data = data.view(*x.shape[:2], data.shape[-1])
        if sf.dim() == 2 and layout.col and x.shape[0] == 1:  # of one batch, with the strides that more would have
            sf = sf.as_strided((1, *sf.shape), (sf.shape[1] * sf.stride(1), *sf.stride()))
        sf = sf if sf.dim() == 3 else sf.unflatten(0, x.shape[:2])
        rstd = rstd.view(x.shape[:2])
    y, z = y if out_bf16 is None else out_bf16, z if residual_out is None else residual_out
    y, z = y if y is None else shaped_like(y, x), x if z is None else shaped_like(z, x)
    return QuantTensor(data, sf, layout), y, rstd if with_rstd else None, z


def _mega_rows(mega_moe_sf: Tensor | None, num_tokens: int, block_rows: int) -> tuple[Tensor | None, int]:
    """`mega_moe_sf` with all the rows that tiles take, if its memory has them."""
    if mega_moe_sf is None:
        return None, 1
    check.at_least(block_rows, 1, 'mega_moe_block_m')
    check.shape(mega_moe_sf, 'mega_moe_sf', 'num_tokens words', dtype=torch.int32)
    places, words = _mega_places(num_tokens, block_rows), mega_moe_sf.shape[1]
    pitch = mega_moe_sf.stride(1)
    needed = mega_moe_sf.storage_offset() + (words - 1) * pitch + places
    if mega_moe_sf.untyped_storage().nbytes() // 4 < needed or (words > 1 and pitch < places):
        check.fail('mega_moe_sf', f'must have memory for {places} rows', check.describe(mega_moe_sf))
    return mega_moe_sf.as_strided((places, words), (1, pitch)), block_rows


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    fmt: str,
    weight: torch.dtype | None = torch.bfloat16,
    residual: bool = False,
    with_y: bool = False,
    num_batches: int = 1,
    pitch: int | None = None,
) -> dict:
    x = sample_rows(num_tokens, hidden, dtype, pitch)
    if residual:  # of one magnitude, so that the squares of the sum add up without rounding as well
        x = small_integers(num_tokens, hidden, 3, dtype, pitch)
    return dict(
        x=x,
        fmt=QuantFormat.parse(fmt),
        weight=sample_weight(hidden, weight),
        residual=small_integers(num_tokens, hidden, 3, dtype) if residual else None,
        with_y=with_y,
        num_batches=num_batches,
    )


def _make_into(mega_rows: int = 0, **case: Any) -> dict:
    made = _make(**case)
    num_tokens, hidden = made['x'].shape
    fmt, with_y, num_batches = made['fmt'], made.pop('with_y'), made.pop('num_batches')
    device = made['x'].device
    made['codes'], made['sf'] = fmt.empty(num_tokens, hidden, device)
    if num_batches > 1:
        made['sf'] = _empty_batched_sf(fmt, num_batches, num_tokens, hidden, device)
    made['y'] = torch.empty_like(made['x']) if with_y else None
    made['residual_out'] = None if made['residual'] is None else torch.empty_like(made['x'])
    if mega_rows:
        made['mega_sf'] = torch.zeros(hidden // 128, _mega_places(num_tokens, mega_rows), dtype=torch.int32).t()
        made['mega_rows'] = mega_rows
    return made


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
SMOKE = (
    grid(num_tokens=[0, 1, 5], hidden=[128], dtype=BF16, fmt=['e4m3_1x32_f32'])
    + grid(
        num_tokens=[4],
        hidden=[1376],  # a shorter last vector, a tail group
        dtype=BF16,
        fmt=['e4m3_1x128_ue8m0x4_col', 'e2m1_1x16_e4m3', 'e5m2_1x64_f32p2', 'e4m3_1xall_f32', 'e5m6_1xall_f32_col'],
    )
    + grid(
        num_tokens=[2],
        hidden=[1152, 720],  # exponents of a short last word
        dtype=BF16,
        fmt=['e4m3_1x128_ue8m0x4', 'e4m3_1x64_ue8m0x4_col', 'e2m1_1x16_ue8m0x4'],
    )
    + grid(num_tokens=[4], hidden=[544], dtype=BF16, fmt=['e4m3_1x32_ue8m0x4'], residual=[True], with_y=[True])
    + grid(num_tokens=[6], hidden=[160], dtype=F32, fmt=['e4m3_1x32_ue8m0x4_col', 'e4m3_1x32_f32_col'], num_batches=[2])
    + grid(num_tokens=[3], hidden=[99], dtype=F16, fmt=['e4m3_1x32_ue8m0x4_col'], weight=[None], pitch=[101])
    + grid(num_tokens=[3], hidden=[100], dtype=F32, fmt=['e2m1_1x32_f32'], residual=[True])
)
FULL_FORMATS = [
    f'{data}_1x{group}_{sf}'
    for data in ('e4m3', 'e2m1')
    for group in (16, 32, 128, 'all')
    for sf in ('f32', 'f32p2_col', 'ue8m0x4', 'ue8m0x4_col', 'e4m3')
]
FULL_ROWS = (
    dict(num_tokens=4001, hidden=7168, dtype=torch.bfloat16),
    dict(num_tokens=2050, hidden=1344, dtype=torch.float32, residual=True, with_y=True),
    dict(num_tokens=257, hidden=2560, dtype=torch.float16, residual=True),
)
FULL = [dict(FULL_ROWS[index % len(FULL_ROWS)], fmt=fmt) for index, fmt in enumerate(FULL_FORMATS)]
BENCH = (
    grid(num_tokens=[64, 4096, 16384], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32', 'e4m3_1x32_ue8m0x4_col'])
    + grid(num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e4m3_1x128_f32'], residual=[True], with_y=[False, True])
    + grid(num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e4m3_1xall_f32', 'e2m1_1x32_f32p2'])
    + grid(num_tokens=[8001], hidden=[1024, 2560, 4096, 16384], dtype=BF16, fmt=['e4m3_1x128_f32'])
    + grid(num_tokens=[32001], hidden=[1344], dtype=BF16, fmt=['e4m3_1x128_f32'])
)
norm_forward_and_per_token_cast.cases(make=_make, match='bitwise', smoke=SMOKE, full=FULL, bench=BENCH)
norm_forward_and_per_token_cast_.cases(
    make=_make_into,
    match='bitwise',
    smoke=[SMOKE[1], *SMOKE[14:17]]
    + grid(
        num_tokens=[9],
        hidden=[256],
        dtype=BF16,
        fmt=['e4m3_1x32_ue8m0x4', 'e4m3_1x32_f32p2'],
        residual=[True],
        mega_rows=[4],
    ),
    full=grid(
        num_tokens=[4001], hidden=[7168], dtype=BF16, fmt=['e4m3_1x32_ue8m0x4'], residual=[True], mega_rows=[300]
    ),
    bench=grid(num_tokens=[4096], hidden=[7168], dtype=BF16, fmt=['e4m3_1x32_ue8m0x4'], mega_rows=[4096]),
)
