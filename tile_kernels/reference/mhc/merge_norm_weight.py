"""Twins of `mhc.merge_norm_weight`."""

from torch import Tensor


def merge_norm_weight(fn: Tensor, norm_weight: Tensor) -> Tensor:
    """Multiply the columns of a projection by the weight of the norm before it."""
    return fn * norm_weight


def merge_norm_weight_bwd(dy: Tensor, fn: Tensor, norm_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `merge_norm_weight`."""
    return dy * norm_weight, (dy * fn).sum(0)


def merge_norm_weight_bwd_(dy: Tensor, fn: Tensor, norm_weight: Tensor, dfn: Tensor, dnorm_weight: Tensor) -> None:
    """Gradients of `merge_norm_weight`, added to dfn and dnorm_weight."""
    dfn.add_(dy * norm_weight)
    dnorm_weight.add_((dy * fn).sum(0))
