"""The delta rule one token after the other, for decoding. See `delta_rule` for the recurrence.

    S <- e^{g_t} S,      w = S^T k_t,      p = S^T q_t
    u = beta_t (v_t - w),      S <- S + k_t (x) u,      o_t = scale (p + (k_t . q_t) u)

A thread block owns a tile of the values of a head of a sequence and keeps its part of the state in registers. Both sums
over k are taken from the decayed state before the update, so the update delays nothing. Norm, gate and sigmoid are
computed in the same kernel. Memory bound: the floor is reading and writing the states once.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.linear_attention._checks import (
    FLOATS,
    check_cu_seqlens,
    check_qkv,
    check_snapshots,
    check_state,
)
from tile_kernels.linear_attention._samples import random_delta
from tile_kernels.linear_attention.delta_rule_kernels import (
    PLAIN,
    SIGMOID,
    TWICE_SIGMOID,
    beta_of,
    find_sequence,
    padded,
    state_shape,
    strided,
)

THREADS = 128
EPS = 1e-6
#: How the gate is computed from its input: a logarithm as it is, by softplus, by a bounded sigmoid.
AS_IS, SOFTPLUS, BOUNDED = 0, 1, 2
PASS_CONFIGS = {'TL_DISABLE_SAFE_MEMORY_ACCESS': True}


def gate_of(x: Any, rate: Any, bound: Any, form: int) -> Any:
    """The logarithm of a decay; `rate` is exp(A_log)."""
    if form == AS_IS:
        return x
    if form == SOFTPLUS:
        return -rate * (T.max(x, T.float32(0.0)) + T.log(T.float32(1.0) + T.exp(-T.abs(x))))
    return bound / (T.float32(1.0) + T.exp(-rate * x))


@macro
def load_row(x, batch, token, head, values, squares, norm, row_shared, normalize: bool):
    """Load a row of q or k as float32; 0 behind its last column."""
    width = x.shape[3]
    for d in T.Parallel(values.shape[0]):
        values[d] = T.if_then_else(
            d < width, T.cast(x[batch, token, head, T.min(d, width - 1)], T.float32), T.float32(0.0)
        )
    if normalize:
        for d in T.Parallel(values.shape[0]):
            squares[d] = values[d] * values[d]
        T.reduce_sum(squares, norm, dim=0)
        for d in T.Parallel(values.shape[0]):
            row_shared[d] = values[d] * T.rsqrt(norm[0] + EPS)
    else:
        for d in T.Parallel(values.shape[0]):
            row_shared[d] = values[d]


@kernel(pass_configs=PASS_CONFIGS)
def recurrent_delta_kernel(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    gate_dtype: torch.dtype,
    packed: bool,
    channels: bool,
    form: int,
    gate: int,
    normalize: bool,
    biased: bool,
    state_dtype: torch.dtype | None,
    indexed: bool,
    final: bool,
    v_first: bool,
    after_dtype: torch.dtype | None,
):
    """`indexed`: states are those of a pool, which are written back; otherwise they go to `final_state`.

    With `after_dtype` the state after every token goes to `after`.
    """
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')
    heads, value_heads = T.dynamic('heads'), T.dynamic('value_heads')
    num_starts, number, num_states = T.dynamic('num_starts'), T.dynamic('number'), T.dynamic('num_states')
    num_indices, num_biases = T.dynamic('num_indices'), T.dynamic('num_biases')
    elem, gates = T.dtype(dtype), T.dtype(gate_dtype)
    wide, tile = padded(dim), min(32, padded(value_dim))
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    v_type, v_strides = strided('v', (batch_size, num_tokens, value_heads, value_dim), elem)
    pool_shape = state_shape(num_states, value_heads, dim, value_dim, v_first)
    final_shape = state_shape(number, value_heads, dim, value_dim, v_first)
    g_shape = (batch_size, num_tokens, value_heads, *((dim,) if channels else ()))
    rows, columns = (tile, wide) if v_first else (wide, tile)
    over = 1 if v_first else 0  # the dimension of the state that k owns
    stores = indexed or final
    after_shape = (batch_size, num_tokens, value_heads, *final_shape[2:])

    @T.prim_func
    def recurrent_delta(
        q: q_type,
        k: k_type,
        v: v_type,
        g: T.Tensor(g_shape, gates),
        beta: T.Tensor((batch_size, num_tokens, value_heads), gates),
        a_log: T.Tensor((value_heads,), T.float32),
        dt_bias: T.Tensor((num_biases,), T.float32),
        pool: T.Tensor(pool_shape, T.dtype(state_dtype or torch.float32)),
        state_indices: T.Tensor((num_indices,), T.int32),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        o: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        final_state: T.Tensor(final_shape, T.float32),
        num_sequences: T.int32,
        scale: T.float32,
        bound: T.float32,
        after: T.Tensor(after_shape, T.dtype(after_dtype or torch.float32)),
    ):
        with T.Kernel(-(-value_dim // tile), value_heads, num_sequences + (1 if packed else 0), threads=THREADS) as (
            part,
            value_head,
            sequence,
        ):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            state = T.alloc_fragment((rows, columns), T.float32)
            terms = T.alloc_fragment((rows, columns), T.float32)
            values = T.alloc_fragment((wide,), T.float32)
            squares = T.alloc_fragment((wide,), T.float32)
            norm = T.alloc_fragment((1,), T.float32)
            known = T.alloc_fragment((tile,), T.float32)
            past = T.alloc_fragment((tile,), T.float32)
            q_shared = T.alloc_shared((wide,), T.float32)
            k_shared = T.alloc_shared((wide,), T.float32)
            decay_shared = T.alloc_shared((wide if channels else 1,), T.float32)
            known_shared = T.alloc_shared((tile,), T.float32)
            past_shared = T.alloc_shared((tile,), T.float32)
            u_shared = T.alloc_shared((tile,), T.float32)
            where = T.alloc_var(T.int32)
            first = T.alloc_var(T.int32, init=0)
            rate = T.alloc_var(T.float32, init=1.0)
            shift = T.alloc_var(T.float32, init=0.0)
            column = part * tile
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))

            where = sequence
            if sequence < num_sequences:
                if indexed:
                    where = state_indices[sequence]
                    if T.Or(where < 0, where >= num_states):
                        where = -1
                own = find_sequence(cu_seqlens, sequence, num_tokens, 1, packed)
                if where >= 0:
                    if state_dtype is not None:
                        for a, b in T.Parallel(rows, columns):
                            if v_first:
                                state[a, b] = T.if_then_else(
                                    T.And(T.truncdiv(b, 4) * 4 < dim, column + a < value_dim),
                                    T.cast(pool[where, value_head, column + a, b], T.float32),
                                    T.float32(0.0),
                                )
                            else:
                                state[a, b] = T.if_then_else(
                                    T.And(a < dim, column + T.truncdiv(b, 4) * 4 < value_dim),
                                    T.cast(pool[where, value_head, a, column + b], T.float32),
                                    T.float32(0.0),
                                )
                    else:
                        T.clear(state)
                    if gate != AS_IS:
                        rate = T.exp(a_log[value_head])
                    for step in T.serial(own.length):
                        token = own.start + step
                        load_row(q, own.batch, token, head, values, squares, norm, q_shared, normalize)
                        load_row(k, own.batch, token, head, values, squares, norm, k_shared, normalize)
                        if channels:
                            for d in T.Parallel(wide):
                                at = T.min(d, dim - 1)
                                own_shift = dt_bias[value_head * dim + at] if biased else T.float32(0.0)
                                x = T.cast(g[own.batch, token, value_head, at], T.float32) + own_shift
                                decay_shared[d] = T.if_then_else(
                                    d < dim, T.exp(gate_of(x, rate, bound, gate)), T.float32(0.0)
                                )
                        else:
                            if biased:
                                shift = dt_bias[value_head]
                            x = T.cast(g[own.batch, token, value_head], T.float32) + shift
                            decay_shared[0] = T.exp(gate_of(x, rate, bound, gate))
                        T.sync_threads()
                        for a, b in T.Parallel(rows, columns):
                            state[a, b] = state[a, b] * decay_shared[(b if v_first else a) if channels else 0]
                        for a, b in T.Parallel(rows, columns):
                            terms[a, b] = state[a, b] * k_shared[b if v_first else a]
                        T.reduce_sum(terms, known, dim=over)
                        for a, b in T.Parallel(rows, columns):
                            terms[a, b] = state[a, b] * q_shared[b if v_first else a]
                        T.reduce_sum(terms, past, dim=over)
                        T.copy(known, known_shared)
                        T.copy(past, past_shared)
                        for d in T.Parallel(wide):
                            squares[d] = k_shared[d] * q_shared[d]
                        T.reduce_sum(squares, norm, dim=0)
                        T.sync_threads()
                        for j in T.Parallel(tile):
                            factor = beta_of(T.cast(beta[own.batch, token, value_head], T.float32), form)
                            at = T.min(column + j, value_dim - 1)
                            value = T.cast(v[own.batch, token, value_head, at], T.float32)  # type: ignore[index]
                            u_shared[j] = T.if_then_else(
                                column + j < value_dim, factor * (value - known_shared[j]), T.float32(0.0)
                            )
                            if column + j < value_dim:
                                o[own.batch, token, value_head, column + j] = scale * (
                                    past_shared[j] + norm[0] * factor * (value - known_shared[j])
                                )
                        T.sync_threads()
                        for a, b in T.Parallel(rows, columns):
                            state[a, b] = state[a, b] + k_shared[b if v_first else a] * u_shared[a if v_first else b]
                        if after_dtype is not None:
                            for a, b in T.Parallel(rows, columns):
                                d, e = (b, a) if v_first else (a, b)
                                if T.And(d < dim, column + e < value_dim):
                                    if v_first:
                                        after[own.batch, token, value_head, column + e, d] = state[a, b]
                                    else:
                                        after[own.batch, token, value_head, d, column + e] = state[a, b]
                        T.sync_threads()
                    if stores:
                        for a, b in T.Parallel(rows, columns):
                            inside = (
                                T.And(b < dim, column + a < value_dim)
                                if v_first
                                else T.And(a < dim, column + b < value_dim)
                            )
                            if inside:
                                if indexed:
                                    if v_first:
                                        pool[where, value_head, column + a, b] = T.cast(state[a, b], pool.dtype)
                                    else:
                                        pool[where, value_head, a, column + b] = T.cast(state[a, b], pool.dtype)
                                elif v_first:
                                    final_state[where, value_head, column + a, b] = state[a, b]
                                else:
                                    final_state[where, value_head, a, column + b] = state[a, b]
                else:
                    for step in T.serial(own.length):
                        for j in T.Parallel(tile):
                            if column + j < value_dim:
                                o[own.batch, own.start + step, value_head, column + j] = T.cast(0.0, elem)
            elif packed:
                first = T.min(cu_seqlens[num_sequences], num_tokens)
                for step in T.serial(num_tokens - first):
                    for j in T.Parallel(tile):
                        if column + j < value_dim:
                            o[0, first + step, value_head, column + j] = T.cast(0.0, elem)

    return recurrent_delta


# Ops ----------------------------------------------------------------------------------------


def run_recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    a_log: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor | None,
    state_indices: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    form: int,
    normalize: bool,
    lower_bound: float,
    v_first: bool,
    final: bool,
    after: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Check the arguments, then run the kernel."""
    batch, tokens, _, value_heads, dim, value_dim = check_qkv(q, k, v)
    known = dict(batch=batch, tokens=tokens, heads=value_heads)
    channels = check.tensor(g, 'g').dim() == 4
    spec, extra = ('batch tokens heads dim', dict(dim=dim)) if channels else ('batch tokens heads', {})
    check.packed(g, 'g', spec, FLOATS, **known, **extra)
    check.packed(check.tensor(beta, 'beta'), 'beta', 'batch tokens heads', g.dtype, **known)
    check.one_of(form, (PLAIN, SIGMOID, TWICE_SIGMOID), 'form')
    check.packed(a_log, 'a_log', 'heads', torch.float32, heads=value_heads)
    columns = value_heads * (dim if channels else 1)
    check.packed(dt_bias, 'dt_bias', 'columns', torch.float32, columns=columns)
    if a_log is None and dt_bias is not None:
        check.fail('dt_bias', 'must come with a_log', 'no a_log')
    number = check_cu_seqlens(cu_seqlens, q)
    if state_indices is None:
        check_state(pool, number, value_heads, dim, value_dim, v_first)
    else:
        check.packed(state_indices, 'state_indices', 'sequences', torch.int32, sequences=number)
        rows = check.tensor(pool, 'pool').shape[0] if pool is not None else 0
        check_state(pool, rows, value_heads, dim, value_dim, v_first, 'pool', 'states')
    small = dict(g=g, beta=beta, a_log=a_log, dt_bias=dt_bias, pool=pool, state_indices=state_indices)
    check.same_device(q=q, **small)
    check_snapshots(after, v.shape, dim, v_first, q)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    shape = (number if final else 0, value_heads, *((value_dim, dim) if v_first else (dim, value_dim)))
    final_state = torch.empty(shape, dtype=torch.float32, device=v.device)
    if tokens == 0:
        if final:
            final_state.zero_() if pool is None else final_state.copy_(pool)
        return o, final_state
    gate = AS_IS if a_log is None else BOUNDED if lower_bound < 0 else SOFTPLUS
    state_dtype, indexed = None if pool is None else pool.dtype, state_indices is not None
    static: tuple = (dim, value_dim, q.dtype, g.dtype, cu_seqlens is not None, channels, form, gate, normalize)
    static += (dt_bias is not None, state_dtype, indexed, final, v_first, None if after is None else after.dtype)
    operands: tuple = (q, k, v, g, beta, a_log, dt_bias, pool, state_indices, cu_seqlens, o)
    operands += (final_state if final else None, number, scale, lower_bound, after)
    launch(recurrent_delta_kernel, static, *operands, size=v.numel())
    return o, final_state


@op(outputs='o final_state')
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
    intermediate_states: Mut | None = None,
) -> tuple[Tensor, Tensor]:
    """The delta rule token by token; see `fused_recurrent_gated_delta_rule`. There is no gradient.

    Args:
        q: (batch, tokens, heads, dim).
        k: the same.
        v: (batch, tokens, value_heads, value_dim).
        g: (batch, tokens, value_heads) or (batch, tokens, value_heads, dim), gates or their inputs.
        beta: (batch, tokens, value_heads) of the dtype of g.
        a_log: (value_heads,) float32; given, g is the input of the gate.
        dt_bias: (value_heads,) or (value_heads * dim,) float32.
        initial_state: (sequences, value_heads, dim, value_dim) float32 or bfloat16.
        cu_seqlens: (sequences + 1,) int32, where packed sequences start, and the end of the last.
        scale: factor of o.
        form: 0 takes beta as it is, 1 its sigmoid, 2 twice its sigmoid.
        normalize: divide q and k by their norm.
        lower_bound: 0 for the softplus form of the gate, else the bound of the sigmoid form.
        v_first: states are (sequences, value_heads, value_dim, dim).
        output_final_state: whether final_state is computed; otherwise it has no sequences.
        intermediate_states: (batch, tokens, value_heads, dim, value_dim) float32 or bfloat16, where the state after
            every token goes.

    Returns:
        o like v, and final_state float32.
    """
    options = (scale, form, normalize, lower_bound, v_first, output_final_state, intermediate_states)
    return run_recurrent(q, k, v, g, beta, a_log, dt_bias, initial_state, None, cu_seqlens, *options)


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BOUNDS = dict(
    o=dict(rtol=8e-3, rms=2e-3),
    final_state=dict(rtol=1e-5, atol=1e-5),
    intermediate_states=dict(rtol=8e-3, rms=1e-5),
    pool=dict(rtol=8e-3, rms=1e-5),
    rtol=1e-2,
)


def make_recurrent(
    gates: torch.dtype = F32,
    gate_form: int = AS_IS,
    bias: bool = False,
    normalize: bool = False,
    output_final_state: bool = False,
    after: torch.dtype | None = None,
    **case: Any,
) -> dict:
    """Arguments of `recurrent_delta`."""
    made = random_delta(**case)
    del made['chunk_size']
    made |= dict(g=made['g'].to(gates), beta=made['beta'].to(gates))
    if gate_form != AS_IS:
        heads, columns = made['v'].shape[2], made['g'].shape[2:].numel()
        made |= dict(a_log=torch.randn(heads), dt_bias=torch.randn(columns) if bias else None)
        made['lower_bound'] = -5.0 if gate_form == BOUNDED else 0.0
    if after is not None:
        extents = (made['v'].shape[3], made['q'].shape[3])
        extents = extents if made['v_first'] else extents[::-1]
        made['intermediate_states'] = torch.randn(*made['v'].shape[:3], *extents).to(after)
    return made | dict(normalize=normalize, output_final_state=output_final_state)


SMOKE = (
    grid(tokens=[0, 1, 3], output_final_state=[True], state=[F32])
    + grid(tokens=[2], heads=[(1, 3)], dims=[(16, 48)], batch=[2], dtype=[F16], form=[2], normalize=[True])
    + grid(tokens=[(0, 1, 0, 3)], state=[BF16], v_first=[True], behind=[2], output_final_state=[True], after=[BF16])
    + grid(tokens=[2], gate_form=[SOFTPLUS], gates=[BF16], form=[1], bias=[True])
    + grid(tokens=[2], dims=[(48, 16)], channels=[True], gate_form=[SOFTPLUS, BOUNDED], bias=[True])
)
FULL = grid(tokens=[8], heads=[(2, 6)], dims=[(128, 128), (256, 256)], batch=[3], channels=[False, True], state=[F32])
BENCH = grid(tokens=[1], heads=[(32, 32)], dims=[(128, 128)], batch=[1, 32], state=[F32], output_final_state=[True])
recurrent_delta.cases(make=make_recurrent, match=BOUNDS, smoke=SMOKE, full=FULL, bench=BENCH)
