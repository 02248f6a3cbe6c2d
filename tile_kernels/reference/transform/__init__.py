"""What rotary position embedding means, in plain PyTorch: float32, one rounding at the end."""

from tile_kernels.reference.transform.apply_rotary import apply_rotary
from tile_kernels.reference.transform.rotary_embedding import (
    rotary_embedding,
    rotary_embedding_bwd,
    rotary_embedding_ref,
)

__all__ = ['apply_rotary', 'rotary_embedding', 'rotary_embedding_bwd', 'rotary_embedding_ref']
