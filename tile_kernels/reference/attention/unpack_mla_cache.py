"""Twin of the reading of packed latent keys."""

import torch
from torch import Tensor


def unpack_mla_cache(cache: Tensor) -> Tensor:
    """Codes times factors, and the rotary channels as they are."""
    if cache.shape[-1] == 584:
        pages, page = cache.shape[:2]
        flat = cache.view(torch.uint8).flatten(1)
        rows = flat[:, : 576 * page].reshape(pages, page, 1, 576)
        exponents = flat[:, 576 * page :].reshape(pages, page, 1, 8)[..., :7].contiguous()
        factors = exponents.view(torch.float8_e8m0fnu).float()
        codes = rows[..., :448].contiguous().view(torch.float8_e4m3fn).float()
        latent = (codes.unflatten(-1, (7, 64)) * factors.unsqueeze(-1)).flatten(-2).to(torch.bfloat16)
        return torch.cat((latent, rows[..., 448:].contiguous().view(torch.bfloat16)), dim=-1)
    codes = cache[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    factors = cache[..., 512:528].contiguous().view(torch.uint8).view(torch.float32)
    rotary = cache[..., 528:].contiguous().view(torch.uint8).view(torch.bfloat16)
    latent = codes.unflatten(-1, (4, 128)) * factors.unsqueeze(-1)
    return torch.cat((latent.flatten(-2).to(torch.bfloat16), rotary), dim=-1)
