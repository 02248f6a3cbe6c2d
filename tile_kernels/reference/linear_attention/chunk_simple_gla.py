"""Twin of linear attention with one decay for each token and head: the recurrence, token by token."""

import itertools

import torch
from torch import Tensor


def sequences(cu_seqlens: Tensor | None, batch: int, tokens: int) -> list[tuple[int, int, int]]:
    """Batch index, first token and end of every sequence."""
    if cu_seqlens is None:
        return [(b, 0, tokens) for b in range(batch)]
    return [(0, start, end) for start, end in itertools.pairwise(cu_seqlens.tolist())]


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, weight: Tensor | None, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """One sequence (tokens, heads, dim) from a state (heads, dim, value_dim): results of all tokens, last state.

    g is (tokens, heads), or (tokens, heads, dim) for a decay of every channel.
    """
    rows = []
    for t in range(q.shape[0]):
        if g is not None:
            decay = g[t].exp()
            state = state * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
        key = k[t] if weight is None else k[t] * weight[t][:, None]
        state = state + key[:, :, None] * v[t][:, None, :]
        rows.append(scale * (q[t][:, :, None] * state).sum(1))
    o = torch.stack(rows) if rows else v.new_zeros(v.shape)
    return o, state


def run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """The recurrence of all sequences in float32; the state is (0,) unless it is wanted."""
    batch, tokens, heads, dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // max(heads, 1)
    wide_q, wide_k = (x.float().repeat_interleave(group, 2) for x in (q, k))
    wide_v = v.float()
    nothing = wide_v.flatten()[:0]  # has a gradient
    o = torch.zeros(v.shape, device=v.device) + nothing.sum()
    own = sequences(cu_seqlens, batch, tokens)
    states = []
    for n, (b, start, end) in enumerate(own):
        if initial_state is None:
            state = wide_v.new_zeros(value_heads, dim, value_dim)
        else:
            state = initial_state[n].float()
            state = state.transpose(-1, -2) if state_v_first else state
        rows = (b, slice(start, end))
        gates = None if g is None else g[rows].float()
        weights = None if weight is None else weight[rows].float()
        part, state = recurrence(wide_q[rows], wide_k[rows], wide_v[rows], gates, weights, state, scale)
        o[rows] = part
        states.append(state)
    if not output_final_state:
        return o.to(q.dtype), nothing.clone()
    final = torch.stack(states) if states else nothing.view(0, value_heads, dim, value_dim).clone()
    final = final.transpose(-1, -2) if state_v_first else final
    return o.to(q.dtype), final.contiguous()


def gradient(
    do: Tensor,
    dfinal_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    weight: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    output_final_state: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the recurrence of all sequences, from the last token to the first; (0,) for what is not given."""
    batch, tokens, heads, dim = q.shape
    value_heads, value_dim = v.shape[2:]
    group = value_heads // max(heads, 1)
    wide_q, wide_k = (x.float().repeat_interleave(group, 2) for x in (q, k))
    wide_v, wide_do = v.float(), do.float()
    dq, dk, dv = (torch.zeros(x.shape, device=x.device) for x in (wide_q, wide_k, wide_v))
    dg, dweight = (torch.zeros((0,) if x is None else x.shape, device=q.device) for x in (g, weight))
    dstate = torch.zeros((0,) if initial_state is None else initial_state.shape, device=q.device)
    for n, (b, start, end) in enumerate(sequences(cu_seqlens, batch, tokens)):
        state = torch.zeros(value_heads, dim, value_dim, device=q.device)
        if initial_state is not None:
            state = initial_state[n].float().mT if state_v_first else initial_state[n].float()
        states = [state]
        for t in range(start, end):
            rows = (b, slice(t, t + 1))
            gates = None if g is None else g[rows].float()
            weights = None if weight is None else weight[rows]
            state = recurrence(wide_q[rows], wide_k[rows], wide_v[rows], gates, weights, state, scale)[1]
            states.append(state)
        change = torch.zeros_like(state)
        if output_final_state:
            change = dfinal_state[n].mT if state_v_first else dfinal_state[n]
        for t in reversed(range(start, end)):
            change = change + scale * wide_q[b, t][:, :, None] * wide_do[b, t][:, None, :]
            dq[b, t] = scale * (states[t - start + 1] * wide_do[b, t][:, None, :]).sum(2)
            dk[b, t] = (change * wide_v[b, t][:, None, :]).sum(2)
            dv[b, t] = (change * wide_k[b, t][:, :, None]).sum(1)
            if weight is not None:
                dweight[b, t] = (dk[b, t] * wide_k[b, t]).sum(1)
                dk[b, t] *= weight[b, t][:, None]
                dv[b, t] *= weight[b, t][:, None]
            if g is not None:
                decay = g[b, t].float().exp()
                kept = (states[t - start] * change).sum(2)
                dg[b, t] = decay * (kept.sum(1) if decay.dim() == 1 else kept)
                change = change * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
        if initial_state is not None:
            dstate[n] = change.mT if state_v_first else change
    dq, dk = (x.view(batch, tokens, heads, group, dim).sum(3) if heads else x for x in (dq, dk))
    last = dstate if initial_state is None else dstate.to(initial_state.dtype)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dg, dweight, last


def chunk_simple_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segment: int = 0,
) -> tuple[Tensor, Tensor]:
    """The recurrence in float32; segments have no effect."""
    return run(q, k, v, g, weight, initial_state, cu_seqlens, scale, output_final_state, state_v_first)


def chunk_simple_gla_bwd(
    do: Tensor,
    dfinal_state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    segment: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the recurrence in float32; (0,) for what is not given."""
    others = (g, weight, initial_state, cu_seqlens, scale, output_final_state, state_v_first)
    return gradient(do, dfinal_state, q, k, v, *others)
