"""Reduce: sum the rows of a token's places, each times a factor, back in token order.

    s[t, k] = topk_weights[t, k] * x_sf[p]                  p = token_topk_to_pos[t, k]; an absent factor is 1
    y[t, h] = fma(x[p, h], s[t, k], ...) * sf               in float32, k ascending from 0, slots with p < 0 skipped

`row_threads` threads own a token and go through its places together, up to nine rows in flight. The gradient of x is
the expansion of dy * sf * s, that of the weights the dot product of dy and the row of x; one pass over tokens, which
reads dy once, finds both. Memory bound: the floor is reading each row of x that has a token and writing y.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.moe._rows import row_width
from tile_kernels.moe._samples import random_places
from tile_kernels.moe.reduce_kernels import invert_places_kernel, reduce_rows_bwd_kernel, reduce_rows_kernel

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
FP8 = {'e4m3': torch.float8_e4m3fn}

# Ops ----------------------------------------------------------------------------------------


def _check(
    x: Tensor, token_topk_to_pos: Tensor, topk_weights: Tensor | None, x_sf: Tensor | None, sf: Tensor | None
) -> tuple[int, int, int, int]:
    """Check the arguments that all reductions share; returns num_tokens, num_topk, num_expanded, hidden."""
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


def _reduce(
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None,
    x_sf: Tensor | None,
    sf: Tensor | None,
    fp8_format: str = '',
    out: Tensor | None = None,
) -> Tensor:
    num_tokens, num_topk, _, hidden = _check(x, token_topk_to_pos, topk_weights, x_sf, sf)
    if out is None:
        out = x.new_empty(num_tokens, hidden, dtype=_y_dtype(x, fp8_format))
    else:
        dtypes = (x.dtype, *FP8.values())
        check.shape(out, 'out', 'num_tokens hidden', dtype=dtypes, num_tokens=num_tokens, hidden=hidden)
        check.contiguous(out, 'out')
        check.same_device(x=x, out=out)
    static = (hidden, x.dtype, out.dtype, row_width(hidden, x, out), num_topk)
    static += (topk_weights is not None, x_sf is not None, sf is not None)
    launch(reduce_rows_kernel, static, x, topk_weights, token_topk_to_pos, x_sf, sf, out, size=num_tokens)
    return out


def _reduce_bwd(
    dy: Tensor,
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None,
    x_sf: Tensor | None,
    sf: Tensor | None,
    dtopk_weights: Tensor | None,
) -> Tensor:
    num_tokens, num_topk, num_expanded, hidden = _check(x, token_topk_to_pos, topk_weights, x_sf, sf)
    check.shape(dy, 'dy', 'num_tokens hidden', dtype=x.dtype, num_tokens=num_tokens, hidden=hidden)
    pos_to_slot = torch.empty(num_expanded, dtype=torch.int32, device=x.device)
    dx = torch.empty_like(x)
    launch(invert_places_kernel, (num_topk,), pos_to_slot, token_topk_to_pos)
    static = (hidden, x.dtype, row_width(hidden, dy, x, dx), num_topk)
    static += (topk_weights is not None, x_sf is not None, sf is not None)
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


def _y_dtype(x: Tensor, fp8_format: str) -> torch.dtype:
    check.one_of(fp8_format, ('', *FP8), 'fp8_format')
    return FP8[fp8_format] if fp8_format else x.dtype


@op(outputs='dx')
def reduce_rows_bwd(
    dy: Tensor, x: Tensor, token_topk_to_pos: Tensor, x_sf: Tensor | None = None, sf: Tensor | None = None
) -> Tensor:
    """Gradient of `reduce_rows`: the rows of dy at the places of their tokens, times the factors.

    Args:
        dy: (num_tokens, hidden), dtype of x.
        x: (num_expanded, hidden); only its shape and dtype count.
        token_topk_to_pos: (num_tokens, num_topk) int32.
        x_sf: (num_expanded,) float32 or None.
        sf: (1,) float32 or None.

    Returns:
        (num_expanded, hidden) of x's dtype; 0 in rows no token has.
    """
    return _reduce_bwd(dy, x, token_topk_to_pos, None, x_sf, sf, None)


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
        Gradients of x (0 in rows no token has) and of topk_weights (0 in slots without a place), both deterministic.
    """
    dtopk_weights = torch.empty_like(topk_weights)
    dx = _reduce_bwd(dy, x, token_topk_to_pos, topk_weights, x_sf, sf, dtopk_weights)
    return dx, dtopk_weights


@op(outputs='y', backward=reduce_rows_bwd)
def reduce_rows(
    x: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    fp8_format: str = '',
) -> Tensor:
    """Sum the rows of each token's places.

    Args:
        x: (num_expanded, hidden) bfloat16, float16 or float32, contiguous.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no place.
        x_sf: (num_expanded,) float32 factors of the rows of x, or None.
        sf: (1,) float32 factor of the result, or None.
        fp8_format: '' keeps the dtype of x, 'e4m3' rounds to fp8 (saturating).

    Returns:
        (num_tokens, hidden); 0 in rows of tokens without a place.
    """
    return _reduce(x, token_topk_to_pos, None, x_sf, sf, fp8_format)


@op(outputs='y', backward=weighted_reduce_rows_bwd)
def weighted_reduce_rows(
    x: Tensor,
    topk_weights: Tensor,
    token_topk_to_pos: Tensor,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
    fp8_format: str = '',
) -> Tensor:
    """Sum the rows of each token's places, each times its weight; see `reduce_rows`.

    Args:
        x: (num_expanded, hidden) bfloat16, float16 or float32, contiguous.
        topk_weights: (num_tokens, num_topk) float32; those of slots without a place are not looked at.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no place.
        x_sf: (num_expanded,) float32 factors of the rows of x, or None.
        sf: (1,) float32 factor of the result, or None.
        fp8_format: '' keeps the dtype of x, 'e4m3' rounds to fp8 (saturating).

    Returns:
        (num_tokens, hidden); 0 in rows of tokens without a place.
    """
    return _reduce(x, token_topk_to_pos, topk_weights, x_sf, sf, fp8_format)


@op()
def reduce_rows_(
    out: Out,
    x: Tensor,
    token_topk_to_pos: Tensor,
    topk_weights: Tensor | None = None,
    x_sf: Tensor | None = None,
    sf: Tensor | None = None,
) -> None:
    """Reduce into memory of the caller; see `reduce_rows` and `weighted_reduce_rows`.

    Args:
        out: (num_tokens, hidden), contiguous, of the dtype of x or float8_e4m3fn; overwritten.
        x: (num_expanded, hidden) bfloat16, float16 or float32, contiguous.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no place.
        topk_weights: (num_tokens, num_topk) float32 or None.
        x_sf: (num_expanded,) float32 factors of the rows of x, or None.
        sf: (1,) float32 factor of the result, or None.
    """
    _reduce(x, token_topk_to_pos, topk_weights, x_sf, sf, out=out)


@check.names(x_sf='x[1]')
def reduce_fused(
    x: Tensor | tuple[Tensor, Tensor],
    topk_weights: Tensor | None,
    token_topk_to_pos: Tensor,
    fp8_format: str = '',
    sf: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Bring expanded rows back to their tokens: the weighted sum over the places of each token.

    Differentiable in x and topk_weights (without `out`).

    Args:
        x: (num_expanded, hidden) bfloat16, float16 or float32, contiguous; or a pair of it and (num_expanded,) float32
            factors of its rows.
        topk_weights: (num_tokens, num_topk) float32, or None for a plain sum.
        token_topk_to_pos: (num_tokens, num_topk) int32, negative where a slot has no place.
        fp8_format: '' keeps the dtype of x, 'e4m3' rounds to fp8 (saturating).
        sf: (1,) float32 factor of the result, only with an fp8 format.
        out: where to write the result, or None.

    Returns:
        (num_tokens, hidden), `out` if given; 0 in rows of tokens without a place.
    """
    x, x_sf = check.pair(x, 'x') if isinstance(x, tuple) else (check.tensor(x, 'x'), None)
    if sf is not None and not fp8_format:
        check.fail('sf', "must be None unless fp8_format is 'e4m3'", "fp8_format ''")
    if out is not None:
        check.dtype(out, 'out', _y_dtype(x, fp8_format))
        reduce_rows_(out, x, token_topk_to_pos, topk_weights, x_sf, sf)
        return out
    if topk_weights is None:
        return reduce_rows(x, token_topk_to_pos, x_sf, sf, fp8_format)
    return weighted_reduce_rows(x, topk_weights, token_topk_to_pos, x_sf, sf, fp8_format)


# Cases --------------------------------------------------------------------------------------


def _make(
    num_tokens: int,
    num_topk: int,
    hidden: int,
    dtype: torch.dtype,
    factors: str = '',
    fp8_format: str = '',
    num_experts: int = 8,
    unrouted: float = 0.2,
) -> dict:
    """`factors` names the optional ones that are given: x_sf, sf."""
    token_topk_to_pos, pos_to_expert = random_places(num_tokens, num_topk, num_experts, unrouted)
    num_expanded = pos_to_expert.shape[0]
    given = factors.split()
    return dict(
        x=torch.randn(num_expanded, hidden, dtype=dtype),
        topk_weights=torch.rand(num_tokens, num_topk),
        token_topk_to_pos=token_topk_to_pos,
        x_sf=torch.rand(num_expanded) + 0.5 if 'x_sf' in given else None,
        sf=torch.rand(1) + 0.5 if 'sf' in given else None,
        fp8_format=fp8_format,
    )


def _without(*names: str, dy: bool = False, out: bool = False):
    """`_make` for an op that lacks some arguments or takes a gradient."""

    def make(**case) -> dict:
        made = _make(**case)
        shape = (made['token_topk_to_pos'].shape[0], made['x'].shape[1])
        if dy:
            made['dy'] = torch.randn(shape, dtype=made['x'].dtype)
        if out:
            made['out'] = torch.empty(shape, dtype=_y_dtype(made['x'], made['fp8_format']))
        return {name: value for name, value in made.items() if name not in names}

    return make


SMOKE = (
    grid(num_tokens=[0, 1, 21], num_topk=[6], hidden=[256], dtype=[torch.bfloat16])
    + grid(num_tokens=[5], num_topk=[1, 9, 33], hidden=[576], dtype=[torch.float16])  # several rounds, tail of a row
    + grid(num_tokens=[9], num_topk=[2], hidden=[67, 4100], dtype=[torch.float32])  # single elements, parts of a row
)
SMOKE_FACTORS = grid(num_tokens=[9], num_topk=[3], hidden=[136], dtype=[torch.bfloat16], factors=['x_sf', 'x_sf sf'])
SMOKE_FP8 = grid(num_tokens=[7], num_topk=[2], hidden=[264], dtype=[torch.bfloat16, torch.float32], factors=['sf'])
FULL = grid(num_tokens=[4001], num_topk=[2, 8, 9], hidden=[576, 2048, 7168], dtype=[torch.bfloat16, torch.float32])
HUGE = grid(num_tokens=[100003], num_topk=[3], hidden=[7168], dtype=[torch.bfloat16])  # more than 2^31 elements
BENCH = (
    grid(num_tokens=[18428], num_topk=[6], hidden=[7168], dtype=[torch.bfloat16], unrouted=[0.0])
    + grid(num_tokens=[4096], num_topk=[8], hidden=[2048, 7168], dtype=[torch.bfloat16], unrouted=[0.0])
    + grid(num_tokens=[64, 4001], num_topk=[9], hidden=[576], dtype=[torch.bfloat16], unrouted=[0.0])
)


def _with(cases: list[dict], **more) -> list[dict]:
    return [case | more for case in cases]


reduce_rows.cases(
    make=_without('topk_weights'),
    match='bitwise',
    smoke=SMOKE + SMOKE_FACTORS,
    full=FULL + HUGE,
    bench=BENCH,
)
weighted_reduce_rows.cases(
    make=_make,
    match='bitwise',
    smoke=SMOKE + SMOKE_FACTORS,
    full=FULL + _with(FULL, fp8_format='e4m3', factors='x_sf sf'),
    bench=BENCH + _with(BENCH[:1], fp8_format='e4m3', factors='x_sf sf'),
)
reduce_rows_.cases(
    make=_without('fp8_format', out=True),
    match='bitwise',
    smoke=SMOKE[:2] + SMOKE_FACTORS[:1] + _with(SMOKE_FP8, fp8_format='e4m3'),
    bench=BENCH[:1],
)
GRADIENT = dict(rtol=1.6e-2, atol=1e-4)  # bfloat16 rounds once on either side
reduce_rows_bwd.cases(
    make=_without('topk_weights', 'fp8_format', dy=True),
    match=GRADIENT,
    smoke=SMOKE + SMOKE_FACTORS,
    bench=BENCH[:2],
)
weighted_reduce_rows_bwd.cases(
    make=_without('fp8_format', dy=True),
    match=GRADIENT,
    smoke=SMOKE + SMOKE_FACTORS,
    bench=BENCH[:2],
)
