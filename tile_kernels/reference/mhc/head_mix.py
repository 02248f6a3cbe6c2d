"""Twins of `mhc.head_mix`."""

from torch import Tensor


def head_mix(mixes: Tensor, scale: Tensor, base: Tensor, pre_eps: float = 1e-6) -> Tensor:
    """The weights of the streams in the output of a model."""
    return (mixes * scale + base).sigmoid() + pre_eps


def head_mix_bwd(dmix: Tensor, mixes: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `head_mix`."""
    s = (mixes * scale + base).sigmoid()
    dz = dmix * s * (1 - s)
    return dz * scale, (dz * mixes).sum().reshape(1), dz.reshape(-1, base.shape[0]).sum(0)


def head_mix_bwd_parts(
    dmix: Tensor, mixes: Tensor, scale: Tensor, base: Tensor, num_parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of mixes, and parts that sum to the gradients of scale and base. Here the first part is the sum."""
    dmixes, dscale, dbase = head_mix_bwd(dmix, mixes, scale, base)
    scale_parts, base_parts = scale.new_zeros(num_parts, 1), base.new_zeros(num_parts, base.shape[0])
    scale_parts[0], base_parts[0] = dscale, dbase
    return dmixes, scale_parts, base_parts


def mhc_head_compute_mix_ref(input_mix: Tensor, mhc_scale: Tensor, mhc_base: Tensor, mhc_pre_eps: float) -> Tensor:
    """The weights of the streams in the output of a model, computed in float64."""
    mix = head_mix(input_mix.double(), mhc_scale.double(), mhc_base.double(), mhc_pre_eps)
    return mix.to(input_mix.dtype)
