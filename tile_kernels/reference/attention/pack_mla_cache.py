"""Twin of the packing of latent keys."""

import torch
from torch import Tensor


def pack_mla_cache(kv: Tensor, cache: Tensor, slots: Tensor | None = None) -> None:
    """Write tokens of 656 bytes to their slots; those outside the cache are skipped."""
    groups = kv[:, :512].float().unflatten(1, (4, 128))
    amax = groups.abs().nan_to_num(0.0, posinf=torch.inf).amax(-1)
    least = torch.maximum(amax / 448.0, torch.full_like(amax, 1e-4))
    mantissa, exponent = torch.frexp(least)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    factor = torch.where(least.isfinite(), torch.ldexp(torch.ones_like(amax), exponent), least)
    scaled = groups / factor.unsqueeze(-1)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(scaled.isnan(), torch.full_like(codes, 0x7F), codes).flatten(1)
    rotary = kv[:, 512:].contiguous().view(torch.uint8)
    tokens = torch.cat((codes, factor.contiguous().view(torch.uint8), rotary), dim=1)
    if slots is None:
        slots = torch.arange(len(kv), device=kv.device)
    kept = (slots >= 0) & (slots < len(cache))
    cache.view(torch.uint8)[slots[kept]] = tokens[kept]
