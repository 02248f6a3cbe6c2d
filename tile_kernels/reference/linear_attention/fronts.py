"""Twins of the public functions of linear attention, whose arguments are those of fla and mamba_ssm.

One sequential recurrence in float64 serves all of them. Gradients are those of PyTorch's autograd. Arguments that
change rounding only, such as `chunk_size`, are ignored.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tile_kernels.reference.linear_attention.causal_conv1d import causal_conv1d as causal_conv1d_twin
from tile_kernels.reference.linear_attention.causal_conv1d import sequences_of

LEAST_BOUND, EPSILON = -5.0, 1e-10


def _recurrence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    state_indices: Tensor | None = None,
    intermediate_states: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The rule of the module; without beta the state only decays and grows, with beta it forgets as well."""
    group = v.shape[2] // max(q.shape[2], 1)
    q, k = (x.double().repeat_interleave(group, 2) for x in (q, k))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    decay = None if g is None else g.double().exp()
    decay = decay.unsqueeze(-1) if decay is not None and decay.dim() == 3 else decay
    o = v.double() * 0.0  # 0 behind the last sequence, with gradients of 0
    rows, finals = list(o.flatten(0, 1)), []
    for n, (b, tokens) in enumerate(sequences_of(cu_seqlens, v)):
        slot = n if state_indices is None else int(state_indices[n])
        if slot < 0:
            continue
        state = v.new_zeros(v.shape[2], q.shape[3], v.shape[3], dtype=torch.float64)
        if initial_state is not None:
            state = (initial_state[slot].mT if state_v_first else initial_state[slot]).double()
        for t in range(tokens.start, tokens.stop):
            state = state if decay is None else decay[b, t][:, :, None] * state
            new = v[b, t].double()
            if beta is not None:
                new = beta[b, t].double()[:, None] * (new - torch.einsum('hkv,hk->hv', state, k[b, t]))
            state = state + k[b, t][:, :, None] * new[:, None, :]
            rows[b * v.shape[1] + t] = scale * torch.einsum('hkv,hk->hv', state, q[b, t])
            if intermediate_states is not None:
                intermediate_states[b, t] = (state.mT if state_v_first else state).to(intermediate_states.dtype)
        if state_indices is not None and initial_state is not None:
            initial_state[slot] = (state.mT if state_v_first else state).to(initial_state.dtype)
        finals.append(state.mT if state_v_first else state)
    o = torch.stack(rows).view(v.shape).to(v.dtype) if rows else v.clone()
    if not output_final_state:
        return o, None
    if state_indices is not None:
        return o, initial_state
    return o, torch.stack(finals).float() if finals else v.new_zeros(0, *_state_shape(q, v, state_v_first)).float()


def _state_shape(q: Tensor, v: Tensor, v_first: bool) -> tuple[int, int, int]:
    last = (v.shape[3], q.shape[3]) if v_first else (q.shape[3], v.shape[3])
    return (v.shape[2], *last)


def _normalized(x: Tensor, normalize: bool) -> Tensor:
    return x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt() if normalize else x


def _gate(g: Tensor, use_gate: bool, A_log: Tensor | None, dt_bias: Tensor | None, bound: float) -> Tensor:
    """Logarithms of decays, from the inputs of the gate if it is used."""
    if not use_gate or A_log is None:
        return g
    rate = A_log.double().flatten().exp()
    x = g.double() if dt_bias is None else g.double() + dt_bias.double().view(g.shape[2:])
    rate = rate[:, None] if g.dim() == 4 else rate
    return bound * torch.sigmoid(rate * x) if bound < 0 else -rate * F.softplus(x)


def _beta(beta: Tensor, sigmoid: bool, twice: bool) -> Tensor:
    return torch.sigmoid(beta.double()) * (2 if twice else 1) if sigmoid else beta


# The delta rule -----------------------------------------------------------------------------


def chunk_gated_delta_rule(
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
    lower_bound: float = 0.0,
    state_indices: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """S <- e^g S; S <- S + k (x) beta (v - S^T k); o = scale S^T q."""
    q, k = (_normalized(x, use_qk_l2norm_in_kernel) for x in (q, k))
    gates = _gate(g, use_gate_in_kernel, A_log, dt_bias, lower_bound)
    strengths = _beta(beta, use_beta_sigmoid_in_kernel, allow_neg_eigval)
    states = (initial_state, output_final_state, state_v_first, cu_seqlens, state_indices, intermediate_states)
    return _recurrence(q, k, v, gates, strengths, scale, *states)


chunk_gdn = fused_recurrent_gated_delta_rule = chunk_gated_delta_rule


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same without decay."""
    states = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    options |= dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **states)
    return chunk_gated_delta_rule(q, k, v, torch.zeros(v.shape[:3], device=v.device), beta, scale, **options)


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
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same with a decay for every channel of k."""
    bound = (LEAST_BOUND if use_gate_in_kernel and safe_gate else 0.0) if lower_bound is None else lower_bound
    states = dict(initial_state=initial_state, output_final_state=output_final_state)
    options |= dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, use_gate_in_kernel=use_gate_in_kernel, **states)
    options |= dict(use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel, allow_neg_eigval=allow_neg_eigval)
    return chunk_gated_delta_rule(q, k, v, g, beta, scale, lower_bound=bound, **options)


fused_recurrent_kda = chunk_kda


# Decays alone -------------------------------------------------------------------------------


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    g_gamma: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    state_indices: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """S <- e^g S + k (x) v; o = scale S^T q."""
    g = g_gamma.expand(v.shape[:3]) if g_gamma is not None else g
    states = (initial_state, output_final_state, state_v_first, cu_seqlens, state_indices, intermediate_states)
    return _recurrence(q, k, v, g, None, scale, *states)


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """The same with a decay for every channel of k."""
    return chunk_simple_gla(
        q, k, v, g, None, scale, initial_state, output_final_state, state_v_first, cu_seqlens, **foreign
    )


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
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_simple_gla` with the arguments of the form for few tokens."""
    states: Any = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    return chunk_simple_gla(q, k, v, g, g_gamma, scale, **states, **options)


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    reverse: bool = False,
    cu_seqlens: Tensor | None = None,
    *,
    g: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`chunk_gla` with the arguments of the form for few tokens."""
    states: Any = dict(initial_state=initial_state, output_final_state=output_final_state, cu_seqlens=cu_seqlens)
    return chunk_simple_gla(q, k, v, g if gk is None else gk, None, scale, **states, **options)


def chunk_retention(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """`chunk_simple_gla` with the decay 1 - 2^(-5 - h) of head h."""
    heads = torch.arange(v.shape[2], device=v.device, dtype=torch.float64)
    return chunk_simple_gla(q, k, v, None, torch.log1p(-torch.exp2(-5.0 - heads)), *rest, **options)


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
    """No decay; `normalize` divides by scale * q . (sum of the keys so far)."""
    states = (initial_state, output_final_state, state_v_first, cu_seqlens)
    o, final = chunk_simple_gla(q, k, v.double(), None, None, scale, *states)
    if normalize:
        ones = torch.ones_like(v[..., :1], dtype=torch.float64)
        o = o / (chunk_simple_gla(q, k, ones, None, None, scale, cu_seqlens=cu_seqlens)[0] + EPSILON)
    return o.to(v.dtype), final


# Mamba-2 and the short convolution ----------------------------------------------------------


def _steps(dt: Tensor, dt_bias: Tensor | None, softplus: bool, limit: tuple[float, float]) -> Tensor:
    wide = dt.double() if dt_bias is None else dt.double() + dt_bias.double()
    return (F.softplus(wide) if softplus else wide).clamp(*limit)


def _finish(o: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    if D is not None:
        o = o + x.double() * (D.double()[:, None] if D.dim() == 1 else D.double())
    return (o if z is None else o * F.silu(z.double())).to(x.dtype)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """S <- e^(dt A) S + B (x) dt x; y = S^T C + D x, times silu(z)."""
    step = _steps(dt, dt_bias, dt_softplus, dt_limit)
    g = step * A.double()
    if seq_idx is not None:
        changes = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
        g = torch.where(changes.unsqueeze(-1), torch.full_like(g, -math.inf), g)
    o, final = _recurrence(C, B, x * step.unsqueeze(-1), g, None, 1.0, initial_states, True, True, cu_seqlens)
    wanted: Any = [final] * (return_final_states + return_varlen_states)
    out = _finish(o, x, D, z)
    return (out, *wanted) if wanted else out


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
) -> Tensor:
    """One token of every sequence; the states change in place."""
    dt = dt if dt.dim() == 2 else dt[..., 0]
    dt_bias = dt_bias if dt_bias is None or dt_bias.dim() == 1 else dt_bias[..., 0]
    A = A if A.dim() == 1 else A[:, 0, 0]
    step = _steps(dt, dt_bias, dt_softplus, (-math.inf, math.inf)).unsqueeze(1)
    slots = torch.arange(x.shape[0]) if state_batch_indices is None else state_batch_indices
    wide = x.unsqueeze(1) * step.unsqueeze(-1)
    rows = (C.unsqueeze(1), B.unsqueeze(1), wide, step * A.double(), None, 1.0)
    o, _ = _recurrence(*rows, state, False, True, None, slots)
    return _finish(o[:, 0], x, D, z)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = 'silu',
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """A short convolution of every channel over the tokens of its sequence."""
    y, final = causal_conv1d_twin(x, weight, bias, initial_state, cu_seqlens, activation, output_final_state)
    return y, final if output_final_state else None
