"""RMS norm and its gradients, alone and with a per-token cast."""

from tile_kernels.norm.norm_backward import norm_backward
from tile_kernels.norm.norm_forward import norm_forward
from tile_kernels.norm.norm_forward_and_per_token_cast import norm_forward_and_per_token_cast

__all__ = [
    'norm_backward',
    'norm_forward',
    'norm_forward_and_per_token_cast',
]


def __dir__() -> list[str]:
    return __all__
