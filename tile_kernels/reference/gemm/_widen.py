"""Codes and scale factors as numbers."""

from torch import Tensor


def widen(codes: Tensor, sf: Tensor, rows: int) -> Tensor:
    """Codes times their factors, which stand for blocks of `rows` x 128."""
    sf = sf.repeat_interleave(rows, dim=-2)[..., : codes.shape[-2], :]
    return codes.float() * sf.repeat_interleave(128, dim=-1)[..., : codes.shape[-1]]
