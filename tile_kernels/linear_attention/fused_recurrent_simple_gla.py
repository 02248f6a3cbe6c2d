"""One or a few tokens of linear attention with one decay for each token and head, for decoding."""

from typing import Any

from torch import Tensor

from tile_kernels.core import check
from tile_kernels.linear_attention._checks import check_gate, refuse, single
from tile_kernels.linear_attention.fused_recurrent_gla import recur


def fused_recurrent_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """A few tokens of linear attention with one decay for each token and head; no gradient. Takes the calls of fla.

    Args:
        q: (batch, tokens, heads, dim), as in `fused_recurrent_gla`, as all that is not said here.
        k: as there.
        v: as there.
        g: (batch, tokens, value_heads) logarithms of the decay, at most 0, of any floating dtype.
        g_gamma: (value_heads,) logarithms of a decay that is the same for all tokens, instead of g.
        scale: as there.
        initial_state: as there.
        output_final_state: as there.
        reverse: accepted if False.
        cu_seqlens: as there.
        state_v_first: as there.
        state_indices: as there.
        intermediate_states: as there.
        foreign: arguments of fla that have no meaning here, at their neutral value.

    Returns:
        o and the final state, as there.
    """
    refuse(dict(foreign, reverse=reverse))
    check.shape(v, 'v', 'batch tokens heads dim')
    g, g_gamma = single(g, 'g'), single(g_gamma, 'g_gamma')
    if g_gamma is not None:
        if g is not None:
            check.fail('g_gamma', 'must not come with g', check.describe(g_gamma))
        check_gate(g_gamma, 'g_gamma', 'heads', v, heads=v.shape[2])
        g = g_gamma.expand(v.shape[:3])
    elif g is not None:
        check.shape(g, 'g', 'batch tokens heads')
    states = (initial_state, output_final_state, state_v_first, state_indices, intermediate_states)
    return recur(q, k, v, g, scale, *states, cu_seqlens)
