"""Twins of `mhc.expand`."""

from torch import Tensor

from tile_kernels.reference.mhc._common import sum_streams


def expand(x: Tensor, num_streams: int = 4) -> Tensor:
    """Copy the hidden states of every token into all of its residual streams."""
    return x.float().unsqueeze(-2).expand(*x.shape[:-1], num_streams, x.shape[-1]).to(x.dtype)


def expand_bwd(dy: Tensor) -> Tensor:
    """The sum over streams."""
    return sum_streams(dy.float().unbind(-2)).to(dy.dtype)


def expand_to_mhc_ref(hidden: Tensor, mhc_mult: int) -> Tensor:
    """Copy hidden states into all streams."""
    return expand(hidden, mhc_mult)
