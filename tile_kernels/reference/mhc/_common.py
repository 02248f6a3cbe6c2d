"""Arithmetic that several twins use."""

from typing import Any

import torch
from torch import Tensor


def sum_streams(streams: tuple[Tensor, ...]) -> Tensor:
    """Sum in ascending order."""
    total = torch.zeros_like(streams[0])
    for stream in streams:
        total = total + stream
    return total


def round_to_tf32(x: Tensor) -> Tensor:
    """The nearest number of 11 significant bits, halves away from zero; a NaN stays one."""
    return torch.where(x.isnan(), x, ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32))


class Tf32Product(torch.autograd.Function):
    """`x @ fn.T`. TF32 rounds fn, and in backward the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fn: Tensor) -> Tensor:
        ctx.save_for_backward(x, fn)
        return x @ round_to_tf32(fn).T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, fn = ctx.saved_tensors
        dy = round_to_tf32(dy)
        return dy @ round_to_tf32(fn), dy.reshape(-1, fn.shape[0]).T @ x.reshape(-1, fn.shape[1])
