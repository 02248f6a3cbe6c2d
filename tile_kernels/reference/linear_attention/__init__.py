"""Linear attention in plain PyTorch: sequential recurrences in float32."""

from tile_kernels.reference.linear_attention.causal_conv1d import causal_conv1d, causal_conv1d_bwd
from tile_kernels.reference.linear_attention.causal_conv1d_update import causal_conv1d_update

__all__ = [
    'causal_conv1d',
    'causal_conv1d_bwd',
    'causal_conv1d_update',
]


def __dir__() -> list[str]:
    return __all__
