"""What RMS norm and its gradients mean, in plain PyTorch: float32, one rounding for each operation."""

from __future__ import annotations

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat
from tile_kernels.reference.quant.tokens import _divide, _exponent_byte, per_token_cast


def _norm(z: Tensor, weight: Tensor | None, eps: float, out_scale: float) -> tuple[Tensor, Tensor]:
    """The rows of z divided by the root of their mean square, times weight and scale, in float32; and that factor."""
    z = z.float()
    mean_square = _divide(z.square().sum(dim=-1), float(max(z.shape[-1], 1)))
    rstd = (1 / (mean_square + eps).double().sqrt()).float()
    factor = out_scale if weight is None else weight.float() * out_scale
    return z * rstd.unsqueeze(-1) * factor, rstd


def norm_forward(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """RMS norm of each row."""
    y, rstd = _norm(x, weight, eps, out_scale)
    return y.to(x.dtype), rstd


def add_norm_forward(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, out_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm of each row of the sum, and the sum."""
    exact = x.float() + residual.float()
    z = exact.to(x.dtype)
    rounded = exact + (z.float() - exact).detach()  # z, but gradients of its two uses meet in float32
    y, rstd = _norm(rounded, weight, eps, out_scale)
    return y.to(x.dtype), rstd, z


def norm_forward_(
    out: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    residual: Tensor | None = None,
    residual_out: Tensor | None = None,
    eps: float = 1e-6,
    out_scale: float = 1.0,
) -> Tensor:
    """RMS norm into memory of the caller."""
    z = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    y, rstd = norm_forward(z, weight, eps, out_scale)
    if residual_out is not None:
        residual_out.copy_(z)
    out.copy_(y)
    return rstd


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
    """RMS norm, rounded to the dtype of x, then quantised."""
    z = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    y, rstd = norm_forward(z, weight, eps, out_scale)
    data, sf = _cast_batches(y, fmt, num_batches, amax_floor)
    y, z = (
        kept if wanted else x.new_empty((0, x.shape[1])) for kept, wanted in ((y, with_y), (z, residual is not None))
    )
    return data, sf, y, rstd, z


def _cast_batches(y: Tensor, fmt: QuantFormat, num_batches: int, amax_floor: float | None) -> tuple[Tensor, Tensor]:
    """Quantise rows; the column-major scale factors of every batch follow those of the one before."""
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
    """RMS norm, rounded to the dtype of x, then quantised, into memory of the caller."""
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
        packed = made_sf if fmt.sf == 'ue8m0x4' else _exponent_byte(made_sf.contiguous()).view(torch.int32)
        mega_sf[place] = packed
    return rstd


# Gradients ----------------------------------------------------------------------------------


def norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None = None,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Gradients of `norm_forward`."""
    dx, dweight = _gradients(dy, x, weight, rstd, dz, out_scale)
    return dx, x.new_empty(0) if dweight is None else dweight.to(weight.dtype)


def add_norm_backward(
    dy: Tensor, dz: Tensor, z: Tensor, rstd: Tensor, weight: Tensor | None = None, out_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Gradients of `add_norm_forward`."""
    return norm_backward(dy, z, rstd, weight, dz, out_scale)


def norm_backward_(
    weight_grad: Tensor,
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    dz: Tensor | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    """Gradients of `norm_forward`, that of the weight added to what is there."""
    dx, dweight = _gradients(dy, x, weight, rstd, dz, out_scale)
    weight_grad.copy_(weight_grad.double() + dweight)
    return dx


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dz: Tensor | None, out_scale: float
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight, the latter in float64."""
    rstd = rstd.double().unsqueeze(1)
    normal, upstream = x.double() * rstd, dy.double() * out_scale
    weighted = upstream if weight is None else upstream * weight.double()
    dx = (weighted - normal * (normal * weighted).mean(dim=1, keepdim=True)) * rstd
    if dz is not None:
        dx = dx + dz.double()
    return dx.to(x.dtype), None if weight is None else (normal * upstream).sum(dim=0)


# TileKernels' references --------------------------------------------------------------------


def norm_forward_ref(
    x: Tensor, weight: Tensor | None, eps: float, residual: Tensor | None = None, out_scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    """RMS norm over the last dimension: the result, rstd and what was normalised."""
    z = x if residual is None else (x.float() + residual.float()).to(x.dtype)
    return *norm_forward(z, weight, eps, out_scale), z


def norm_backward_ref(
    out_grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    residual_out_grad: Tensor | None = None,
    out_scale: float = 1.0,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and of the weight, the latter None without one."""
    dx, dweight = norm_backward(out_grad, x, rstd, weight, residual_out_grad, out_scale)
    return dx, None if weight is None else dweight
