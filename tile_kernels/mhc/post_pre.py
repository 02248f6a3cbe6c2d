"""Post of one layer and pre of the next, with gradients.

    y = post(x, residual, post_mix, comb_mix)               see `post`
    layer_input, post, comb, ... = pre(y)                   see `pre`

The bits are those of the two ops. Where one kernel computes both, y stays in shared memory (`pre_kernels.py`).
Elsewhere they run one after the other. In backward the gradient of y is written once. Memory bound: the minimum is one
read or write of each tensor.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.op import op
from tile_kernels.mhc._checks import BF16, flat, num_mixes
from tile_kernels.mhc._samples import pre_inputs
from tile_kernels.mhc.post import check_post, post_bwd
from tile_kernels.mhc.pre import (
    BENCH,
    FULL,
    FULL_BWD,
    PRE_BWD,
    SMOKE,
    fused_pre,
    fused_pre_bwd,
    saved_tensors,
    upstream,
)

# Ops ---------------------------------------------------------------------------------------


@op(outputs='dx dresidual dpost_mix dcomb_mix dfn dscale dbase')
def post_pre_bwd(
    dy: Tensor,
    dlayer_input: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    y: Tensor,
    pre: Tensor,
    mixes: Tensor,
    rstd: Tensor,
    repeat: int = 10,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `post_pre`.

    Args:
        dy: (..., n, hidden) bfloat16, contiguous.
        dlayer_input: (..., hidden) bfloat16, contiguous.
        dpost: (..., n, 1) float32, contiguous.
        dcomb: (..., n, n) float32, contiguous.
        x: as given to `post_pre`.
        residual: as given to `post_pre`.
        post_mix: as given to `post_pre`.
        comb_mix: as given to `post_pre`.
        fn: as given to `post_pre`.
        scale: as given to `post_pre`.
        base: as given to `post_pre`.
        y: as returned by `post_pre`.
        pre: as returned by `post_pre`.
        mixes: as returned by `post_pre`.
        rstd: as returned by `post_pre`.
        repeat: as given to `post_pre`.
        sinkhorn_eps: as given to `post_pre`.
        post_mult: as given to `post_pre`.

    Returns:
        Gradients of x, residual, post_mix, comb_mix, fn, scale and base, in their dtypes; deterministic.
    """
    gradients, saved, options = (dlayer_input, dpost, dcomb), (pre, mixes, rstd), (repeat, sinkhorn_eps, post_mult)
    collected, dfn, dscale, dbase = fused_pre_bwd(gradients, y, fn, scale, base, saved, dy, options)
    dx, dresidual, dpost_mix, dcomb_mix = post_bwd.fn(collected, x, residual, post_mix, comb_mix)
    return dx, dresidual, dpost_mix, dcomb_mix, dfn, dscale, dbase


@op(outputs='y layer_input post comb pre mixes rstd', backward=post_pre_bwd)
def post_pre(
    x: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Post of one layer and pre of the next; differentiable.

    Args:
        x: (..., hidden) bfloat16, contiguous; the output of the layer. hidden is a multiple of 64.
        residual: (..., n, hidden) bfloat16, contiguous; the residual before the layer, 2, 4 or 8 streams.
        post_mix: (..., n, 1) float32, contiguous; of the layer.
        comb_mix: (..., n, n) float32, contiguous; of the layer.
        fn: (n (2 + n), n * hidden) float32, contiguous; of the next layer, like all following arguments.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        repeat: as given to `sinkhorn`.
        eps: added to the mean square.
        pre_eps: added to pre.
        sinkhorn_eps: as given to `sinkhorn`.
        post_mult: factor of post.

    Returns:
        y (..., n, hidden) bfloat16, the bits of `post`; layer_input, post and comb, the bits of `big_fuse` of y; and
        pre, mixes and rstd, which have no gradient.
    """
    lead, num_streams, hidden = check_post(x, residual, post_mix, comb_mix)
    check.shape(fn, 'fn', 'num_mixes num_streams*hidden', num_mixes=num_mixes(num_streams))
    y = torch.empty_like(residual)
    options = (repeat, eps, pre_eps, sinkhorn_eps, post_mult)
    inputs = (
        flat(x, lead, hidden),
        flat(residual, lead, num_streams, hidden),
        flat(post_mix, lead, num_streams, 1),
        flat(comb_mix, lead, num_streams, num_streams),
    )
    layer_input, post, comb, *saved = fused_pre(y, fn, scale, base, True, options, inputs)
    return y, layer_input, post, comb, saved[0], saved[1], saved[2]


# Cases -------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int) -> dict:
    layer = dict(
        x=torch.randn(*lead, hidden, dtype=BF16),
        post_mix=torch.rand(*lead, num_streams, 1),
        comb_mix=torch.rand(*lead, num_streams, num_streams).softmax(-1),
    )
    return layer | pre_inputs(lead, hidden, num_streams)


def _make_bwd(**case) -> dict:
    made = _make(**case)
    y = torch.randn_like(made['residual'])
    return dict(dy=torch.randn_like(y)) | upstream(**case) | made | dict(y=y) | saved_tensors(y)


# See `pre.py` for these bounds.
MIXED, OVER_HIDDEN = dict(rtol=2**-6, rms=2**-5), dict(rtol=2**-8, rms=2**-8)
POST_PRE = dict(rtol=2**-10, rms=2**-8, layer_input=MIXED)
POST_BWD = dict(dx=MIXED, dresidual=MIXED, dpost_mix=OVER_HIDDEN, dcomb_mix=OVER_HIDDEN)
post_pre.cases(make=_make, match=POST_PRE, smoke=SMOKE, full=FULL, bench=BENCH)
post_pre_bwd.cases(make=_make_bwd, match=PRE_BWD | POST_BWD, smoke=SMOKE, full=FULL_BWD, bench=BENCH[1:3])
