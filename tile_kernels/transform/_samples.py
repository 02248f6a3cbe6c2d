"""Inputs of the rotary cases."""

import torch
from torch import Tensor

from tile_kernels.core.cases import grid


def _heads(rows: tuple, num_heads: int, channels: int, pitch: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*rows, num_heads, pitch or channels).to(dtype)[..., :channels]


def random_heads(
    rows: tuple,
    num_heads: int,
    rotary: int,
    dtype: torch.dtype,
    key_heads: int = 0,
    channels: int = 0,
    pitch: int = 0,
    positions: torch.dtype | None = None,
    interleaved: bool = False,
    conjugate: bool = False,
    seqlen_offset: int = 0,
) -> dict:
    """Query, key, angles and positions of one case; `pitch` makes heads strided."""
    length = rows[-1] + 5
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, rotary, 2) / rotary)
    channels = channels or rotary
    return dict(
        query=_heads(rows, num_heads, channels, pitch, dtype),
        cos_sin_cache=torch.cat((angle.cos(), angle.sin()), dim=1),
        key=_heads(rows, key_heads, channels, pitch, dtype) if key_heads else None,
        positions=None if positions is None else torch.randint(0, length - seqlen_offset, rows).to(positions),
        interleaved=interleaved,
        conjugate=conjugate,
        seqlen_offset=seqlen_offset,
    )


BF16, F16, F32 = [torch.bfloat16], [torch.float16], [torch.float32]
INT = [torch.int32, torch.int64]
SMOKE = (
    grid(rows=[(0,), (1,), (7,)], num_heads=[3], rotary=[64], dtype=BF16)
    + grid(rows=[(5,)], num_heads=[5], rotary=[64], dtype=BF16, key_heads=[1], interleaved=[False, True], positions=INT)
    + grid(rows=[(2, 3)], num_heads=[2], rotary=[32], dtype=F32, key_heads=[2], positions=INT[:1], conjugate=[True])
    + grid(rows=[(3,)], num_heads=[2], rotary=[18], dtype=F16, key_heads=[1], interleaved=[True], seqlen_offset=[2])
    + grid(rows=[(2, 3)], num_heads=[1], rotary=[6], dtype=BF16, pitch=[11], seqlen_offset=[2])
)
PARTIAL = (
    grid(rows=[(4,)], num_heads=[3], rotary=[32], dtype=BF16, key_heads=[1], channels=[48])
    + grid(rows=[(2, 2)], num_heads=[2], rotary=[16], dtype=F16, channels=[25], interleaved=[True])
    + grid(rows=[(3,)], num_heads=[2], rotary=[32], dtype=BF16, channels=[40], pitch=[56])
)
FULL = (
    grid(rows=[(4001,)], num_heads=[1, 5, 128], rotary=[64, 128], dtype=BF16, key_heads=[1], positions=INT[1:])
    + grid(rows=[(3, 517)], num_heads=[32], rotary=[64, 66], dtype=F32, interleaved=[True], pitch=[192])
    + grid(rows=[(70001,)], num_heads=[256], rotary=[128], dtype=BF16)  # more than 2^31 elements
)
BENCH = (
    grid(
        rows=[(64,), (4096,), (16384,)], num_heads=[128], rotary=[64], dtype=BF16, key_heads=[1], positions=INT[1:]
    )  # as in latent attention
    + grid(rows=[(4, 2048)], num_heads=[32], rotary=[128], dtype=BF16, key_heads=[8], interleaved=[False, True])
    + grid(rows=[(4001,)], num_heads=[128], rotary=[64], dtype=BF16, key_heads=[1], pitch=[192], positions=INT[1:])
    + grid(rows=[(8001,)], num_heads=[24], rotary=[96], dtype=F32, key_heads=[24])
)
