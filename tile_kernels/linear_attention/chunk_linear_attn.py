"""Linear attention without a gate, and its division by the sum of the weights."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.linear_attention._checks import MAX_DIM, check_dim
from tile_kernels.linear_attention.chunk_simple_gla import chunk_simple_gla

#: Keeps the division finite where all weights are 0.
EPSILON = 1e-10
#: The least number of columns of values.
COLUMNS = 16


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool = False,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention without a gate, differentiable in all tensors; takes the calls of fla.

    Args:
        q: (batch, tokens, heads, dim), as in `chunk_simple_gla`, as all that is not said here.
        k: as there.
        v: as there.
        scale: as there.
        initial_state: as there.
        output_final_state: as there.
        normalize: divide o by scale * q . (sum of the keys so far), without those of the initial state. The sum comes
            from the same kernel, for values of about 1.
        cu_seqlens: as there.
        state_v_first: as there.
        foreign: as there, and chunk_size.

    Returns:
        o (batch, tokens, heads, value_dim), and the final state in float32 or None.
    """
    options: dict[str, Any] = dict(scale=scale, cu_seqlens=cu_seqlens, **foreign)
    stateful: dict[str, Any] = dict(
        initial_state=initial_state, output_final_state=output_final_state, state_v_first=state_v_first
    )
    if not normalize:
        return chunk_simple_gla(q, k, v, **stateful, **options)
    *_, value_dim = check.shape(v, 'v', 'batch tokens heads dim')
    check_dim(value_dim, 'the last extent of v')
    factors = 1 + torch.arange(COLUMNS, device=v.device) / COLUMNS  # exact; a mean of unlike multiples rounds less
    ones = factors.to(v.dtype).expand(*v.shape[:-1], COLUMNS).contiguous()
    if value_dim + COLUMNS > MAX_DIM:
        o, final = chunk_simple_gla(q, k, v, **stateful, **options)
        total = chunk_simple_gla(q, k, ones, **options)[0]
    else:  # one product: gradients of o and its divisor nearly cancel, so they must not be rounded apart
        stateful['initial_state'] = _widened(initial_state, value_dim, state_v_first)
        both, final = chunk_simple_gla(q, k, torch.cat((v, ones), -1), **stateful, **options)
        o, total = both.split((value_dim, COLUMNS), -1)
        final = None if final is None else final.narrow(-2 if state_v_first else -1, 0, value_dim).contiguous()
    mean = total.float().sum(-1, keepdim=True) / factors.sum()
    return (o.float() / (mean + EPSILON)).to(o.dtype), final


def _widened(state: Tensor | None, value_dim: int, v_first: bool) -> Tensor | None:
    """A state with columns of 0 for the values of 1."""
    if state is None:
        return None
    last = 'value_dim dim' if v_first else 'dim value_dim'
    check.shape(state, 'initial_state', f'sequences heads {last}', value_dim=value_dim)
    return torch.nn.functional.pad(state, (0, 0, 0, COLUMNS) if v_first else (0, COLUMNS))
