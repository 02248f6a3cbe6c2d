"""What the sum over a Sinkhorn step means, in plain PyTorch."""

from torch import Tensor


def engram_sinkhorn_step_reduce(col_sumsq_partial: Tensor, col_sumsq: Tensor) -> None:
    """Add up the partial sums of a step."""
    col_sumsq.copy_(col_sumsq_partial.sum(0))
