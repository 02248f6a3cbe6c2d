"""The gated delta rule as a sequential recurrence in float32, and its gradients step by step."""

import torch
from torch import Tensor

from tile_kernels.reference.linear_attention.causal_conv1d import sequences_of

LEAST_GATE = -64.0


def _beta(beta: Tensor, form: int) -> Tensor:
    return beta.float() if form == 0 else torch.sigmoid(beta.float()) * form


def _gates(g: Tensor) -> Tensor:
    """Gates (tokens, heads, 1 or dim) in float32; exp(-64) counts as 0."""
    bounded = torch.where(g < LEAST_GATE, torch.full_like(g, LEAST_GATE), g).float()
    return bounded if g.dim() == 3 else bounded.unsqueeze(-1)


def _steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Results without `scale` of one sequence, and the state before and after every step; q and k have value heads."""
    states, o = [state], []
    for t in range(q.shape[0]):
        state = g[t].exp()[:, :, None] * state
        u = beta[t][:, None] * (v[t] - torch.einsum('hkv,hk->hv', state, k[t]))
        state = state + torch.einsum('hk,hv->hkv', k[t], u)
        o.append(torch.einsum('hkv,hk->hv', state, q[t]))
        states.append(state)
    return torch.stack(o) if o else v[:0], states


def _inverse(k: Tensor, sums: Tensor, beta: Tensor, chunk: int) -> Tensor:
    """(1 + A)^-1 of a chunk, the identity in the rows behind its last."""
    rows = k.shape[0]
    decay = (sums[:, None] - sums[None]).clamp(max=0.0).exp()
    lower = torch.einsum('ihk,jhk,ijhk->hij', k, k, decay.expand(-1, -1, -1, k.shape[2])) * beta.t()[:, :, None]
    result = torch.eye(chunk, device=k.device).repeat(k.shape[1], 1, 1)
    own = torch.eye(rows, device=k.device) + lower.tril(-1)
    result[:, :rows, :rows] = torch.linalg.inv(own)
    return result


def _initial(state: Tensor | None, n: int, v_first: bool, shape: tuple, like: Tensor) -> Tensor:
    if state is None:
        return torch.zeros(shape, device=like.device)
    return (state[n].transpose(1, 2) if v_first else state[n]).float()


def _expand(x: Tensor, value_heads: int) -> Tensor:
    return x.float().repeat_interleave(value_heads // x.shape[1], 1)


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    chunk_size: int = 64,
    form: int = 0,
    v_first: bool = False,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The recurrence of every sequence; gate sums and inverses are those of its chunks."""
    heads, dim, value_dim = v.shape[2], q.shape[3], v.shape[3]
    o = v[..., :0].sum(-1, keepdim=True).float().repeat(1, 1, 1, value_dim)  # 0, with a gradient
    g_sum = torch.zeros_like(g)
    own = sequences_of(cu_seqlens, v)
    packed, tokens = cu_seqlens is not None, v.shape[1]
    number = tokens // chunk_size + len(own) + 1 if packed else -(-tokens // chunk_size) * len(own)
    inverse = torch.zeros(number, heads, chunk_size, chunk_size, device=v.device)
    finals = []
    for n, (b, where) in enumerate(own):
        gates, factors = _gates(g[b, where]), _beta(beta[b, where], form)
        state = _initial(initial_state, n, v_first, (heads, dim, value_dim), v)
        operands = (_expand(q[b, where], heads), _expand(k[b, where], heads), v[b, where].float(), gates, factors)
        results, states = _steps(*operands, state)
        o[b, where] = results * scale
        finals.append(states[-1].transpose(1, 2) if v_first else states[-1])
        first = where.start // chunk_size + n if packed else n * -(-tokens // chunk_size)
        for c in range(-(-results.shape[0] // chunk_size)):
            rows = slice(c * chunk_size, (c + 1) * chunk_size)
            sums = gates[rows].cumsum(0)
            g_sum[b, where][rows] = sums.reshape(g[b, where][rows].shape).detach()
            with torch.no_grad():
                inverse[first + c] = _inverse(operands[1][rows], sums, factors[rows], chunk_size)
    shape = (0, heads, value_dim, dim) if v_first else (0, heads, dim, value_dim)
    final = torch.stack(finals) if output_final_state and finals else torch.zeros(shape, device=v.device)
    final = final + v[:0].float().sum()  # + 0, with a gradient
    return o.to(v.dtype), final, g_sum, inverse.to(v.dtype)


def delta_rule_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_sum: Tensor,
    beta: Tensor,
    inverse: Tensor,
    dfinal_state: Tensor | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    chunk_size: int = 64,
    form: int = 0,
    v_first: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every step backwards; gates are differences of their sums."""
    heads, dim, value_dim = v.shape[2], q.shape[3], v.shape[3]
    dq, dk, dv = (torch.zeros(x.shape, device=v.device) for x in (q, k, v))
    dg, dbeta = torch.zeros_like(g_sum), torch.zeros_like(beta)
    dinitial = torch.zeros_like(initial_state) if initial_state is not None else v.new_zeros(0, dtype=torch.float32)
    for n, (b, where) in enumerate(sequences_of(cu_seqlens, v)):
        sums = g_sum[b, where] if g_sum.dim() == 4 else g_sum[b, where].unsqueeze(-1)
        gates = sums.clone()
        for t in range(gates.shape[0]):
            if t % chunk_size:
                gates[t] = sums[t] - sums[t - 1]
        factors = _beta(beta[b, where], form)
        state = _initial(initial_state, n, v_first, (heads, dim, value_dim), v)
        qs, ks, vs = _expand(q[b, where], heads), _expand(k[b, where], heads), v[b, where].float()
        _, states = _steps(qs, ks, vs, gates, factors, state)
        ds = torch.zeros_like(state)
        if dfinal_state is not None and dfinal_state.numel():
            ds = _initial(dfinal_state, n, v_first, (), v).clone()
        first = where.start
        for t in reversed(range(qs.shape[0])):
            grad = scale * do[b, first + t].float()
            before = gates[t].exp()[:, :, None] * states[t]
            known = vs[t] - torch.einsum('hkv,hk->hv', before, ks[t])
            u = factors[t][:, None] * known
            ds = ds + torch.einsum('hk,hv->hkv', qs[t], grad)
            du = torch.einsum('hkv,hk->hv', ds, ks[t])
            dknown = factors[t][:, None] * du
            own_dq = torch.einsum('hkv,hv->hk', states[t + 1], grad)
            own_dk = torch.einsum('hkv,hv->hk', ds, u) - torch.einsum('hkv,hv->hk', before, dknown)
            dq[b, first + t] = own_dq.unflatten(0, (q.shape[2], -1)).sum(1)
            dk[b, first + t] = own_dk.unflatten(0, (q.shape[2], -1)).sum(1)
            dv[b, first + t] = dknown
            slope = 1.0 if form == 0 else factors[t] * (1 - factors[t] / form)
            dbeta[b, first + t] = (du * known).sum(1) * slope
            ds = ds - torch.einsum('hk,hv->hkv', ks[t], dknown)
            dgate = (ds * before).sum(2)
            dg[b, first + t] = dgate if g_sum.dim() == 4 else dgate.sum(1)
            ds = gates[t].exp()[:, :, None] * ds
        if initial_state is not None:
            dinitial[n] = (ds.transpose(1, 2) if v_first else ds).to(initial_state.dtype)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), dg, dbeta, dinitial
