"""Twin of the reading of packed latent keys."""

import torch
from torch import Tensor


def unpack_mla_cache(cache: Tensor) -> Tensor:
    """Codes times factors, and the rotary channels as they are."""
    codes = cache[..., :512].contiguous().view(torch.float8_e4m3fn).float()
    factors = cache[..., 512:528].contiguous().view(torch.uint8).view(torch.float32)
    rotary = cache[..., 528:].contiguous().view(torch.uint8).view(torch.bfloat16)
    latent = codes.unflatten(-1, (4, 128)) * factors.unsqueeze(-1)
    return torch.cat((latent.flatten(-2).to(torch.bfloat16), rotary), dim=-1)
