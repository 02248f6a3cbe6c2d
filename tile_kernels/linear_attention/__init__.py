"""Linear attention: recurrences of a state per head, in chunks for training and one token at a time for decoding.

Nothing of this family has run on a GPU yet: kernels are checked in the interpreter, lowered and compiled.
"""

from tile_kernels.linear_attention.chunk_linear_attn import chunk_linear_attn
from tile_kernels.linear_attention.chunk_retention import chunk_retention
from tile_kernels.linear_attention.chunk_simple_gla import chunk_simple_gla, chunk_simple_gla_bwd
from tile_kernels.linear_attention.fused_recurrent_gla import fused_recurrent_gla
from tile_kernels.linear_attention.fused_recurrent_simple_gla import fused_recurrent_simple_gla

__all__ = [
    'chunk_linear_attn',
    'chunk_retention',
    'chunk_simple_gla',
    'chunk_simple_gla_bwd',
    'fused_recurrent_gla',
    'fused_recurrent_simple_gla',
]


def __dir__() -> list[str]:
    return __all__
