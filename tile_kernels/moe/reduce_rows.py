"""Reduce: sum the rows of a token's positions, each times a factor, back in token order.

    s[t, k] = topk_weights[t, k] * x_sf[p]                  p = token_topk_to_pos[t, k]; an absent factor is 1
    y[t, h] = fma(x[p, h], s[t, k], ...) * sf               in float32, k ascending from 0, slots with p < 0 skipped

`row_threads` threads own a token and read its rows together, up to nine in flight. The gradient of x is the expansion
of dy * sf * s. The gradient of the weights is the dot product of dy and the row of x. One pass over the tokens reads dy
once and finds both. Memory bound: the floor is reading each row of x that has a token and writing y.
This file has the sum without weights; `weighted_reduce_rows` has the sum with them.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op
from tile_kernels.moe._checks import row_width
from tile_kernels.moe._samples import random_places
from tile_kernels.moe.reduce_rows_kernels import invert_places_kernel, reduce_rows_bwd_kernel, reduce_rows_kernel

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = {'e4m3': torch.float8_e4m3fn}

# Launches -----------------------------------------------------------------------------------


def check_rows(
    x: Tensor, token_topk_to_pos: Tensor, topk_weights: Tensor | None, x_sf: Tensor | None, sf: Tensor | None
) -> tuple[int, int, int, int]:
    """Check the arguments of all reductions; returns num_tokens, num_topk, num_expanded, hidden."""
    num_expanded, hidden = check.shape(x, 'x', 'num_expanded hidden', dtype=FLOATS)
    num_tokens, num_topk = check.shape(token_topk_to_pos, 'token_topk_to_pos', 'num_tokens num_topk', dtype=torch.int32)
    known = {'num_tokens': num_tokens, 'num_topk': num_topk}
    if topk_weights is not None:
        check.shape(topk_weights, 'topk_weights', 'num_tokens num_topk', dtype=torch.float32, **known)
        check.contiguous(topk_weights, 'topk_weights')
    if x_sf is not None:
        check.shape(x_sf, 'x_sf', 'num_expanded', dtype=torch.float32, num_expanded=num_expanded)
        check.contiguous(x_sf, 'x_sf')
    if sf is not None:
        check.shape(sf, 'sf', 'one', dtype=torch.float32, one=1)
    check.at_least(hidden, 1, 'hidden')
    check.at_least(num_topk, 1, 'num_topk')
    check.contiguous(x, 'x')
    check.contiguous(token_topk_to_pos, 'token_topk_to_pos')
    check.same_device(x=x, token_topk_to_pos=token_topk_to_pos, topk_weights=topk_weights, x_sf=x_sf, sf=sf)
    return num_tokens, num_topk, num_expanded, hidden


def launch_reduce(
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None,
    x_sf: Tensor | None,
    sf: Tensor | None,
    fp8_format: str,
) -> Tensor:
    """Check the arguments of a reduction and launch its kernel."""
    num_tokens, num_topk, _, hidden = check_rows(x, token_topk_to_pos, topk_weights, x_sf, sf)
    check.one_of(fp8_format, ('', *FP8), 'fp8_format')
    y = empty('y', (num_tokens, hidden), FP8.get(fp8_format, x.dtype), x.device)
    given = (topk_weights is not None, x_sf is not None, sf is not None)
    static = (hidden, x.dtype, y.dtype, row_width(hidden, x, y), num_topk, *given)
    launch(reduce_rows_kernel, static, x, topk_weights, token_topk_to_pos, x_sf, sf, y, size=num_tokens)
    return y


def launch_reduce_bwd(
    dy: Tensor,
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None,
    x_sf: Tensor | None,
    sf: Tensor | None,
    dtopk_weights: Tensor | None,
) -> Tensor:
    """Launch the kernel of both gradients; without weights `dtopk_weights` is None."""
    num_tokens, num_topk, num_expanded, hidden = check_rows(x, token_topk_to_pos, topk_weights, x_sf, sf)
    check.shape(dy, 'dy', 'num_tokens hidden', dtype=x.dtype, num_tokens=num_tokens, hidden=hidden)
    check.same_device(x=x, dy=dy)
    pos_to_slot = torch.empty(num_expanded, dtype=torch.int32, device=x.device)
    dx = torch.empty_like(x)
    launch(invert_places_kernel, (num_topk,), pos_to_slot, token_topk_to_pos)
    given = (topk_weights is not None, x_sf is not None, sf is not None)
    static = (hidden, x.dtype, row_width(hidden, dy, x, dx), num_topk, *given)
    launch(
        reduce_rows_bwd_kernel,
        static,
        dy,
        x if topk_weights is not None else None,
        topk_weights,
        token_topk_to_pos,
        pos_to_slot,
        x_sf,
        sf,
        dx,
        dtopk_weights,
        size=num_tokens + num_expanded,
    )
    return dx


# Ops ----------------------------------------------------------------------------------------


@op(outputs='dx')
def reduce_rows_bwd(
    dy: Tensor, x: Tensor, token_topk_to_pos: Tensor, x_sf: Tensor | None = None, sf: Tensor | None = None
) -> Tensor:
    """Gradient of `reduce_rows`: the rows of dy at the positions of their tokens, times the factors.

    Args:
        dy: (num_tokens, hidden), dtype of x.
        x: (num_expanded, hidden); only its shape and dtype count.
        token_topk_to_pos: (num_tokens, num_topk) int32.
        x_sf: (num_expanded,) float32 or None.
        sf: (1,) float32 or None.

    Returns:
        (num_expanded, hidden) of x's dtype; 0 in rows without a token.
    """
    return launch_reduce_bwd(dy, x, token_topk_to_pos, None, x_sf, sf, None)


@op(outputs='y', backward=reduce_rows_bwd, out=True)
def reduce_rows(
    x: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    fp8_format: str = '',
) -> Tensor:
    """Sum the rows of each token's positions.

    Args:
        x: (num_expanded, hidden) bfloat16, float16 or float32, contiguous.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no position.
        x_sf: (num_expanded,) float32 factors of the rows of x, or None.
        sf: (1,) float32 factor of the result, or None.
        fp8_format: '' keeps the dtype of x, 'e4m3' rounds to fp8 (saturating).

    Returns:
        (num_tokens, hidden); 0 in rows of tokens without a position.
    """
    return launch_reduce(x, token_topk_to_pos, None, x_sf, sf, fp8_format)


# Cases --------------------------------------------------------------------------------------


def make(
    num_tokens: int,
    num_topk: int,
    hidden: int,
    dtype: torch.dtype,
    factors: str = '',
    num_experts: int = 8,
    unrouted: float = 0.2,
    weighted: bool = False,
    **options: str,
) -> dict:
    """`factors` names the optional factors: x_sf, sf. `weighted` adds random weights."""
    token_topk_to_pos, pos_to_expert = random_places(num_tokens, num_topk, num_experts, unrouted)
    num_expanded = pos_to_expert.shape[0]
    given = factors.split()
    x, topk_weights = torch.randn(num_expanded, hidden, dtype=dtype), torch.rand(num_tokens, num_topk)
    return dict(
        x=x,
        **(dict(topk_weights=topk_weights) if weighted else {}),
        token_topk_to_pos=token_topk_to_pos,
        x_sf=torch.rand(num_expanded) + 0.5 if 'x_sf' in given else None,
        sf=torch.rand(1) + 0.5 if 'sf' in given else None,
        **options,
    )


def make_bwd(num_tokens: int, hidden: int, dtype: torch.dtype, **case) -> dict:
    """The same with a gradient of the result."""
    made = make(num_tokens=num_tokens, hidden=hidden, dtype=dtype, **case)
    return dict(**made, dy=torch.randn(num_tokens, hidden, dtype=dtype))


SMOKE = (
    grid(num_tokens=[0, 1, 21], num_topk=[6], hidden=[256], dtype=[torch.bfloat16])
    + grid(num_tokens=[5], num_topk=[1, 9, 33], hidden=[576], dtype=[torch.float16])  # several rounds, tail of a row
    + grid(num_tokens=[9], num_topk=[2], hidden=[67, 4100], dtype=[torch.float32])  # single elements, parts of a row
)
SMOKE_FACTORS = grid(num_tokens=[9], num_topk=[3], hidden=[136], dtype=[torch.bfloat16], factors=['x_sf', 'x_sf sf'])
FULL = grid(num_tokens=[4001], num_topk=[2, 8, 9], hidden=[576, 2048, 7168], dtype=[torch.bfloat16, torch.float32])
HUGE = grid(num_tokens=[100003], num_topk=[3], hidden=[7168], dtype=[torch.bfloat16])  # more than 2^31 elements

BENCH = (
    grid(num_tokens=[18428], num_topk=[6], hidden=[7168], dtype=[torch.bfloat16], unrouted=[0.0])
    + grid(num_tokens=[4096], num_topk=[8], hidden=[2048, 7168], dtype=[torch.bfloat16], unrouted=[0.0])
    + grid(num_tokens=[64, 4001], num_topk=[9], hidden=[576], dtype=[torch.bfloat16], unrouted=[0.0])
)


GRADIENT = dict(rtol=1.6e-2, atol=1e-4)  # both sides round to bfloat16 once

reduce_rows.cases(
    make=make,
    match='bitwise',
    smoke=SMOKE + SMOKE_FACTORS,
    full=FULL + HUGE,
    bench=BENCH,
)
reduce_rows_bwd.cases(make=make_bwd, match=GRADIENT, smoke=SMOKE + SMOKE_FACTORS, bench=BENCH[:2])
