"""Weighted reduce: sum the rows of a token's positions, each times its weight; see `reduce_rows`."""

import functools

import torch
from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.op import op
from tile_kernels.moe.reduce_rows import (
    BENCH,
    FLOATS,
    FP8,
    FULL,
    GRADIENT,
    SMOKE,
    SMOKE_FACTORS,
    launch_reduce,
    launch_reduce_bwd,
    make,
    make_bwd,
)

# Ops ----------------------------------------------------------------------------------------


@op(outputs='dx dtopk_weights')
def weighted_reduce_rows_bwd(
    dy: Tensor,
    x: Tensor,
    topk_weights: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of `weighted_reduce_rows`.

    Args:
        dy: (num_tokens, hidden), dtype of x.
        x: (num_expanded, hidden).
        topk_weights: (num_tokens, num_topk) float32.
        token_topk_to_pos: (num_tokens, num_topk) int32.
        x_sf: (num_expanded,) float32 or None.
        sf: (1,) float32 or None.

    Returns:
        Deterministic gradients of x (0 in rows without a token) and of topk_weights (0 in slots without a position).
    """
    dtopk_weights = torch.empty_like(topk_weights)
    dx = launch_reduce_bwd(dy, x, token_topk_to_pos, topk_weights, x_sf, sf, dtopk_weights)
    return dx, dtopk_weights


@op(outputs='y', backward=weighted_reduce_rows_bwd, out=True)
def weighted_reduce_rows(
    x: Tensor,
    topk_weights: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    fp8_format: str = '',
) -> Tensor:
    """Sum the rows of each token's positions, each times its weight; see `reduce_rows`.

    Args:
        x: (num_expanded, hidden) bfloat16, float16 or float32, contiguous.
        topk_weights: (num_tokens, num_topk) float32; those of slots without a position are not read.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no position.
        x_sf: (num_expanded,) float32 factors of the rows of x, or None.
        sf: (1,) float32 factor of the result, or None.
        fp8_format: '' keeps the dtype of x, 'e4m3' rounds to fp8 (saturating).

    Returns:
        (num_tokens, hidden); 0 in rows of tokens without a position.
    """
    return launch_reduce(x, token_topk_to_pos, topk_weights, x_sf, sf, fp8_format)


# Cases --------------------------------------------------------------------------------------


weighted = functools.partial(make, weighted=True)


def _make_out(num_tokens: int, hidden: int, fp8_format: str = '', **case) -> dict:
    """The same with memory for the result."""
    made = weighted(num_tokens=num_tokens, hidden=hidden, fp8_format=fp8_format, **case)
    return dict(**made, y=torch.empty(num_tokens, hidden, dtype=FP8.get(fp8_format, made['x'].dtype)))


E4M3 = dict(fp8_format='e4m3', factors='x_sf sf')

weighted_reduce_rows.cases(
    make=weighted,
    match='bitwise',
    smoke=SMOKE + SMOKE_FACTORS,
    full=FULL + [case | E4M3 for case in FULL],
    bench=BENCH + [BENCH[0] | E4M3],
)
weighted_reduce_rows.out.cases(  # with fp8, which has no gradient
    make=_make_out,
    match='bitwise',
    smoke=SMOKE[:2]
    + SMOKE_FACTORS[:1]
    + grid(num_tokens=[7], num_topk=[2], hidden=[264], dtype=FLOATS[::2], factors=['sf'], fp8_format=['e4m3']),
    bench=BENCH[:1],
)
weighted_reduce_rows_bwd.cases(
    make=functools.partial(make_bwd, weighted=True), match=GRADIENT, smoke=SMOKE + SMOKE_FACTORS, bench=BENCH[:2]
)
