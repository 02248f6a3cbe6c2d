"""Twins of the convolution and of its gradients."""

import torch
from torch import Tensor


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> Tensor:
    """The convolution of NHWC images, summed in float32."""
    added = None if bias is None else bias.float()
    planes, kernel = x.float().permute(0, 3, 1, 2), weight.float().permute(0, 3, 1, 2)
    y = torch.nn.functional.conv2d(planes, kernel, added, stride, padding, dilation)
    return y.permute(0, 2, 3, 1).to(x.dtype).contiguous()


def conv2d_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of the weight."""
    planes, kernel, given = (part.float().permute(0, 3, 1, 2) for part in (x, weight, dy))
    if x.numel() == 0:
        return torch.empty_like(x), torch.zeros_like(weight)
    options = dict(stride=stride, padding=padding, dilation=dilation)
    dx = torch.nn.grad.conv2d_input(planes.shape, kernel, given, **options)
    dweight = torch.nn.grad.conv2d_weight(planes, kernel.shape, given, **options)
    both = (part.permute(0, 2, 3, 1).contiguous() for part in (dx, dweight))
    return next(both).to(x.dtype), next(both).to(weight.dtype)
