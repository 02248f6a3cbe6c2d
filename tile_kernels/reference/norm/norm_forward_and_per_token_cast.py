"""What RMS norm with a per-token cast means, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.norm._common import summed
from tile_kernels.reference.norm.norm_forward import norm_forward
from tile_kernels.reference.quant._common import exponent_byte
from tile_kernels.reference.quant.per_token_cast import per_token_cast


def norm_forward_and_per_token_cast(
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
    """RMS norm, rounded to the dtype of x, then quantized."""
    z = summed(x, residual)
    y, rstd = norm_forward(z, weight, eps, out_scale)
    data, sf = _cast_batches(y, fmt, num_batches, amax_floor)
    y, z = (
        kept if wanted else x.new_empty((0, x.shape[1])) for kept, wanted in ((y, with_y), (z, residual is not None))
    )
    return data, sf, y, rstd, z


def _cast_batches(y: Tensor, fmt: QuantFormat, num_batches: int, amax_floor: float | None) -> tuple[Tensor, Tensor]:
    """Quantize rows; the column-major scale factors of every batch follow those of the one before."""
    if num_batches == 1 or not fmt.col:
        return per_token_cast(y, fmt, amax_floor)
    parts = [per_token_cast(part, fmt, amax_floor) for part in y.tensor_split(num_batches)]
    rows, words = parts[0].sf.shape
    pitch = max(parts[0].sf.stride(1), 1)
    sf = torch.empty_strided(
        (num_batches, pitch, words), (words * pitch, 1, pitch), dtype=fmt.sf_dtype, device=y.device
    )
    return torch.cat([part.data for part in parts]), sf[:, :rows].copy_(torch.stack([part.sf for part in parts]))


def norm_forward_and_per_token_cast_(
    codes: Tensor,
    sf: Tensor,
    x: Tensor,
    fmt: QuantFormat,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    y: Tensor | None = None,
    residual_out: Tensor | None = None,
    mega_sf: Tensor | None = None,
    mega_rows: int = 1,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    amax_floor: float | None = None,
) -> Tensor:
    """RMS norm, rounded to the dtype of x, then quantized, into memory of the caller."""
    num_batches = sf.shape[0] if sf.dim() == 3 else 1
    options = (weight, residual, eps, out_scale, True, num_batches, amax_floor)
    made_codes, made_sf, made_y, rstd, z = norm_forward_and_per_token_cast(x, fmt, *options)
    codes.copy_(made_codes)
    sf.copy_(made_sf)
    if y is not None:
        y.copy_(made_y)
    if residual_out is not None:
        residual_out.copy_(z)
    if mega_sf is not None:
        place = torch.arange(x.shape[0], device=x.device)
        block, i = place // mega_rows, place % mega_rows
        place = block * (-(-mega_rows // 128) * 128) + i // 128 * 128 + i % 32 * 4 + i % 128 // 32
        packed = made_sf if fmt.sf == 'ue8m0x4' else exponent_byte(made_sf.contiguous()).view(torch.int32)
        mega_sf[place] = packed
    return rstd
