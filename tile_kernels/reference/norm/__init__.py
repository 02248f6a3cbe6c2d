"""What the ops of `tile_kernels.norm` mean, in plain PyTorch."""

from tile_kernels.reference.norm.add_norm_forward import add_norm_backward, add_norm_forward
from tile_kernels.reference.norm.norm_backward import norm_backward, norm_backward_, norm_backward_ref
from tile_kernels.reference.norm.norm_forward import norm_forward, norm_forward_, norm_forward_ref
from tile_kernels.reference.norm.norm_forward_and_per_token_cast import (
    norm_forward_and_per_token_cast,
    norm_forward_and_per_token_cast_,
)

__all__ = [name for name in dir() if not name.startswith('_')]
