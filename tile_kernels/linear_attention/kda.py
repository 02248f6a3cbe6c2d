"""Kimi delta attention: the delta rule with a decay for every channel of k, under the names and arguments of fla."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.linear_attention._checks import refuse
from tile_kernels.linear_attention.delta_rule import beta_form, prepare_gate, run_chunked
from tile_kernels.linear_attention.delta_states import delta_states, states_of_chunks
from tile_kernels.linear_attention.fused_recurrent import check_gate_options, run_front
from tile_kernels.linear_attention.gate import LEAST_BOUND


def _bound(use_gate: bool, safe_gate: bool, lower_bound: float | None) -> float:
    """The bound of the gate; 0 is none."""
    if lower_bound is None:
        return LEAST_BOUND if use_gate and safe_gate else 0.0
    check.number(lower_bound, 'lower_bound')
    if not use_gate:
        check.fail('lower_bound', 'must come with use_gate_in_kernel', 'no use_gate_in_kernel')
    if not LEAST_BOUND <= lower_bound < 0:
        check.fail('lower_bound', f'must be at least {LEAST_BOUND} and below 0', str(lower_bound))
    return lower_bound


def _check_g(g: Tensor) -> None:
    if check.tensor(g, 'g').dim() != 4:
        check.fail('g', 'must be (batch, tokens, heads, dim)', check.describe(g))


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    *,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_size: int | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Kimi delta attention, differentiable in all tensors and the initial state; takes the calls of fla.

    Args:
        q: as in `chunk_gated_delta_rule`, as all that is not said here.
        k: as there.
        v: as there.
        g: (batch, tokens, value_heads, dim), logarithms of decays, or inputs of the gate.
        beta: as there.
        scale: as there.
        initial_state: as there.
        output_final_state: as there.
        use_qk_l2norm_in_kernel: as there.
        use_gate_in_kernel: as there; with a bound, the gate is lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
        use_beta_sigmoid_in_kernel: as there.
        allow_neg_eigval: as there.
        safe_gate: bound the gate, by -5 unless `lower_bound` is given. No gate overflows in any case.
        lower_bound: the bound, at least -5 and below 0.
        return_intermediate_states: also return the state before every chunk, without gradient.
        state_v_first: as there.
        cu_seqlens: as there.
        chunk_size: as there.
        A_log: (value_heads,).
        dt_bias: (value_heads * dim,).
        foreign: arguments of fla that have no meaning here, at their neutral value.

    Returns:
        What `chunk_gated_delta_rule` returns; with intermediate states also (batch, chunks, value_heads, dim,
        value_dim) of the dtype of q. Chunks of packed sequences follow one another, and zeros follow the last.
    """
    refuse(foreign)
    _check_g(g)
    bound = _bound(use_gate_in_kernel, safe_gate, lower_bound)
    form = beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    given = (q, k, v, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel)
    gates = prepare_gate(g, use_gate_in_kernel, A_log, dt_bias, bound)
    o, final, saved = run_chunked(*given, form, state_v_first, cu_seqlens, chunk_size, gates)
    if not return_intermediate_states:
        return o, final
    with torch.no_grad():
        h, chunk = delta_states(**saved), saved['inverse'].shape[-1]
        states = states_of_chunks(h, q.shape[0], q.shape[1], chunk, saved['cu_seqlens'], state_v_first)
    return o, final, states


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    *,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi delta attention for a few tokens; an input that requires a gradient is an error.

    Args:
        q: as in `chunk_kda`, as all that is not said here.
        k: as there.
        v: as there.
        g: as there.
        beta: as there.
        scale: as there.
        initial_state: as in `fused_recurrent_gated_delta_rule`.
        output_final_state: as there.
        use_qk_l2norm_in_kernel: as there.
        use_gate_in_kernel: as there.
        use_beta_sigmoid_in_kernel: as there.
        allow_neg_eigval: as there.
        safe_gate: as there.
        lower_bound: as there.
        state_v_first: as there.
        cu_seqlens: as there.
        A_log: as there.
        dt_bias: as there.
        state_indices: as in `fused_recurrent_gated_delta_rule`.
        intermediate_states: as there.
        foreign: as there.

    Returns:
        o like v, and the final state or None.
    """
    refuse(foreign)
    check_gate_options(use_gate_in_kernel, A_log, dt_bias)
    _check_g(g)
    bound = _bound(use_gate_in_kernel, safe_gate, lower_bound)
    form = beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    given = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, form, state_v_first)
    return run_front(*given, cu_seqlens, state_indices, A_log, dt_bias, bound, intermediate_states)
