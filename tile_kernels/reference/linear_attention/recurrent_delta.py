"""The delta rule token by token in float32."""

import torch
from torch import Tensor

from tile_kernels.reference.linear_attention.causal_conv1d import sequences_of
from tile_kernels.reference.linear_attention.gate import gate


def prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    form: int,
    normalize: bool,
    lower_bound: float,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q and k of value heads, decays, and factors."""
    q, k = q.float(), k.float()
    if normalize:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    decay = (g.float() if a_log is None else gate(g, a_log, dt_bias, lower_bound)).exp()
    factors = beta.float() if form == 0 else form * torch.sigmoid(beta.float())
    group = heads // q.shape[2]
    decay = decay if g.dim() == 4 else decay.unsqueeze(-1)
    return q.repeat_interleave(group, 2), k.repeat_interleave(group, 2), decay, factors


def run_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    factors: Tensor,
    state: Tensor,
    scale: float,
    after: Tensor | None,
) -> tuple:
    """Results and final state of one sequence; the state after every token goes to `after`."""
    o = torch.zeros(v.shape, device=v.device)
    for t in range(v.shape[0]):
        state = decay[t][:, :, None] * state
        u = factors[t][:, None] * (v[t].float() - torch.einsum('hkv,hk->hv', state, k[t]))
        state = state + torch.einsum('hk,hv->hkv', k[t], u)
        o[t] = scale * torch.einsum('hkv,hk->hv', state, q[t])
        if after is not None:
            after[t] = state
    return o, state


def view_of(states: Tensor | None, v_first: bool) -> Tensor | None:
    """States whose last dimensions are those of k and v."""
    return states.transpose(-1, -2) if states is not None and v_first else states


def recurrent_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    form: int = 0,
    normalize: bool = False,
    lower_bound: float = 0.0,
    v_first: bool = False,
    output_final_state: bool = False,
    intermediate_states: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every sequence from its initial state."""
    heads, dim, value_dim = v.shape[2], q.shape[3], v.shape[3]
    prepared = prepare(q, k, g, beta, a_log, dt_bias, form, normalize, lower_bound, heads)
    o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    snapshots = view_of(intermediate_states, v_first)
    finals = [torch.zeros(0, heads, dim, value_dim, device=v.device)]
    for n, (b, own) in enumerate(sequences_of(cu_seqlens, v)):
        state = torch.zeros(heads, dim, value_dim, device=v.device)
        if initial_state is not None:
            state = (initial_state[n].transpose(1, 2) if v_first else initial_state[n]).float()
        qs, ks, decay, factors = (x[b, own] for x in prepared)
        after = None if snapshots is None else snapshots[b, own]
        results, state = run_sequence(qs, ks, v[b, own], decay, factors, state, scale, after)
        o[b, own] = results.to(v.dtype)
        if output_final_state:
            finals.append(state[None])
    final = torch.cat(finals)
    return o, (final.transpose(2, 3) if v_first else final).contiguous()
