"""Pre of a layer: its input and coefficients from the residual streams, with gradients.

    mixes, rstd      = norm_fn(residual, fn)                            see `norm_fn`
    pre, post, z     = split_mixes(mixes)                               see `split_mixes`
    comb             = sinkhorn(z)                                      see `sinkhorn`
    layer_input      = apply_mix(residual, pre)                         see `apply_mix`

The bits are those of these four ops. Where a cluster can hold the channels of a token, one kernel reads the residual
once (`pre_kernels.py`). Elsewhere there are two: the projection, then `mix_and_apply`. Forward also returns what
backward needs: pre, mixes and rstd.

Backward needs dpre, a sum over the channels of a token, before anything else. Then one kernel computes the gradients of
the mixes (`pre_bwd_kernels.py`), and the backward kernel of `norm_fn` writes

    dresidual = dy + pre dlayer_input + gradient of the projection

rounded once; dy is a gradient that `post_pre` passes in. Memory bound: the minimum is one read or write of each tensor.
"""

import math

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op
from tile_kernels.mhc._checks import BF16, F32, STREAMS, check_scale_and_base, flat, lead_of, num_mixes, vector_width
from tile_kernels.mhc._samples import pre_inputs
from tile_kernels.mhc.apply_mix import launch_apply_bwd
from tile_kernels.mhc.mix_and_apply import launch_mix_and_apply
from tile_kernels.mhc.norm_fn import STREAMED, check_projection, check_projection_bwd, launch_projection_bwd, project
from tile_kernels.mhc.post import post
from tile_kernels.mhc.pre_bwd_kernels import mixes_bwd_kernel, tokens_of_a_warp
from tile_kernels.mhc.pre_kernels import goes_in_one_pass, pre_streams_kernel
from tile_kernels.mhc.sinkhorn import check_history
from tile_kernels.mhc.split_mixes import check_mixes, sum_parts_kernel

# Ops ---------------------------------------------------------------------------------------


def fused_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    with_mixes: bool,
    options: tuple,
    layer: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Returns layer_input, post and comb of residual (..., n, hidden), `with_mixes` also pre, mixes and rstd.

    `options` are repeat, eps, pre_eps, sinkhorn_eps and post_mult. `layer` is x, residual, post_mix and comb_mix of a
    `post`, with one dimension of tokens; its result is then written to `residual` first.
    """
    lead, _, width = check_projection(residual, fn)
    num_streams, hidden = residual.shape[-2:]
    check.shape(fn, 'fn', 'num_mixes num_streams*hidden', num_mixes=num_mixes(num_streams))
    check_scale_and_base(scale, base, num_streams)
    check.at_least(options[0], 1, 'repeat')
    check.same_device(residual=residual, scale=scale, base=base)
    layer_input = residual.new_empty((*lead, hidden))
    post_mix, comb_mix = fn.new_empty((*lead, num_streams, 1)), fn.new_empty((*lead, num_streams, num_streams))
    streams = flat(residual, lead, num_streams, hidden)
    if layer is not None and not goes_in_one_pass(streams, fn, layer[:2]):
        post.out.fn(*layer, y=streams)
        layer = None
    outputs = (
        flat(post_mix, lead, num_streams, 1),
        flat(comb_mix, lead, num_streams, num_streams),
        flat(layer_input, lead, hidden),
    )
    saved: tuple[Tensor, ...] = ()
    kept = None
    if with_mixes:
        saved = (fn.new_empty((*lead, num_streams, 1)), fn.new_empty((*lead, width)), fn.new_empty(lead))
        kept = (flat(saved[0], lead, num_streams, 1), flat(saved[1], lead, width), flat(saved[2], lead))
    if goes_in_one_pass(streams, fn):
        variant = 'post_pre' if layer is not None else 'pre' if with_mixes else 'input'
        static = (hidden, num_streams, width, variant)
        if layer is None:
            inputs: tuple = (streams, None, None, None, fn, scale, base, None)
        else:
            inputs = (layer[1], layer[0], *layer[2:], fn, scale, base, streams)
        launch(pre_streams_kernel, static, *inputs, *outputs, *(kept or (None, None, None)), *options)
    else:
        launch_mix_and_apply(streams, project(streams, fn), scale, base, outputs, kept, options)
    return layer_input, post_mix, comb_mix, *saved


def fused_pre_bwd(
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
    return fused_pre_bwd(upstream, residual, fn, scale, base, saved, None, (repeat, sinkhorn_eps, post_mult))


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
        fn: (n (2 + n), n * hidden) float32, contiguous; rounded to TF32.
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


# Cases -------------------------------------------------------------------------------------


def upstream(lead: tuple, hidden: int, num_streams: int) -> dict:
    """Gradients of the results of `pre`."""
    return dict(
        dlayer_input=torch.randn(*lead, hidden, dtype=BF16),
        dpost=torch.randn(*lead, num_streams, 1),
        dcomb=torch.randn(*lead, num_streams, num_streams),
    )


def saved_tensors(residual: Tensor) -> dict:
    """Random tensors in the shapes of what forward saves."""
    *lead, num_streams, _ = residual.shape
    return dict(
        pre=torch.rand(*lead, num_streams, 1),
        mixes=torch.randn(*lead, num_mixes(num_streams)),
        rstd=(residual.float().square().flatten(-2).mean(-1) + 1e-6).rsqrt(),
    )


def _make_bwd(**case) -> dict:
    made = pre_inputs(**case)
    return upstream(**case) | made | saved_tensors(made['residual'])


SMOKE = (
    grid(lead=[(0,), (2, 3)], hidden=[64], num_streams=[4])
    + grid(lead=[(18,)], hidden=[320], num_streams=[2])  # padding
    + grid(lead=[(3,)], hidden=[64], num_streams=[8])
    + grid(lead=[(9,)], hidden=[320, 576, 704], num_streams=[4])  # above 256 channels in a block `post` runs first
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
FULL_BWD = FULL[:3] + grid(lead=[(512,)], hidden=[2048], num_streams=[4])  # four parts of dfn
# Kernel and twin sum in different orders, so a sum that is rounded may differ by a rounding step. The gradient o of a
# mix is rounded to TF32: a step is up to 2^-10 of it. Output y and its gradient are rounded to bfloat16: up to 2^-7.
# Results made from these numbers can be small by cancellation, but keep the absolute error. So bounds are relative to
# the root mean square (rms) of the tensor:
# - dfn is a sum over tokens: a term of up to 2 rms is off by a TF32 step.
# - dresidual of pre is a sum over mixes: one term of up to 4 rms is off by a TF32 step.
# - dpost and dcomb are sums over hidden: a quarter of the terms are off by a bfloat16 step, in either direction.
# - For mixes of streams, one stream of up to 4 rms is off by a bfloat16 step.
# - Coefficients are sums over 1024 or more channels of y: one with a weight, both of up to 4 rms, is off.
CLOSE, SUMMED = dict(rtol=1e-3, atol=1e-3), dict(rtol=2**-14, rms=2**-14)
PRE_BWD = SUMMED | dict(dfn=dict(rtol=2**-9, rms=2**-9), dresidual=dict(rtol=2**-8, rms=2**-8))
pre.cases(make=pre_inputs, match=CLOSE, smoke=SMOKE, full=FULL, bench=BENCH)
pre_bwd.cases(make=_make_bwd, match=PRE_BWD, smoke=SMOKE, full=FULL_BWD, bench=BENCH[1:])
