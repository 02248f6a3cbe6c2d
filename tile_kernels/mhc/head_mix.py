"""Head mix: the shares of the streams in the output of a model.

    mix[t, c] = sigmoid(mixes[t, c] scale + base[c]) + pre_eps

That is the first part of `split_mixes`, by its kernels. Latency bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.mhc._rows import flat, lead_of
from tile_kernels.mhc.split_mixes import (
    BENCH,
    CLOSE,
    F32,
    FULL,
    PARTS,
    SMOKE,
    SUMMED,
    check_mixes,
    split_mixes_bwd_kernel,
    split_mixes_kernel,
    sum_parts_kernel,
)


@op()
def head_mix_bwd_parts_(
    dmix: Tensor, mixes: Tensor, scale: Tensor, base: Tensor, dmixes: Out, scale_parts: Out, base_parts: Out
) -> None:
    """Gradient of mixes of `head_mix`, and parts that sum to those of scale and base.

    Args:
        dmix: (..., num_streams) float32, contiguous.
        mixes: as given to `head_mix`.
        scale: as given to `head_mix`.
        base: as given to `head_mix`.
        dmixes: shape of mixes; overwritten.
        scale_parts: (num_parts, 1) float32, contiguous; overwritten.
        base_parts: (num_parts, num_streams) float32, contiguous; overwritten.
    """
    num_streams = mixes.shape[-1] if mixes.dim() else 0
    lead = check_mixes(mixes, scale, base, num_streams, head=True)
    for name, x in (('dmix', dmix), ('dmixes', dmixes)):
        lead_of(x, name, 'num_streams', F32, lead, num_streams=num_streams)
    (num_parts,) = lead_of(scale_parts, 'scale_parts', 'one', F32, one=1)
    check.at_least(num_parts, 1, 'the rows of scale_parts')
    lead_of(base_parts, 'base_parts', 'num_streams', F32, (num_parts,), num_streams=num_streams)
    check.same_device(mixes=mixes, dmix=dmix, dmixes=dmixes, scale_parts=scale_parts, base_parts=base_parts)
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
    dmixes, dscale, dbase = torch.empty_like(mixes), torch.empty_like(scale), torch.empty_like(base)
    scale_parts, base_parts = mixes.new_empty(PARTS, 1), mixes.new_empty(PARTS, base.shape[0])
    head_mix_bwd_parts_.fn(dmix, mixes, scale, base, dmixes, scale_parts, base_parts)
    launch(sum_parts_kernel, (1, base.shape[0]), scale_parts, base_parts, dscale, dbase)
    return dmixes, dscale, dbase


@op()
def head_mix_(mixes: Tensor, scale: Tensor, base: Tensor, mix: Out, pre_eps: float = 1e-6) -> None:
    """`head_mix` into memory of the caller.

    Args:
        mixes: (..., num_streams) float32, contiguous.
        scale: (1,) float32.
        base: (num_streams,) float32.
        mix: shape of mixes; overwritten.
        pre_eps: added to the result.
    """
    num_streams = mixes.shape[-1] if mixes.dim() else 0
    lead = check_mixes(mixes, scale, base, num_streams, head=True)
    lead_of(mix, 'mix', 'num_streams', F32, lead, num_streams=num_streams)
    check.same_device(mixes=mixes, mix=mix)
    mixes_flat, mix_flat = flat(mixes, lead, num_streams), flat(mix, lead, num_streams)
    launch(split_mixes_kernel, (num_streams, True), mixes_flat, scale, base, mix_flat, None, None, pre_eps, 0.0)


@op(outputs='mix', backward=head_mix_bwd)
def head_mix(mixes: Tensor, scale: Tensor, base: Tensor, pre_eps: float = 1e-6) -> Tensor:
    """The shares of the streams in the output of a model; differentiable in mixes, scale and base.

    Args:
        mixes: (..., num_streams) float32, contiguous; 2, 4 or 8 streams.
        scale: (1,) float32.
        base: (num_streams,) float32.
        pre_eps: added to the result.

    Returns:
        sigmoid(mixes scale + base) + pre_eps, shape of mixes.
    """
    mix = torch.empty_like(mixes)
    head_mix_.fn(mixes, scale, base, mix, pre_eps)
    return mix


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, num_streams: int) -> dict:
    return dict(mixes=torch.randn(*lead, num_streams), scale=torch.rand(1) + 0.5, base=torch.randn(num_streams))


def _make_(lead: tuple, num_streams: int) -> dict:
    return _make(lead, num_streams) | dict(mix=torch.empty(*lead, num_streams))


def _make_bwd(lead: tuple, num_streams: int) -> dict:
    return dict(dmix=torch.randn(*lead, num_streams)) | _make(lead, num_streams)


def _make_bwd_parts(lead: tuple, num_streams: int) -> dict:
    made = _make_bwd(lead, num_streams)
    parts = dict(scale_parts=torch.empty(1, 1), base_parts=torch.empty(1, num_streams))
    return made | dict(dmixes=torch.empty_like(made['mixes'])) | parts


head_mix.cases(make=_make, match=CLOSE, smoke=SMOKE, full=FULL, bench=BENCH)
head_mix_.cases(make=_make_, match=CLOSE, smoke=SMOKE[:1] + SMOKE[-1:], bench=BENCH[:1])
head_mix_bwd.cases(make=_make_bwd, match=SUMMED, smoke=SMOKE, full=FULL[:-1], bench=BENCH)
head_mix_bwd_parts_.cases(make=_make_bwd_parts, match=SUMMED, smoke=SMOKE[:1] + SMOKE[-1:], bench=BENCH[:1])
