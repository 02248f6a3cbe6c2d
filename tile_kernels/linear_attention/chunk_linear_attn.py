"""Linear attention without a gate, and its division by the sum of the weights."""

from typing import Any

from torch import Tensor

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
        normalize: divide o by scale * q . (sum of the keys so far), without those of the initial state. The sum is that
            of the same kernel for values of 1.
        cu_seqlens: as there.
        state_v_first: as there.
        foreign: as there, and chunk_size.

    Returns:
        o (batch, tokens, heads, value_dim), and the final state in float32 or None.
    """
    options: dict[str, Any] = dict(scale=scale, cu_seqlens=cu_seqlens, **foreign)
    o, final = chunk_simple_gla(
        q,
        k,
        v,
        initial_state=initial_state,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        **options,
    )
    if normalize:
        ones = v.new_ones(*v.shape[:-1], COLUMNS)
        total = chunk_simple_gla(q, k, ones, **options)[0][..., :1]
        o = (o.float() / (total.float() + EPSILON)).to(o.dtype)
    return o, final
