"""The state space scan of Mamba-2: linear attention with q = C, k = B, v = x, weight dt and decay dt * A.

    dt     = clamp(softplus(dt + dt_bias), dt_limit)
    S[t]   = exp(dt[t] * A) * S[t - 1] + dt[t] * x[t] (x) B[t]         S is headdim x d_state
    out[t] = (S[t] C[t] + D * x[t]) * silu(z[t])

The scan is the kernel of `chunk_simple_gla`. What comes before and after it (dt, D, z) is PyTorch, also on a GPU.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.linear_attention._checks import FLOATS, dense, lengths_int32
from tile_kernels.linear_attention.chunk_simple_gla import chunk_simple_gla

#: A logarithm of a decay that forgets everything.
FORGET = -1e4


def step_sizes(
    dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, dt_limit: tuple[float, float] = (0.0, math.inf)
) -> Tensor:
    """Dt in float32, with its bias, softplus and limits; the bias has the last dimensions of dt."""
    dt = dt.float()
    if dt_bias is not None:
        dt = dt + dt_bias.float()
    if dt_softplus:
        dt = F.softplus(dt)
    if tuple(dt_limit) != (0.0, math.inf):
        dt = dt.clamp(*dt_limit)
    return dt


def finish(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Add D * x and multiply by silu(z); D is (heads,) or (heads, headdim)."""
    if D is None and z is None:
        return y
    wide = y.float()
    if D is not None:
        wide = wide + x.float() * (D.float().unsqueeze(-1) if D.dim() == 1 else D.float())
    if z is not None:
        wide = wide * F.silu(z.float())
    return wide.to(x.dtype)


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
    """The scan of Mamba-2, differentiable in all tensors; takes the calls of mamba_ssm.

    Args:
        x: (batch, tokens, heads, headdim) bfloat16 or float16; headdim is a multiple of 16 up to 256.
        dt: (batch, tokens, heads) step sizes of any floating dtype.
        A: (heads,) factors of the decay, negative.
        B: (batch, tokens, groups, d_state) of the dtype of x; heads is a multiple of groups, d_state of 16.
        C: like B.
        chunk_size: accepted; chunks have 64 tokens.
        D: (heads,) or (heads, headdim), factors of x in the result.
        z: (batch, tokens, heads, headdim), gates of the result.
        dt_bias: (heads,), added to dt.
        initial_states: (sequences, heads, headdim, d_state) float32 or bfloat16.
        seq_idx: (batch, tokens) integers; the state is forgotten where they change.
        cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends; batch is then 1.
        dt_softplus: whether dt passes softplus after its bias.
        dt_limit: least and largest step.
        return_final_states: also return the states behind the last token of every sequence.
        return_varlen_states: the same, once more; it needs `cu_seqlens`.

    Returns:
        out (batch, tokens, heads, headdim); then, as asked, final states and those of packed sequences. Both are
        (sequences, heads, headdim, d_state) float32.
    """
    if chunk_size is not None:
        check.integer(chunk_size, 'chunk_size', least=1)
    x, B, C = autocast(x, B, C)
    batch, tokens, heads, headdim = check.shape(x, 'x', 'batch tokens heads headdim')
    known = dict(batch=batch, tokens=tokens)
    check.shape(dt, 'dt', 'batch tokens heads', dtype=FLOATS, heads=heads, **known)
    check.shape(A, 'A', 'heads', dtype=FLOATS, heads=heads)
    check.shape(B, 'B', 'batch tokens groups d_state', dtype=x.dtype, **known)
    check.shape(C, 'C', 'batch tokens groups d_state', dtype=x.dtype, **known)
    if D is not None:
        if check.tensor(D, 'D').dim() == 2:
            check.shape(D, 'D', 'heads headdim', dtype=FLOATS, heads=heads, headdim=headdim)
        else:
            check.shape(D, 'D', 'heads', dtype=FLOATS, heads=heads)
    if z is not None:
        check.shape(z, 'z', 'batch tokens heads headdim', FLOATS, heads=heads, headdim=headdim, **known)
    if dt_bias is not None:
        check.shape(dt_bias, 'dt_bias', 'heads', dtype=FLOATS, heads=heads)
    if return_varlen_states and cu_seqlens is None:
        check.fail('cu_seqlens', 'must be given with return_varlen_states', 'None')
    check.same_device(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias, seq_idx=seq_idx)
    weight = step_sizes(dt, dt_bias, dt_softplus, dt_limit)
    g = weight * A.float()
    if seq_idx is not None:
        check.shape(seq_idx, 'seq_idx', 'batch tokens', dtype=(torch.int32, torch.int64), **known)
        changes = F.pad(seq_idx[:, 1:] != seq_idx[:, :-1], (1, 0))
        g = torch.where(changes.unsqueeze(-1), FORGET, g)
    wanted = return_final_states or return_varlen_states
    cuts = lengths_int32(cu_seqlens, 'cu_seqlens')
    begin = dense(initial_states, 'initial_states')
    o, final = chunk_simple_gla.call(C, B, x, g, weight, begin, cuts, 1.0, wanted, True)
    out = finish(o, x, D, z)
    return (out, *[final] * (return_final_states + return_varlen_states)) if wanted else out
