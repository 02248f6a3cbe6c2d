"""One token of the short causal convolution, for decoding; the formula is that of `causal_conv1d`.

A thread owns a channel of a sequence. The window moves on in place. Memory bound.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.engram._macros import FAST_EXP2, sigmoid_of
from tile_kernels.linear_attention._checks import HALVES
from tile_kernels.linear_attention.causal_conv1d import (
    BOUNDS,
    PASS_CONFIGS,
    check_weights,
    random_convolution,
)

BF16, F16 = torch.bfloat16, torch.float16


@kernel(pass_configs=PASS_CONFIGS)
def causal_conv1d_update_kernel(
    taps: int, dtype: torch.dtype, weight_dtype: torch.dtype, has_bias: bool, indexed: bool, silu: bool
):
    """One token of every sequence; a thread owns a channel."""
    num_rows, channels, num_states = T.dynamic('num_rows'), T.dynamic('channels'), T.dynamic('num_states')
    num_indices, x_stride = T.dynamic('num_indices'), T.dynamic('x_stride')
    elem, wide, past, threads = T.dtype(dtype), T.dtype(weight_dtype), taps - 1, 128

    @T.prim_func
    def causal_conv1d_update(
        x: T.StridedTensor((num_rows, channels), (x_stride, 1), elem),
        state: T.Tensor((num_states, past, channels), elem),
        weight: T.Tensor((channels, taps), wide),
        bias: T.Tensor((channels,), wide),
        state_indices: T.Tensor((num_indices,), T.int32),
        y: T.Tensor((num_rows, channels), elem),
    ):
        with T.Kernel(T.ceildiv(channels, threads), num_rows, threads=threads) as (pid, r):
            T.import_source(FAST_EXP2)
            window = T.alloc_local((taps,), elem)
            a = T.alloc_var(T.float32, init=0.0)
            own = T.alloc_var(T.int32)
            own = r
            if indexed:
                own = state_indices[r]
            column = pid * threads + T.get_thread_binding()
            if column < channels:
                if T.And(own >= 0, own < num_states):
                    for j in T.unroll(past):
                        window[j] = state[own, j, column]
                    window[past] = x[r, column]
                    if has_bias:
                        a = T.cast(bias[column], T.float32)
                    for j in T.unroll(taps):
                        a = a + T.cast(weight[column, j], T.float32) * T.cast(window[j], T.float32)
                    if silu:
                        a = a * sigmoid_of(a)
                    for j in T.unroll(past):
                        state[own, j, column] = window[j + 1]
                y[r, column] = T.cast(a, elem)

    return causal_conv1d_update


@op(outputs='y')
def causal_conv1d_update(
    x: Tensor,
    state: Mut,
    weight: Tensor,
    bias: Tensor | None = None,
    state_indices: Tensor | None = None,
    activation: str | None = 'silu',
) -> Tensor:
    """One token of every sequence; `state` is read and moves on in place. There is no gradient.

    Args:
        x: (rows, channels) bfloat16 or float16.
        state: (rows, taps - 1, channels) of the dtype of x, or with `state_indices` a pool of such states.
        weight: as in `causal_conv1d`.
        bias: as there.
        state_indices: (rows,) int32, the state of every row; -1 skips a row, whose y is 0.
        activation: as there.

    Returns:
        y (rows, channels).
    """
    rows, channels = check.shape(x, 'x', 'rows channels', dtype=HALVES)
    taps = check_weights(x, weight, bias, activation)
    check.packed(state_indices, 'state_indices', 'rows', torch.int32, rows=rows)
    known = dict(past=taps - 1, channels=channels) | (dict(rows=rows) if state_indices is None else {})
    check.packed(state, 'state', 'rows past channels', x.dtype, **known)
    check.same_device(x=x, state=state, state_indices=state_indices)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    static = (taps, x.dtype, weight.dtype, bias is not None, state_indices is not None, activation is not None)
    launch(causal_conv1d_update_kernel, static, x, state, weight, bias, state_indices, y, size=x.numel())
    return y


def _make_update(rows: int, channels: int, taps: int = 4, dtype: torch.dtype = BF16, indexed: bool = False) -> dict:
    made = random_convolution(rows, channels, taps, dtype=dtype, bias=indexed)
    indices = torch.tensor([-1, 4, 1, 0])[:rows].int() if indexed else None
    states = torch.randn(5 if indexed else rows, taps - 1, channels).to(dtype)
    return dict(x=made['x'][0], state=states, weight=made['weight'], bias=made['bias'], state_indices=indices)


causal_conv1d_update.cases(
    make=_make_update,
    match=BOUNDS,
    smoke=grid(rows=[0, 3], channels=[16]) + grid(rows=[3], channels=[136], taps=[2], dtype=[F16], indexed=[True]),
    bench=grid(rows=[1, 64], channels=[8192]),
)
