"""Twin of the packing of latent keys."""

import torch
from torch import Tensor


def pack_mla_cache(kv: Tensor, cache: Tensor, slots: Tensor | None = None) -> None:
    """Write tokens of 656 or 584 bytes to their slots; those outside the cache are skipped."""
    small = kv.shape[1] == 512
    groups = kv[:, :448].float().unflatten(1, (7, 64)) if small else kv[:, :512].float().unflatten(1, (4, 128))
    amax = groups.abs().nan_to_num(0.0, posinf=torch.inf).amax(-1)
    least = torch.maximum(amax / 448.0, torch.full_like(amax, 1e-4))
    mantissa, exponent = torch.frexp(least)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    factor = torch.where(least.isfinite(), torch.ldexp(torch.ones_like(amax), exponent), least)
    scaled = groups / factor.unsqueeze(-1)
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(scaled.isnan(), torch.full_like(codes, 0x7F), codes).flatten(1)
    rotary = kv[:, -64:].contiguous().view(torch.uint8)
    if small:
        exponents = torch.where(least.isfinite(), exponent + 127, 255).to(torch.uint8)
        _store_pages(torch.cat((codes, rotary), dim=1), exponents, cache.view(torch.uint8), slots)
        return
    tokens = torch.cat((codes, factor.contiguous().view(torch.uint8), rotary), dim=1)
    if slots is None:
        slots = torch.arange(len(kv), device=kv.device)
    kept = (slots >= 0) & (slots < len(cache))
    cache.view(torch.uint8)[slots[kept]] = tokens[kept]


def _store_pages(rows: Tensor, exponents: Tensor, cache: Tensor, slots: Tensor | None) -> None:
    """Rows of 576 bytes stand at the start of a page; 7 exponents and a 0 for every token stand behind them."""
    pages, page = cache.shape[:2]
    slots = torch.arange(len(rows), device=rows.device) if slots is None else slots
    for row, own, slot in zip(rows, exponents, slots.tolist(), strict=True):
        if 0 <= slot < pages * page:
            flat = cache[slot // page].view(-1)
            flat[slot % page * 576 :][:576] = row
            flat[576 * page + slot % page * 8 :][:8] = torch.cat((own, own.new_zeros(1)))
