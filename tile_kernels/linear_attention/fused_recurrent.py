"""The delta rule token by token under the names and arguments of fla."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.linear_attention._checks import dense, lengths_int32, refuse, refuse_gradient, scale_of
from tile_kernels.linear_attention.delta_rule import beta_form
from tile_kernels.linear_attention.recurrent_delta import recurrent_delta
from tile_kernels.linear_attention.recurrent_delta_pool import recurrent_delta_pool


def check_gate_options(use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None) -> None:
    """The parameters of the gate come with its option."""
    if use_gate:
        check.tensor(A_log, 'A_log')
    elif A_log is not None or dt_bias is not None:
        check.fail('A_log and dt_bias', 'must come with use_gate_in_kernel', 'no use_gate_in_kernel')


def run_front(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    normalize: bool,
    form: int,
    v_first: bool,
    cu_seqlens: Tensor | None,
    state_indices: Tensor | None,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    bound: float,
    intermediate_states: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """What the public functions share."""
    small = dict(g=g, beta=beta, A_log=a_log, dt_bias=dt_bias)
    refuse_gradient(q=q, k=k, v=v, **small, initial_state=initial_state, intermediate_states=intermediate_states)
    q, k, v = autocast(check.tensor(q, 'q'), check.tensor(k, 'k'), check.tensor(v, 'v'))
    a_log, dt_bias = (None if x is None else x.float().flatten().contiguous() for x in (a_log, dt_bias))
    g, beta = check.tensor(g, 'g').contiguous(), check.tensor(beta, 'beta')
    if beta.dtype != g.dtype or g.dtype is torch.float64:
        g, beta = g.float(), beta.float()
    starts = lengths_int32(cu_seqlens, 'cu_seqlens')
    options: dict[str, Any] = dict(
        scale=scale_of(scale, q.shape[-1]), form=form, normalize=normalize, lower_bound=bound
    )
    options |= dict(q=q, k=k, v=v, g=g, beta=beta.contiguous(), a_log=a_log, dt_bias=dt_bias)
    options |= dict(cu_seqlens=starts, v_first=v_first, intermediate_states=intermediate_states)
    if state_indices is None:
        options |= dict(initial_state=dense(initial_state), output_final_state=output_final_state)
        o, final_state = recurrent_delta(**options)
        return o, final_state if output_final_state else None
    pool = check.tensor(initial_state, 'initial_state')
    options |= dict(pool=pool, state_indices=lengths_int32(state_indices, 'state_indices'))
    o = recurrent_delta_pool(**options)
    return o, pool if output_final_state else None


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule for a few tokens; an input that requires a gradient is an error.

    Args:
        q: as in `chunk_gated_delta_rule`, as all that is not said here.
        k: as there.
        v: as there.
        g: as there.
        beta: as there.
        scale: as there.
        initial_state: as there; with `state_indices` a pool (states, value_heads, dim, value_dim), float32 or bfloat16,
            that is read and written in place.
        output_final_state: as there; with `state_indices` the pool is returned.
        use_qk_l2norm_in_kernel: as there.
        use_beta_sigmoid_in_kernel: as there.
        allow_neg_eigval: as there.
        state_v_first: as there.
        cu_seqlens: as there.
        use_gate_in_kernel: as there.
        A_log: as there.
        dt_bias: as there.
        state_indices: (sequences,) int32 or int64, the state of every sequence; -1 skips a sequence, whose o is 0.
        intermediate_states: (batch, tokens, value_heads, dim, value_dim) float32 or bfloat16: the state after every
            token is written to it, but for sequences that are skipped. With `state_v_first` the last two are swapped.
        foreign: arguments of fla that have no meaning here, at their neutral value.

    Returns:
        o like v, and the final state or None.
    """
    refuse(foreign)
    check_gate_options(use_gate_in_kernel, A_log, dt_bias)
    if check.tensor(g, 'g').dim() != 3:
        check.fail('g', 'must be (batch, tokens, heads)', check.describe(g))
    form = beta_form(use_beta_sigmoid_in_kernel, allow_neg_eigval)
    given = (q, k, v, g, beta, scale, initial_state, output_final_state, use_qk_l2norm_in_kernel, form, state_v_first)
    return run_front(*given, cu_seqlens, state_indices, A_log, dt_bias, 0.0, intermediate_states)
