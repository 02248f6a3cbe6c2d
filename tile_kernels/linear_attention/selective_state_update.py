"""One token of Mamba-2 for decoding: states change in place. The recurrence is the kernel of `fused_recurrent_gla`."""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.linear_attention._checks import FLOATS, HALVES, lengths_int32, refuse_gradient
from tile_kernels.linear_attention.fused_recurrent_gla import fused_recurrent_gla
from tile_kernels.linear_attention.mamba_chunk_scan_combined import finish, step_sizes


def _one_of_each_head(x: Tensor, name: str, kept: int) -> Tensor:
    """The first `kept` dimensions of a tensor whose others repeat one number, as mamba_ssm expands it."""
    check.dtype(x, name, FLOATS)
    if x.dim() == kept:
        return x
    while x.dim() > kept:
        if x.shape[-1] > 1 and x.stride(-1) != 0:
            check.fail(name, 'must be one number for each head, expanded', check.describe(x))
        x = x[..., 0]
    return x


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
    """One token of every sequence of Mamba-2; no gradient. Takes the calls of mamba_ssm for scalar decays.

    Args:
        state: (batch, heads, headdim, d_state) float32 or bfloat16, changed in place; a pool with indices.
        x: (batch, heads, headdim) bfloat16 or float16.
        dt: (batch, heads), or expanded to (batch, heads, headdim).
        A: (heads,), or expanded to (heads, headdim, d_state).
        B: (batch, groups, d_state) of the dtype of x; heads is a multiple of groups.
        C: like B.
        D: (heads,) or (heads, headdim).
        z: (batch, heads, headdim).
        dt_bias: (heads,), or expanded to (heads, headdim).
        dt_softplus: whether dt passes softplus after its bias.
        state_batch_indices: (batch,) int32, the slot of every sequence in the pool; -1 skips it.

    Returns:
        (batch, heads, headdim); 0 for a sequence that is skipped, before D and z.
    """
    batch, heads, headdim = check.shape(x, 'x', 'batch heads headdim', dtype=HALVES)
    for name, y in (('B', B), ('C', C)):
        check.shape(y, name, 'batch groups d_state', dtype=x.dtype, batch=batch)
    refuse_gradient(state=state, x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    dt, A = _one_of_each_head(dt, 'dt', 2), _one_of_each_head(A, 'A', 1)
    check.shape(dt, 'dt', 'batch heads', batch=batch, heads=heads)
    check.shape(A, 'A', 'heads', heads=heads)
    if dt_bias is not None:
        dt_bias = _one_of_each_head(dt_bias, 'dt_bias', 1)
        check.shape(dt_bias, 'dt_bias', 'heads', heads=heads)
    if z is not None:
        check.shape(z, 'z', 'batch heads headdim', batch=batch, heads=heads, headdim=headdim)
    check.same_device(x=x, dt=dt, A=A, B=B, C=C, D=D, z=z, dt_bias=dt_bias)
    with torch.no_grad():
        weight = step_sizes(dt, dt_bias, dt_softplus).unsqueeze(1)
        g = weight * A.float()
        indices = lengths_int32(state_batch_indices, 'state_batch_indices')
        rows = (C.unsqueeze(1), B.unsqueeze(1), x.unsqueeze(1))
        o, _ = fused_recurrent_gla.call(*rows, g, weight, None, state, indices, None, 1.0, False, True)
        return finish(o[:, 0], x, D, z)
