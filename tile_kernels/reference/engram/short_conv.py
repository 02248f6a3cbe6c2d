"""The short convolution of Engram."""

import torch
from torch import Tensor


def _taps(x: Tensor, taps: int, dilation: int) -> list[Tensor]:
    """What each tap meets: x moved back in time, zeros before the start."""
    padded = torch.nn.functional.pad(x.float(), (0, 0, (taps - 1) * dilation, 0))
    return [padded[:, j * dilation : j * dilation + x.shape[1]] for j in range(taps)]


def short_conv(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Causal convolution of each channel with its own taps, then SiLU."""
    met = _taps(x, weight.shape[1], dilation)
    a = sum(weight[:, j] * met[j] for j in range(weight.shape[1]))
    return torch.nn.functional.silu(a).to(x.dtype)


def short_conv_bwd(dy: Tensor, x: Tensor, weight: Tensor, dilation: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients of `short_conv`."""
    num_tokens, taps = x.shape[1], weight.shape[1]
    met = _taps(x, taps, dilation)
    a = sum(weight[:, j] * met[j] for j in range(taps))
    s = torch.sigmoid(a)
    da = dy.float() * s * (1 + a * (1 - s))
    later = torch.nn.functional.pad(da, (0, 0, 0, (taps - 1) * dilation))
    back = [(taps - 1 - j) * dilation for j in range(taps)]
    dx = sum(weight[:, j] * later[:, back[j] : back[j] + num_tokens] for j in range(taps))
    return dx.to(x.dtype), torch.stack([(da * met[j]).sum((0, 1)) for j in range(taps)], dim=1)
