"""Linear attention in plain PyTorch: sequential recurrences in float32."""

from tile_kernels.reference.linear_attention.chunk_simple_gla import chunk_simple_gla, chunk_simple_gla_bwd
from tile_kernels.reference.linear_attention.fused_recurrent_gla import fused_recurrent_gla

__all__ = [
    'chunk_simple_gla',
    'chunk_simple_gla_bwd',
    'fused_recurrent_gla',
]


def __dir__() -> list[str]:
    return __all__
