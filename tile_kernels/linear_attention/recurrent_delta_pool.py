"""The delta rule token by token on a pool of states, which are read and written in place. See `recurrent_delta`."""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core.cases import grid
from tile_kernels.core.op import Mut, op
from tile_kernels.linear_attention.recurrent_delta import BF16, BOUNDS, F32, make_recurrent, run_recurrent


@op(outputs='o')
def recurrent_delta_pool(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    pool: Mut,
    state_indices: Tensor,
    a_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    form: int = 0,
    normalize: bool = False,
    lower_bound: float = 0.0,
    v_first: bool = False,
    intermediate_states: Mut | None = None,
) -> Tensor:
    """`recurrent_delta` on the states of a pool, which move on in place.

    Args:
        q: as in `recurrent_delta`, as all that is not said here.
        k: as there.
        v: as there.
        g: as there.
        beta: as there.
        pool: (states, value_heads, dim, value_dim) float32 or bfloat16.
        state_indices: (sequences,) int32, the state of every sequence; -1 skips a sequence, whose o is 0. No state may
            occur twice.
        a_log: as there.
        dt_bias: as there.
        cu_seqlens: as there.
        scale: as there.
        form: as there.
        normalize: as there.
        lower_bound: as there.
        v_first: as there.
        intermediate_states: as there; those of sequences that are skipped do not change.

    Returns:
        o like v.
    """
    options = (scale, form, normalize, lower_bound, v_first, False, intermediate_states)
    return run_recurrent(q, k, v, g, beta, a_log, dt_bias, pool, state_indices, cu_seqlens, *options)[0]


# Cases --------------------------------------------------------------------------------------


def _make(indices: tuple, **case: Any) -> dict:
    made = make_recurrent(**case)
    state = made.pop('initial_state')
    del made['output_final_state']
    return made | dict(pool=torch.cat([state] * 2), state_indices=torch.tensor(indices).int())


SMOKE = (
    grid(indices=[(3, -1, 0)], tokens=[2], batch=[3], heads=[(1, 2)], dims=[(48, 40 + 8)], state=[F32])
    + grid(indices=[(1, 2)], tokens=[1], batch=[2], state=[BF16], v_first=[True], normalize=[True], gates=[BF16])
    + grid(indices=[(1, -1, 5)], tokens=[(0, 2, 1)], state=[F32], behind=[2], channels=[True], after=[F32])
)
BENCH = grid(indices=[tuple(range(32))], tokens=[1], batch=[32], heads=[(32, 32)], dims=[(128, 128)], state=[F32])
recurrent_delta_pool.cases(make=_make, match=BOUNDS, smoke=SMOKE, full=BENCH, bench=BENCH)
