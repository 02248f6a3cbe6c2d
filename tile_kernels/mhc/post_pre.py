"""Pre of a layer, and post of one layer with pre of the next, with gradients.

    layer_input, post, comb = pre(residual)                 see `big_fuse`: the same kernels, the same bits
    y = post(x, residual, post_mix, comb_mix)               see `post`
    post_pre: y, and pre of y                               see `pre_device`: in one pass y stays in shared memory

Where post_pre does not go in one pass, it is one after the other. Forward also returns what backward needs: pre, the
mixes and their rstd. Backward, the coefficients need a sum over the channels of a token before anything else can be
found (`pre_bwd_device`); then the kernel of the projection gives

    dy + pre dlayer_input + what the projection adds

rounded once, and that is what post gets. Memory bound: the floor is reading and writing each tensor once.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.mhc._rows import STREAMS, flat, lead_of, vector_width
from tile_kernels.mhc.apply_mix import launch_apply_bwd
from tile_kernels.mhc.big_fuse import fused_pre
from tile_kernels.mhc.norm_fn import STREAMED, check_projection_bwd, launch_projection_bwd
from tile_kernels.mhc.post import check_post, post_bwd
from tile_kernels.mhc.pre_bwd_kernels import mixes_bwd_kernel, tokens_of_a_warp
from tile_kernels.mhc.sinkhorn import check_history
from tile_kernels.mhc.split_mixes import check_mixes, num_mixes, sum_parts_kernel

BF16, F32 = torch.bfloat16, torch.float32

# Ops ----------------------------------------------------------------------------------------


def _pre_bwd(
    upstream: tuple[Tensor, Tensor, Tensor],
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    saved: tuple[Tensor, Tensor, Tensor],
    dresidual: Tensor | None,
    options: tuple,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of residual (with `dresidual` added), fn, scale and base."""
    (dlayer_input, dpost, dcomb), (pre, mixes, rstd) = upstream, saved
    repeat, sinkhorn_eps, post_mult = options
    gradients = dict(dy=(dresidual, STREAMED), dlayer_input=(dlayer_input, 'hidden'))
    lead, k, width = check_projection_bwd(residual, fn, mixes, rstd, **gradients)
    num_streams = residual.shape[-2]
    check_mixes(mixes, scale, base, num_streams)
    lead_of(dpost, 'dpost', 'num_streams one', F32, lead, num_streams=num_streams, one=1)
    lead_of(dcomb, 'dcomb', 'num_streams outputs', F32, lead, num_streams=num_streams, outputs=num_streams)
    check.same_device(residual=residual, dpost=dpost, dcomb=dcomb)
    check_history(num_streams, num_streams, repeat)
    dpre = launch_apply_bwd(dlayer_input, residual, pre, None, 'nothing')
    num_tokens = math.prod(lead)
    parts = -(-num_tokens // tokens_of_a_warp(num_streams))
    scale_parts, base_parts = base.new_empty(parts, 3), base.new_empty(parts, width)
    coefficients = (
        flat(dpre, lead, 1, num_streams),
        flat(dpost, lead, 1, num_streams),
        flat(dcomb, lead, num_streams, num_streams),
        flat(mixes, lead, 2 + num_streams, num_streams),
    )
    elements = math.gcd(num_streams, vector_width(*coefficients))

    def prepare(o_parts: Tensor, pull: Tensor, dfn: Tensor | None) -> None:
        launch(
            mixes_bwd_kernel,
            (k, num_streams, elements, repeat, dfn is not None),
            scale_parts,
            base_parts,
            *coefficients,
            flat(rstd, lead),
            scale,
            base,
            o_parts,
            pull,
            dfn,
            sinkhorn_eps,
            post_mult,
        )

    collected = torch.empty_like(residual)
    dfn = launch_projection_bwd(prepare, residual, fn, collected, dresidual, (dlayer_input, pre))
    if num_tokens == 0:
        return collected, dfn, torch.zeros_like(scale), torch.zeros_like(base)
    dscale, dbase = torch.empty_like(scale), torch.empty_like(base)
    launch(sum_parts_kernel, (3, width), scale_parts, base_parts, dscale, dbase)
    return collected, dfn, dscale, dbase


@op(outputs='dresidual dfn dscale dbase')
def pre_bwd(
    dlayer_input: Tensor,
    dpost: Tensor,
    dcomb: Tensor,
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    pre: Tensor,
    mixes: Tensor,
    rstd: Tensor,
    repeat: int = 10,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `pre`.

    Args:
        dlayer_input: (..., hidden) bfloat16, contiguous.
        dpost: (..., n, 1) float32, contiguous.
        dcomb: (..., n, n) float32, contiguous.
        residual: as given to `pre`.
        fn: as given to `pre`.
        scale: as given to `pre`.
        base: as given to `pre`.
        pre: as returned by `pre`.
        mixes: as returned by `pre`.
        rstd: as returned by `pre`.
        repeat: as given to `pre`.
        sinkhorn_eps: as given to `pre`.
        post_mult: as given to `pre`.

    Returns:
        Gradients of residual (bfloat16), fn, scale and base (float32); deterministic.
    """
    upstream, saved = (dlayer_input, dpost, dcomb), (pre, mixes, rstd)
    return _pre_bwd(upstream, residual, fn, scale, base, saved, None, (repeat, sinkhorn_eps, post_mult))


@op(outputs='layer_input post comb pre mixes rstd', backward=pre_bwd)
def pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Input and coefficients of a layer from the residual streams; differentiable in residual, fn, scale and base.

    Args:
        residual: (..., n, hidden) bfloat16, contiguous; n is 2, 4 or 8, hidden a multiple of 64.
        fn: (n (2 + n), n * hidden) float32, contiguous; used as TF32 takes it.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        repeat: as given to `sinkhorn`.
        eps: added to the mean square.
        pre_eps: added to pre.
        sinkhorn_eps: as given to `sinkhorn`.
        post_mult: factor of post.

    Returns:
        layer_input (..., hidden) bfloat16, post (..., n, 1) and comb (..., n, n) float32, the bits of `big_fuse`; and
        pre (..., n, 1), mixes (..., n (2 + n)) and rstd (...), float32, which have no gradient.
    """
    layer_input, post, comb, *saved = fused_pre(
        residual, fn, scale, base, True, (repeat, eps, pre_eps, sinkhorn_eps, post_mult)
    )
    return layer_input, post, comb, saved[0], saved[1], saved[2]


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
    upstream, saved = (dlayer_input, dpost, dcomb), (pre, mixes, rstd)
    collected, dfn, dscale, dbase = _pre_bwd(upstream, y, fn, scale, base, saved, dy, (repeat, sinkhorn_eps, post_mult))
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
        x: (..., hidden) bfloat16, contiguous; what the layer put out. hidden is a multiple of 64.
        residual: (..., n, hidden) bfloat16, contiguous; the residual before the layer, 2, 4 or 8 streams.
        post_mix: (..., n, 1) float32, contiguous; of the layer.
        comb_mix: (..., n, n) float32, contiguous; of the layer.
        fn: (n (2 + n), n * hidden) float32, contiguous; of the next layer, as all that follows.
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


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int) -> dict:
    width, k = num_mixes(num_streams), num_streams * hidden
    return dict(
        residual=torch.randn(*lead, num_streams, hidden, dtype=BF16),
        fn=torch.randn(width, k) * k**-0.5,
        scale=torch.rand(3) + 0.5,
        base=torch.randn(width) * 0.1,
        post_mult=2.0,
    )


def _upstream(lead: tuple, hidden: int, num_streams: int) -> dict:
    return dict(
        dlayer_input=torch.randn(*lead, hidden, dtype=BF16),
        dpost=torch.randn(*lead, num_streams, 1),
        dcomb=torch.randn(*lead, num_streams, num_streams),
    )


def _saved(residual: Tensor) -> dict:
    """Stand-ins for what forward saves, of the right size."""
    *lead, num_streams, _ = residual.shape
    return dict(
        pre=torch.rand(*lead, num_streams, 1),
        mixes=torch.randn(*lead, num_mixes(num_streams)),
        rstd=(residual.float().square().flatten(-2).mean(-1) + 1e-6).rsqrt(),
    )


def _make_bwd(**case) -> dict:
    made = _make(**case)
    return _upstream(**case) | made | _saved(made['residual'])


def _make_post(lead: tuple, hidden: int, num_streams: int) -> dict:
    layer = dict(
        x=torch.randn(*lead, hidden, dtype=BF16),
        post_mix=torch.rand(*lead, num_streams, 1),
        comb_mix=torch.rand(*lead, num_streams, num_streams).softmax(-1),
    )
    return layer | _make(lead, hidden, num_streams)


def _make_post_bwd(**case) -> dict:
    made = _make_post(**case)
    y = torch.randn_like(made['residual'])
    return dict(dy=torch.randn_like(y)) | _upstream(**case) | made | dict(y=y) | _saved(y)


SMOKE = (
    grid(lead=[(0,), (2, 3)], hidden=[64], num_streams=[4])
    + grid(lead=[(18,)], hidden=[320], num_streams=[2])  # tails
    + grid(lead=[(3,)], hidden=[64], num_streams=[8])
    + grid(lead=[(9,)], hidden=[320, 576, 704], num_streams=[4])  # above 256 channels to a block one after the other
)
FULL = (
    grid(lead=[(4001,), (3, 1001)], hidden=[1280, 2560, 7168], num_streams=[4])
    + grid(lead=[(2049,)], hidden=[2048], num_streams=STREAMS)
    + grid(lead=[(1001,)], hidden=[2816, 5120, 8192], num_streams=[4])
)
BENCH = (
    grid(lead=[(64,), (4096,), (8192,)], hidden=[4096], num_streams=[4])
    + grid(lead=[(4096,)], hidden=[2048, 7168], num_streams=[4])
    + grid(lead=[(4001,)], hidden=[2560], num_streams=[4])
)
# Kernel and twin sum in different orders, so a number that is rounded between two sums is now and then rounded to
# another neighbour: the gradient o of a mix to TF32, a step of up to 2^-10 of it, y and the gradient collected for y to
# bfloat16, up to 2^-7. What is made of these numbers may be small by cancellation and is off by the step all the same,
# so its bound counts in root mean squares of the tensor:
#   dfn               a sum over tokens: a term of up to 2 rms is a TF32 step off
#   dresidual of pre  a sum over mixes: one term of up to 4 rms is a TF32 step off
#   dpost, dcomb      sums over hidden: a quarter of the terms are a bfloat16 step off, in either direction
#   mixes of streams  one stream of up to 4 rms is a bfloat16 step off
#   coefficients      sums over 1024 or more channels of y, one of up to 4 rms with a weight of up to 4 rms a step off
CLOSE, SUMMED = dict(rtol=1e-3, atol=1e-3), dict(rtol=2**-14, rms=2**-14)
PRE_BWD = SUMMED | dict(dfn=dict(rtol=2**-9, rms=2**-9), dresidual=dict(rtol=2**-8, rms=2**-8))
MIXED, OVER_HIDDEN = dict(rtol=2**-6, rms=2**-5), dict(rtol=2**-8, rms=2**-8)
POST_PRE = dict(rtol=2**-10, rms=2**-8, layer_input=MIXED)
POST_BWD = dict(dx=MIXED, dresidual=MIXED, dpost_mix=OVER_HIDDEN, dcomb_mix=OVER_HIDDEN)
FULL_BWD = FULL[:3] + grid(lead=[(512,)], hidden=[2048], num_streams=[4])  # four parts of dfn
pre.cases(make=_make, match=CLOSE, smoke=SMOKE, full=FULL, bench=BENCH)
pre_bwd.cases(make=_make_bwd, match=PRE_BWD, smoke=SMOKE, full=FULL_BWD, bench=BENCH[1:])
post_pre.cases(make=_make_post, match=POST_PRE, smoke=SMOKE, full=FULL, bench=BENCH)
post_pre_bwd.cases(make=_make_post_bwd, match=PRE_BWD | POST_BWD, smoke=SMOKE, full=FULL_BWD, bench=BENCH[1:3])
