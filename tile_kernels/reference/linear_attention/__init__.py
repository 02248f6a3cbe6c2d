"""Linear attention in plain PyTorch: sequential recurrences in float32."""

from tile_kernels.reference.linear_attention.causal_conv1d import causal_conv1d, causal_conv1d_bwd
from tile_kernels.reference.linear_attention.causal_conv1d_update import causal_conv1d_update
from tile_kernels.reference.linear_attention.chunk_gla import chunk_gla, chunk_gla_bwd
from tile_kernels.reference.linear_attention.chunk_simple_gla import chunk_simple_gla, chunk_simple_gla_bwd
from tile_kernels.reference.linear_attention.fused_recurrent_gla import fused_recurrent_gla

__all__ = [
    'causal_conv1d',
    'causal_conv1d_bwd',
    'causal_conv1d_update',
    'chunk_gla',
    'chunk_gla_bwd',
    'chunk_simple_gla',
    'chunk_simple_gla_bwd',
    'fused_recurrent_gla',
]


def __dir__() -> list[str]:
    return __all__
