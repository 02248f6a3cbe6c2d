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
    o = torch.zeros_like(wide_v)
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
        return o.to(q.dtype), q.new_empty(0, dtype=torch.float32)
    final = torch.stack(states) if states else wide_v.new_zeros(0, value_heads, dim, value_dim)
    final = final.transpose(-1, -2) if state_v_first else final
    return o.to(q.dtype), final.contiguous()


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
    given = [None if x is None else x.detach().requires_grad_() for x in (q, k, v, g, weight, initial_state)]
    with torch.enable_grad():
        o, final = run(*given, cu_seqlens, scale, output_final_state, state_v_first)  # type: ignore[arg-type]
    results, upstream = [o], [do]
    if output_final_state:
        results.append(final)
        upstream.append(dfinal_state)
    leaves = [x for x in given if x is not None]
    used = [(r, u) for r, u in zip(results, upstream, strict=True) if r.requires_grad]
    found = torch.autograd.grad([r for r, _ in used], leaves, [u for _, u in used], allow_unused=True) if used else []
    gradients = dict(zip(map(id, leaves), found or [None] * len(leaves), strict=True))
    made = []
    for x in given:
        if x is None:
            made.append(q.new_empty(0, dtype=torch.float32))
        else:
            own = gradients[id(x)]
            made.append(torch.zeros_like(x) if own is None else own.contiguous())
    return made[0], made[1], made[2], made[3], made[4], made[5]
