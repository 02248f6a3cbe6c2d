"""Linear attention: recurrences of a state per head, in chunks for training and one token at a time for decoding.

Nothing of this family has run on a GPU yet: kernels are checked in the interpreter, lowered and compiled.
"""

from tile_kernels.linear_attention.chunk_simple_gla import chunk_simple_gla, chunk_simple_gla_bwd

__all__ = [
    'chunk_simple_gla',
    'chunk_simple_gla_bwd',
]


def __dir__() -> list[str]:
    return __all__
