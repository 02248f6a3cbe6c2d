"""Retention: linear attention whose heads decay by fixed factors, 1 - 2^(-5 - h) for head h."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.linear_attention.chunk_simple_gla import chunk_simple_gla


def retention_gates(heads: int, device: torch.device | str | None = None) -> Tensor:
    """(heads,) float32 logarithms of the decay of every head."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(heads, dtype=torch.float32, device=device)))


def chunk_retention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """Retention, differentiable in all tensors; takes the calls of fla.

    Args:
        q: (batch, tokens, heads, dim), as in `chunk_simple_gla`, as all that is not said here.
        k: as there.
        v: as there.
        scale: as there.
        initial_state: as there.
        output_final_state: as there.
        state_v_first: as there.
        cu_seqlens: as there.
        foreign: as there, and chunk_size.

    Returns:
        o (batch, tokens, heads, value_dim), and the final state in float32 or None.
    """
    heads = check.shape(v, 'v', 'batch tokens heads dim')[2]
    gates = retention_gates(heads, v.device)
    return chunk_simple_gla(
        q, k, v, None, gates, scale, initial_state, output_final_state, state_v_first, cu_seqlens, **foreign
    )
