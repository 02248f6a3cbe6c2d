"""Inputs of the cases of the casts."""

import torch
from torch import Tensor

from tile_kernels.core.formats import QuantFormat, QuantTensor


def random_rows(num_tokens: int, hidden: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random rows of many magnitudes that start with zeros; `pitch` makes them strided."""
    magnitude = torch.exp2(torch.randint(-12, 12, (num_tokens, 1))).to(dtype)
    filled = (torch.arange(pitch or hidden) >= min(128, hidden // 2)).to(dtype)
    x = torch.randn(num_tokens, pitch or hidden, dtype=dtype) * magnitude * filled
    return x.narrow(1, 0, hidden)


def random_matrix(num_tokens: int, hidden: int, dtype: torch.dtype, pitch: int | None = None) -> Tensor:
    """Random rows of many magnitudes with a zero block; `pitch` makes the rows strided."""
    magnitude = torch.exp2(torch.randint(-12, 12, (num_tokens, 1))).to(dtype)
    x = torch.randn(num_tokens, pitch or hidden, dtype=dtype) * magnitude
    x[:128, : min(128, hidden // 2)] = 0
    return x.narrow(1, 0, hidden)


def random_quantized(num_tokens: int, hidden: int, fmt: str, pad: int = 0) -> QuantTensor:
    """Random codes (no NaN) and scale factors of a format; `pad` container elements lie between rows."""
    layout = QuantFormat.parse(fmt)
    stored = layout.data.stored(hidden)
    codes = torch.randint(0, 256, (num_tokens, stored + pad), dtype=torch.uint8)
    if layout.data.bits == 8:
        codes = codes % 0x7C  # below infinity and NaN of e5m2
    elif layout.data.name == 'e5m6':
        codes = codes & 0xBB  # no code has all five bits of an exponent
    sf = layout.empty_sf(num_tokens, hidden, codes.device)
    if layout.sf == 'ue8m0x4':
        sf.copy_(torch.randint(0x60606060, 0x7F7F7F7F, sf.shape, dtype=torch.int32))
    elif layout.sf == 'f32p2':
        sf.copy_(torch.exp2(torch.randint(-20, 20, sf.shape).float()))
    else:
        sf.copy_((torch.rand(sf.shape) + 0.01).to(sf.dtype))
    return QuantTensor(codes.view(layout.data.torch).narrow(1, pad, stored), sf, layout)


def random_map(num_tokens: int, gather: int | None) -> Tensor | None:
    """Random rows with a hole now and then, and one number past the end."""
    if gather is None:
        return None
    rows = torch.randint(-1, num_tokens, (gather,), dtype=torch.int32)
    rows[::5] = -1
    rows[-1] = num_tokens
    return rows
