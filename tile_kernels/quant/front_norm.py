"""The public RMS norm functions: two or three dimensions, memory of the caller, TileKernels' flags."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.formats import QuantFormat, QuantTensor
from tile_kernels.quant.front import _format
from tile_kernels.quant.norm_backward import norm_backward as backward_op
from tile_kernels.quant.norm_backward import norm_backward_
from tile_kernels.quant.norm_forward import add_norm_forward, norm_forward_
from tile_kernels.quant.norm_forward import norm_forward as forward_op
from tile_kernels.quant.norm_forward_and_per_token_cast import (
    empty_batched_sf,
    mega_places,
    norm_forward_and_per_token_cast_,
)
from tile_kernels.quant.norm_forward_and_per_token_cast import norm_forward_and_per_token_cast as cast_op


def _rows(x: Tensor, name: str) -> Tensor:
    """(batch, tokens, hidden) as (tokens, hidden); a copy only if the strides leave no other way."""
    if check.tensor(x, name).dim() == 2:
        return x
    if x.dim() != 3:
        check.fail(name, 'must be (num_tokens, hidden) or (batch, num_tokens, hidden)', check.describe(x))
    return x.reshape(-1, x.shape[2])


def _room(x: Tensor | None, like: Tensor, name: str) -> Any:
    """Memory of the caller in the shape of `like`, as rows; it is written, so it must not be copied."""
    if x is None or check.tensor(x, name).dim() == 2:
        return x
    if x.shape != like.shape:
        check.fail(name, f'must be {tuple(like.shape)}', check.describe(x))
    return _viewed(x, name, x.shape[0] * x.shape[1], x.shape[2])


def _viewed(x: Tensor, name: str, *shape: int) -> Tensor:
    """Memory of the caller in another shape: never a copy, which would be written instead."""
    try:
        return x.view(shape)
    except RuntimeError:
        check.fail(name, f'must be viewable as {shape}', check.describe(x))


def _shaped(rows: Tensor, like: Tensor) -> Tensor:
    """Rows in the shape of `like`; memory of the caller that has it already is returned as it came."""
    return rows if rows.shape == like.shape else rows.view(like.shape)


def norm_forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    residual: Tensor | None = None,
    out_scale: float = 1.0,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
    with_rstd: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """RMS norm of each row of `x`, or of `x + residual`: ((z * rstd) * (weight * out_scale)), float32 inside.

    Differentiable in x, residual and weight unless `out` or `residual_out` is given.

    Args:
        x: (num_tokens, hidden) or (batch, num_tokens, hidden) bfloat16, float16 or float32, rows dense.
        weight: (hidden,) bfloat16, float16 or float32, or None.
        eps: added to the mean square.
        residual: shape and dtype of x, or None; the sum is rounded to the dtype of x.
        out_scale: factor of the result.
        out: where to write the result; may be x or residual itself.
        residual_out: where to write the sum; may be x or residual itself.
        with_rstd: whether to return 1 / sqrt(mean square + eps).

    Returns:
        The result in the dtype of x; rstd, float32 without the last dimension, or None; and what was normalised: x
        itself, or the sum.
    """
    if residual_out is not None and residual is None:
        check.fail('residual_out', 'must come with residual', 'no residual')
    rows = _rows(x, 'x')
    residual_rows = None if residual is None else _rows(residual, 'residual')
    if out is not None or residual_out is not None:
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        if residual is not None and residual_out is None:
            residual_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        room = _room(residual_out, x, 'residual_out')
        rstd = norm_forward_(_room(out, x, 'out'), rows, weight, residual_rows, room, eps, out_scale)
        y, z = out, residual_out
    elif residual_rows is None:
        y, rstd = forward_op(rows, weight, eps, out_scale)
        z = None
    else:
        y, rstd, z = add_norm_forward(rows, residual_rows, weight, eps, out_scale)
    return _shaped(y, x), rstd.view(x.shape[:-1]) if with_rstd else None, x if z is None else _shaped(z, x)


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
        `QuantTensor` (data, sf), the result before the cast or None, rstd or None, and what was normalised: x itself,
        or the sum.
    """
    if residual_out is not None and residual is None:
        check.fail('residual_out', 'must come with residual', 'no residual')
    rows = _rows(x, 'x')
    residual_rows = None if residual is None else _rows(residual, 'residual')
    flags = use_tma_aligned_col_major_sf, round_sf, use_packed_ue8m0, False
    layout = _format(rows, fmt, num_per_channels, *flags)
    num_tokens, hidden = rows.shape
    num_batches = x.shape[0] if x.dim() == 3 and layout.col and x.shape[0] > 1 else 1
    given = (out, out_bf16, residual_out, mega_moe_sf)
    if all(tensor is None for tensor in given):
        data, sf, cast, rstd, total = cast_op(
            rows, layout, weight, residual_rows, eps, out_scale, with_out_bf16, num_batches
        )
        y, z = cast if with_out_bf16 else None, total if residual is not None else None
    else:
        if num_batches > 1:
            sf = empty_batched_sf(layout, num_batches, num_tokens, hidden, x.device)
        else:
            sf = layout.empty_sf(num_tokens, hidden, x.device)
        if out is None:
            data = layout.empty_data(num_tokens, hidden, x.device)
        else:
            data, sf = (out, sf) if isinstance(out, Tensor) else check.pair(out, 'out')
            data = _viewed(data, 'the data of out', *layout.data_shape(num_tokens, hidden))
            sf = sf if num_batches > 1 else _viewed(sf, 'out[1]', *layout.sf_shape(num_tokens, hidden))
        y, z = _room(out_bf16, x, 'out_bf16'), _room(residual_out, x, 'residual_out')
        if y is None and with_out_bf16:
            y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        if z is None and residual is not None:
            z = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
        tiles, block = _mega_room(mega_moe_sf, num_tokens, mega_moe_block_m)
        options = (weight, residual_rows, y, z, tiles, block, eps, out_scale)
        rstd = norm_forward_and_per_token_cast_(data, sf, rows, layout, *options)
    if x.dim() == 3:
        data = data.view(*x.shape[:2], data.shape[-1])
        if sf.dim() == 2 and layout.col and x.shape[0] == 1:  # of one batch, with the strides that more would have
            sf = sf.as_strided((1, *sf.shape), (sf.shape[1] * sf.stride(1), *sf.stride()))
        sf = sf if sf.dim() == 3 else sf.unflatten(0, x.shape[:2])
        rstd = rstd.view(x.shape[:2])
    y, z = y if out_bf16 is None else out_bf16, z if residual_out is None else residual_out
    y, z = y if y is None else _shaped(y, x), x if z is None else _shaped(z, x)
    return QuantTensor(data, sf, layout), y, rstd if with_rstd else None, z


def _mega_room(mega_moe_sf: Tensor | None, num_tokens: int, block_rows: int) -> tuple[Tensor | None, int]:
    """`mega_moe_sf` with all the rows that tiles take, if its memory has them."""
    if mega_moe_sf is None:
        return None, 1
    check.at_least(block_rows, 1, 'mega_moe_block_m')
    check.shape(mega_moe_sf, 'mega_moe_sf', 'num_tokens words', dtype=torch.int32)
    places, words = mega_places(num_tokens, block_rows), mega_moe_sf.shape[1]
    pitch = mega_moe_sf.stride(1)
    needed = mega_moe_sf.storage_offset() + (words - 1) * pitch + places
    if mega_moe_sf.untyped_storage().nbytes() // 4 < needed or (words > 1 and pitch < places):
        check.fail('mega_moe_sf', f'must have memory for {places} rows', check.describe(mega_moe_sf))
    return mega_moe_sf.as_strided((places, words), (1, pitch)), block_rows


def norm_backward(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of `norm_forward`, deterministic and the same on every device.

    Args:
        out_grad: gradient of the result, shape and dtype of x.
        x: (num_tokens, hidden) or (batch, num_tokens, hidden), what was normalised.
        weight: (hidden,) or None.
        rstd: float32 from the forward pass.
        residual_out_grad: gradient of the sum, added to that of x, or None.
        out_scale: as in the forward pass.
        weight_grad: (hidden,); the gradient of the weight is added to it. None returns a new one in weight's dtype.

    Returns:
        The gradient of x (and of the residual), and that of the weight, `weight_grad` if given, None without a weight.
    """
    if weight_grad is not None and weight is None:
        check.fail('weight_grad', 'must come with weight', 'no weight')
    rows, upstream = _rows(x, 'x'), _rows(out_grad, 'out_grad')
    through = None if residual_out_grad is None else _rows(residual_out_grad, 'residual_out_grad')
    factors = check.tensor(rstd, 'rstd').reshape(-1)
    if weight_grad is None or weight is None:
        dx, dweight = backward_op(upstream, rows, factors, weight, through, out_scale)
    else:
        dx = norm_backward_(weight_grad, upstream, rows, factors, weight, through, out_scale)
        dweight = weight_grad
    return dx.view(x.shape), None if weight is None else dweight
