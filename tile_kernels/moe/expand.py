"""Expand: copy the row of every token to each of its places in expert order.

    y[token_topk_to_pos[t, k], h] = x[t, h]                 slots without a place (negative) are skipped
    y[p, h] = 0                                             where pos_to_expert[p] < 0

`row_threads` threads own a part of a token: they read it into registers and write it num_topk times. They also look
after a share of the places, up to 16, and write zeros to those that are padding: long stretches of it, as behind the
last expert, are everybody's work. Rows move as bits, in the widest accesses that alignment and length allow.
Memory bound: the floor is reading x and writing y.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.moe._rows import (
    BITS,
    ROW_PASS_CONFIGS,
    ROW_SPACE,
    WARP,
    RowSplit,
    bits_of,
    check_places,
    choose_rows,
    clear_places,
    find_padding,
    load_places,
    load_row,
    num_shares,
    row_width,
    store_to_places,
)
from tile_kernels.moe._samples import random_places
from tile_kernels.moe.reduce_kernels import reduce_rows_kernel

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, elem_size: int, width: int, num_topk: int, num_expanded: int) -> dict:
    """Many rows: all of a row in flight before it is written. Few rows: many small blocks."""
    return choose_rows(hidden // width, num_expanded)


# Kernel -------------------------------------------------------------------------------------


@kernel(choose=choose, space=ROW_SPACE, pass_configs=ROW_PASS_CONFIGS)
def expand_to_fused_kernel(
    hidden: int, elem_size: int, width: int, num_topk: int, *, row_threads: int, vectors: int, num_threads: int
):
    """Rows of `hidden` elements of `elem_size` bytes, `width` of them in an access."""
    dtype = T.dtype(BITS[elem_size])
    split = RowSplit.of(hidden // width, row_threads, vectors, num_threads)
    num_tokens, num_expanded, x_pitch = (T.dynamic(name) for name in ('num_tokens', 'num_expanded', 'x_pitch'))

    @T.prim_func
    def expand_to_fused(
        x: T.StridedTensor((num_tokens, hidden), (x_pitch, 1), dtype),
        token_topk_to_pos: T.Tensor((num_tokens, num_topk), T.int32),
        pos_to_expert: T.Tensor((num_expanded,), T.int32),
        y: T.Tensor((num_expanded, hidden), dtype),
    ):
        blocks = T.ceildiv(num_shares(num_tokens, num_expanded), split.rows)
        with T.Kernel(blocks * split.parts, threads=split.num_threads) as pid:
            T.assume(x_pitch % width == 0)
            row_local = T.alloc_local((split.vectors, width), dtype)
            place_local = T.alloc_local((T.ceildiv(num_topk, WARP),), T.int32)
            tx = T.get_thread_binding()
            first = pid % split.parts * (split.vectors * row_threads) + tx % row_threads
            token = pid // split.parts * split.rows + tx // row_threads

            if token < num_tokens:
                load_row(x, token, first, row_threads, row_local)
                load_places(token_topk_to_pos, token, place_local)
            padding = find_padding(pos_to_expert, token, num_tokens)
            clear_places(padding, token, num_tokens, y, split.vectors, width, first, row_threads)
            if token < num_tokens:
                store_to_places(row_local, y, place_local, num_topk, first, row_threads)

    return expand_to_fused


# Ops ----------------------------------------------------------------------------------------


@op(outputs='dx')
def expand_to_fused_bwd(dy: Tensor, token_topk_to_pos: Tensor) -> Tensor:
    """Gradient of `expand_to_fused`: the sum over a token's places.

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
    """Copy the row of every token to each of its places in expert order.

    Args:
        x: (num_tokens, hidden) of any dtype of 1, 2, 4 or 8 bytes; rows may lie apart.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no place.
        pos_to_expert: (num_expanded,) int32; its sign says whether a place is taken (`pos_to_token` serves as well).

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
    """Rows of random bits, `pitch` elements longer than the part that is expanded."""
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
    + grid(num_tokens=[6], num_topk=[2], hidden=[64], dtype=[torch.bfloat16], pitch=[1, 8]),  # misaligned, apart
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
