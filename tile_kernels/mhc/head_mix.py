"""Head mix: the weights of the streams in the output of a model.

    mix[t, c] = sigmoid(mixes[t, c] scale + base[c]) + pre_eps

This is the first part of `split_mixes`, by its kernels. Latency bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op
from tile_kernels.mhc._checks import F32, check_first_extent, flat, lead_of
from tile_kernels.mhc.split_mixes import (
    BENCH,
    CLOSE,
    FULL,
    PARTS,
    SMOKE,
    SUMMED,
    check_mixes,
    split_mixes_bwd_kernel,
    split_mixes_kernel,
    sum_parts_kernel,
)


@op(outputs='dmixes scale_parts base_parts', out=True)
def head_mix_bwd_parts(
    dmix: Tensor, mixes: Tensor, scale: Tensor, base: Tensor, num_parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of mixes of `head_mix`, and parts that sum to those of scale and base.

    Args:
        dmix: (..., num_streams) float32, contiguous.
        mixes: as given to `head_mix`.
        scale: as given to `head_mix`.
        base: as given to `head_mix`.
        num_parts: number of blocks, which sum over tokens.

    Returns:
        Gradient of mixes in its shape, scale_parts (num_parts, 1) and base_parts (num_parts, num_streams), float32.
    """
    num_streams = mixes.shape[-1] if mixes.dim() else 0
    lead = check_mixes(mixes, scale, base, num_streams, head=True)
    lead_of(dmix, 'dmix', 'num_streams', F32, lead, num_streams=num_streams)
    check.same_device(mixes=mixes, dmix=dmix)
    check.at_least(num_parts, 1, 'num_parts')
    dmixes = empty('dmixes', mixes.shape, F32, mixes.device)
    scale_parts = empty('scale_parts', (num_parts, 1), F32, mixes.device)
    base_parts = empty('base_parts', (num_parts, num_streams), F32, mixes.device)
    launch(
        split_mixes_bwd_kernel,
        (num_streams, True),
        scale_parts,
        base_parts,
        flat(dmix, lead, num_streams),
        None,
        None,
        flat(mixes, lead, num_streams),
        scale,
        base,
        flat(dmixes, lead, num_streams),
        0.0,
    )
    return dmixes, scale_parts, base_parts


@op(outputs='dmixes dscale dbase')
def head_mix_bwd(dmix: Tensor, mixes: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `head_mix`.

    Args:
        dmix: (..., num_streams) float32, contiguous.
        mixes: as given to `head_mix`.
        scale: as given to `head_mix`.
        base: as given to `head_mix`.

    Returns:
        Gradients of mixes, scale and base, float32; deterministic.
    """
    dmixes, scale_parts, base_parts = head_mix_bwd_parts.fn(dmix, mixes, scale, base, PARTS)
    dscale, dbase = torch.empty_like(scale), torch.empty_like(base)
    launch(sum_parts_kernel, (1, base.shape[0]), scale_parts, base_parts, dscale, dbase)
    return dmixes, dscale, dbase


@op(outputs='mix', backward=head_mix_bwd, out=True)
def head_mix(mixes: Tensor, scale: Tensor, base: Tensor, pre_eps: float = 1e-6) -> Tensor:
    """The weights of the streams in the output of a model; differentiable in mixes, scale and base.

    Args:
        mixes: (..., num_streams) float32, contiguous; 2, 4 or 8 streams.
        scale: (1,) float32.
        base: (num_streams,) float32.
        pre_eps: added to the result.

    Returns:
        sigmoid(mixes scale + base) + pre_eps, shape of mixes.
    """
    num_streams = mixes.shape[-1] if mixes.dim() else 0
    lead = check_mixes(mixes, scale, base, num_streams, head=True)
    mix = empty('mix', mixes.shape, F32, mixes.device)
    mixes_flat, mix_flat = flat(mixes, lead, num_streams), flat(mix, lead, num_streams)
    launch(split_mixes_kernel, (num_streams, True), mixes_flat, scale, base, mix_flat, None, None, pre_eps, 0.0)
    return mix


def mhc_head_compute_mix_fwd(
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    output_mix: Tensor,
    mhc_pre_eps: float,
    token_block_size: int = 0,
) -> None:
    """Write sigmoid(input_mix * mhc_scale + mhc_base) + mhc_pre_eps into output_mix, all (..., n) float32.

    `token_block_size` has no effect: results do not depend on the number of tokens of a block.
    """
    head_mix.out(input_mix, mhc_scale, mhc_base, mhc_pre_eps, mix=output_mix)


def mhc_head_compute_mix_bwd(
    output_mix_grad: Tensor,
    input_mix: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    input_mix_grad: Tensor,
    scale_grad_partial: Tensor,
    base_grad_partial: Tensor,
    num_sms: int,
    token_block_size: int = 0,
) -> None:
    """Write the gradient of input_mix, and num_sms rows whose sums are the gradients of scale and base.

    `token_block_size` has no effect.
    """
    check_first_extent(scale_grad_partial, 'scale_grad_partial', num_sms)
    outputs = dict(dmixes=input_mix_grad, scale_parts=scale_grad_partial, base_parts=base_grad_partial)
    head_mix_bwd_parts.out(output_mix_grad, input_mix, mhc_scale, mhc_base, num_sms, **outputs)


# Cases -------------------------------------------------------------------------------------


def _make(lead: tuple, num_streams: int) -> dict:
    return dict(mixes=torch.randn(*lead, num_streams), scale=torch.rand(1) + 0.5, base=torch.randn(num_streams))


def _make_bwd(lead: tuple, num_streams: int) -> dict:
    return dict(dmix=torch.randn(*lead, num_streams)) | _make(lead, num_streams)


def _make_bwd_parts(lead: tuple, num_streams: int) -> dict:
    return _make_bwd(lead, num_streams) | dict(num_parts=1)


head_mix.cases(make=_make, match=CLOSE, smoke=SMOKE, full=FULL, bench=BENCH)
head_mix_bwd.cases(make=_make_bwd, match=SUMMED, smoke=SMOKE, full=FULL[:-1], bench=BENCH)
head_mix_bwd_parts.cases(make=_make_bwd_parts, match=SUMMED, smoke=SMOKE[:1] + SMOKE[-1:], bench=BENCH[:1])
