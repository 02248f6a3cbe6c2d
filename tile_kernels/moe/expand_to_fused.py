"""Expand: copy the row of every token to each of its positions in expert order.

    y[token_topk_to_pos[t, k], h] = x[t, h]                 slots without a position (negative) are skipped
    y[p, h] = 0                                             where pos_to_expert[p] < 0

`row_threads` threads read a row into registers and write it up to num_topk times. They also check up to 16 positions
and write zeros to those that are padding. All blocks share this work, because padding may be long, as after the last
expert. Rows move as integers, in the widest accesses that alignment and length allow.
Memory bound: the floor is reading x and writing y. The gradient is `reduce_rows` of dy.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._checks import BITS, bits_of, check_places, row_width
from tile_kernels.moe._samples import random_places
from tile_kernels.moe.expand_to_fused_kernels import (
    expand_to_fused_kernel,
)
from tile_kernels.moe.reduce_rows_kernels import reduce_rows_kernel

# Ops ----------------------------------------------------------------------------------------


@op(outputs='dx')
def expand_to_fused_bwd(dy: Tensor, token_topk_to_pos: Tensor) -> Tensor:
    """Gradient of `expand_to_fused`: the sum over a token's positions.

    Args:
        dy: (num_expanded, hidden) bfloat16, float16 or float32.
        token_topk_to_pos: (num_tokens, num_topk) int32.

    Returns:
        (num_tokens, hidden), summed in float32.
    """
    _, hidden = check.shape(dy, 'dy', 'num_expanded hidden', dtype=(torch.bfloat16, torch.float16, torch.float32))
    num_tokens, num_topk = check.shape(token_topk_to_pos, 'token_topk_to_pos', 'num_tokens num_topk', dtype=torch.int32)
    check.contiguous(dy, 'dy')
    check.contiguous(token_topk_to_pos, 'token_topk_to_pos')
    check.same_device(dy=dy, token_topk_to_pos=token_topk_to_pos)
    dx = dy.new_empty(num_tokens, hidden)
    static = (hidden, dy.dtype, dx.dtype, row_width(hidden, dy, dx), num_topk, False, False, False)
    launch(reduce_rows_kernel, static, dy, None, token_topk_to_pos, None, None, dx, size=num_tokens)
    return dx


@op(outputs='y', backward=expand_to_fused_bwd)
def expand_to_fused(x: Tensor, token_topk_to_pos: Tensor, pos_to_expert: Tensor) -> Tensor:
    """Copy the row of every token to each of its positions in expert order.

    Args:
        x: (num_tokens, hidden) of any dtype of 1, 2, 4 or 8 bytes; rows may be strided.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no position.
        pos_to_expert: (num_expanded,) int32; negative means padding (`pos_to_token` works as well).

    Returns:
        (num_expanded, hidden) of x's dtype, bits unchanged; 0 where pos_to_expert is negative, also without any token.
    """
    num_tokens, hidden = check.shape(x, 'x', 'num_tokens hidden')
    check.at_least(hidden, 1, 'hidden')
    num_topk, num_expanded = check_places(token_topk_to_pos, pos_to_expert, num_tokens)
    check.unit_stride(x, 'x')
    check.same_device(x=x, token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert)
    y = torch.empty((num_expanded, hidden), dtype=x.dtype, device=x.device)
    static = (hidden, x.element_size(), row_width(hidden, x, y), num_topk)
    launch(expand_to_fused_kernel, static, bits_of(x), token_topk_to_pos, pos_to_expert, bits_of(y), size=num_expanded)
    return y


# Cases --------------------------------------------------------------------------------------


def _make(num_tokens: int, num_topk: int, hidden: int, dtype: torch.dtype, padding: int = 3, pitch: int = 0) -> dict:
    """Random rows with `pitch` more elements than are expanded."""
    bits = BITS[dtype.itemsize]
    token_topk_to_pos, pos_to_expert = random_places(num_tokens, num_topk, padding=padding)
    if dtype.is_floating_point and dtype.itemsize > 1:
        x = torch.randn(num_tokens, hidden + pitch, dtype=dtype)
    else:
        x = torch.randint(0, 127, (num_tokens, hidden + pitch), dtype=bits).view(dtype)
    return dict(x=x[:, pitch:], token_topk_to_pos=token_topk_to_pos, pos_to_expert=pos_to_expert)


def _make_bwd(**case) -> dict:
    made = _make(**case)
    dy = torch.randn(made['pos_to_expert'].shape[0], made['x'].shape[1], dtype=made['x'].dtype)
    return dict(dy=dy, token_topk_to_pos=made['token_topk_to_pos'])


expand_to_fused.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 37], num_topk=[6], hidden=[256], dtype=[torch.bfloat16])
    + grid(num_tokens=[5], num_topk=[1, 9], hidden=[67, 576], dtype=[torch.float32])  # single elements, tail of a row
    + grid(num_tokens=[5], num_topk=[2], hidden=[9000], dtype=[torch.float32])  # several parts
    + grid(num_tokens=[6], num_topk=[2], hidden=[64], dtype=[torch.bfloat16], padding=[40])  # more padding than rows
    + grid(num_tokens=[6], num_topk=[2], hidden=[64], dtype=[torch.bfloat16], pitch=[1, 8]),  # misaligned, strided
    full=grid(
        num_tokens=[4001],
        num_topk=[2, 6, 8, 9],
        hidden=[576, 2048, 7168],
        dtype=[torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.float64],
    )
    + grid(num_tokens=[100003], num_topk=[3], hidden=[7169], dtype=[torch.float8_e4m3fn]),  # more than 2^31 elements
    bench=grid(num_tokens=[8004], num_topk=[2], hidden=[7168], dtype=[torch.bfloat16], padding=[0])
    + grid(num_tokens=[4096], num_topk=[8], hidden=[2048, 7168], dtype=[torch.bfloat16], padding=[0])
    + grid(num_tokens=[64], num_topk=[8], hidden=[7168], dtype=[torch.bfloat16], padding=[0])
    + grid(num_tokens=[64, 4001], num_topk=[9], hidden=[576], dtype=[torch.bfloat16], padding=[0]),
)

expand_to_fused_bwd.cases(
    make=_make_bwd,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 21], num_topk=[6], hidden=[256], dtype=[torch.bfloat16])
    + grid(num_tokens=[5], num_topk=[9], hidden=[67], dtype=[torch.float32]),
    bench=grid(num_tokens=[4096], num_topk=[8], hidden=[7168], dtype=[torch.bfloat16], padding=[0]),
)
