"""Linear attention: recurrences of a state per head, in chunks for training and one token at a time for decoding.

Nothing of this family has run on a GPU yet: kernels are checked in the interpreter, lowered and compiled.
"""

from tile_kernels.linear_attention.causal_conv1d import causal_conv1d, causal_conv1d_bwd
from tile_kernels.linear_attention.causal_conv1d_update import causal_conv1d_update

__all__ = [
    'causal_conv1d',
    'causal_conv1d_bwd',
    'causal_conv1d_update',
]


def __dir__() -> list[str]:
    return __all__
