"""One or a few tokens of linear attention with a decay, for decoding; states may live in a pool and change in place.

    S[t] = exp(g[t]) * S[t - 1] + weight[t] * k[t] (x) v[t]            g for each head, or for each channel of k
    o[t] = scale * S[t]^T q[t]

A thread block owns 32 value columns of the state of one sequence and head, in registers. Memory bound: the floor is
reading and writing the states.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.linear_attention._checks import (
    check_cu_seqlens,
    check_gate,
    check_qkv,
    check_snapshots,
    check_state,
    dense,
    lengths_int32,
    refuse,
    refuse_gradient,
    scale_of,
    single,
)
from tile_kernels.linear_attention._samples import random_recurrent
from tile_kernels.linear_attention.chunk_simple_gla_kernels import LOG2E, strided

COLUMNS = 32
THREADS = 128


def power_of_two(dim: int) -> int:
    """Rows of a tile of the state; those behind the last hold 0."""
    return 1 << (dim - 1).bit_length()


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def recurrent_gla_kernel(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    gate_dims: int,
    gate_dtype: torch.dtype,
    weighted: bool,
    packed: bool,
    begin_dtype: torch.dtype | None,
    end_dtype: torch.dtype | None,
    pooled: bool,
    indexed: bool,
    v_first: bool,
    after_dtype: torch.dtype | None,
):
    """`gate_dims` is 0 without a gate, 3 for one of each head, 4 for one of each channel. A pool is `end`.

    With `after_dtype` the state after every token goes to `after`.
    """
    batches, num_tokens, num_heads = T.dynamic('batches'), T.dynamic('num_tokens'), T.dynamic('num_heads')
    q_heads, num_cuts, num_begin, num_end = (T.dynamic(n) for n in ('q_heads', 'num_cuts', 'n_begin', 'n_end'))
    elem, wide = T.dtype(dtype), power_of_two(dim)
    q_type, _ = strided('q', (batches, num_tokens, q_heads, dim), elem)
    k_type, _ = strided('k', (batches, num_tokens, q_heads, dim), elem)
    v_type, _ = strided('v', (batches, num_tokens, num_heads, value_dim), elem)
    g_shape: tuple = (batches, num_tokens, num_heads, dim) if gate_dims == 4 else (batches, num_tokens, num_heads)
    g_type, _ = strided('g', g_shape, T.dtype(gate_dtype), 1 if gate_dims == 4 else 0)
    w_type, _ = strided('w', (batches, num_tokens, num_heads), T.float32, 0)
    rows = (value_dim, dim) if v_first else (dim, value_dim)
    begin_type = T.Tensor((num_begin, num_heads, *rows), T.dtype(begin_dtype or torch.float32))
    end_type = T.Tensor((num_end, num_heads, *rows), T.dtype(end_dtype or torch.float32))
    after_type = T.Tensor((batches, num_tokens, num_heads, *rows), T.dtype(after_dtype or torch.float32))
    shape = (COLUMNS, wide) if v_first else (wide, COLUMNS)

    @T.prim_func
    def recurrent_gla(
        q: q_type,
        k: k_type,
        v: v_type,
        g: g_type,
        weight: w_type,
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        begin: begin_type,
        indices: T.Tensor((num_cuts - 1 if packed else batches,), T.int32),
        end: end_type,
        o: T.Tensor((batches, num_tokens, num_heads, value_dim), elem),
        num_sequences: T.int32,
        scale: T.float32,
        after: after_type,
    ):
        with T.Kernel(num_sequences + (1 if packed else 0), num_heads, -(-value_dim // COLUMNS), threads=THREADS) as (
            sequence,
            head,
            tile,
        ):
            state = T.alloc_fragment(shape, T.float32)
            terms = T.alloc_fragment(shape, T.float32)
            sums = T.alloc_fragment((COLUMNS,), T.float32)
            q_shared = T.alloc_shared((wide,), T.float32)
            k_shared = T.alloc_shared((wide,), T.float32)
            g_shared = T.alloc_shared((wide,), T.float32)
            v_shared = T.alloc_shared((COLUMNS,), T.float32)
            column = tile * COLUMNS
            qk_head = T.truncdiv(head * q_heads, num_heads)
            batch = T.alloc_var(T.int32, init=0)
            start = T.alloc_var(T.int32, init=0)
            stop = T.alloc_var(T.int32, init=0)
            slot = T.alloc_var(T.int32, init=-1)  # where the state is; -1 is nowhere
            if packed:
                start = T.min(cu_seqlens[sequence], num_tokens)
                stop = num_tokens
                if sequence < num_sequences:
                    stop = T.min(cu_seqlens[T.min(sequence + 1, num_sequences)], num_tokens)
            else:
                batch = sequence
                stop = num_tokens
            if sequence < num_sequences:
                slot = sequence
                if indexed:
                    slot = indices[sequence]
                if pooled:  # noqa: SIM102 - known when the kernel is built
                    if slot >= num_end:
                        slot = -1
            if slot < 0:  # no sequence, or one to skip
                for t in T.serial(stop - start):
                    for e in T.Parallel(COLUMNS):
                        if column + e < value_dim:
                            o[batch, start + t, head, column + e] = T.cast(0.0, elem)
            else:
                T.clear(state)
                if pooled or begin_dtype is not None:
                    source = end if pooled else begin
                    for a, b in T.Parallel(*shape):
                        d, e = (b, a) if v_first else (a, b)
                        first, second = (column + e, d) if v_first else (d, column + e)
                        if T.And(d < dim, column + e < value_dim):
                            state[a, b] = T.cast(source[slot, head, first, second], T.float32)  # type: ignore[index]
                for t in T.serial(stop - start):
                    token = start + t
                    for d in T.Parallel(wide):
                        here = T.min(d, dim - 1)
                        q_shared[d] = T.cast(q[batch, token, qk_head, here], T.float32) * scale  # type: ignore[index]
                        k_shared[d] = T.cast(k[batch, token, qk_head, here], T.float32)  # type: ignore[index]
                        if weighted:
                            k_shared[d] = k_shared[d] * weight[batch, token, head]  # type: ignore[index]
                        if gate_dims == 4:
                            g_shared[d] = T.exp2(T.cast(g[batch, token, head, here], T.float32) * LOG2E)  # type: ignore[index]
                        if d >= dim:
                            q_shared[d] = 0.0
                            k_shared[d] = 0.0
                    for e in T.Parallel(COLUMNS):
                        v_shared[e] = T.cast(v[batch, token, head, T.min(column + e, value_dim - 1)], T.float32)  # type: ignore[index]
                    T.sync_threads()
                    decay = (
                        T.exp2(T.cast(g[batch, token, head], T.float32) * LOG2E) if gate_dims == 3 else T.float32(1.0)  # type: ignore[index]
                    )
                    for a, b in T.Parallel(*shape):
                        d, e = (b, a) if v_first else (a, b)
                        factor = g_shared[d] if gate_dims == 4 else decay
                        kept = state[a, b] * factor if gate_dims > 0 else state[a, b]
                        state[a, b] = kept + k_shared[d] * v_shared[e]
                        terms[a, b] = state[a, b] * q_shared[d]
                    T.reduce_sum(terms, sums, dim=1 if v_first else 0)
                    for e in T.Parallel(COLUMNS):
                        if column + e < value_dim:
                            o[batch, token, head, column + e] = T.cast(sums[e], elem)
                    if after_dtype is not None:
                        for a, b in T.Parallel(*shape):
                            d, e = (b, a) if v_first else (a, b)
                            first, second = (column + e, d) if v_first else (d, column + e)
                            if T.And(d < dim, column + e < value_dim):
                                after[batch, token, head, first, second] = state[a, b]  # type: ignore[index]
                    T.sync_threads()
                if end_dtype is not None:
                    for a, b in T.Parallel(*shape):
                        d, e = (b, a) if v_first else (a, b)
                        first, second = (column + e, d) if v_first else (d, column + e)
                        if T.And(d < dim, column + e < value_dim):
                            end[slot, head, first, second] = state[a, b]  # type: ignore[index]

    return recurrent_gla


@op(outputs='o final_state')
def _fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    weight: Tensor | None = None,
    initial_state: Tensor | None = None,
    pool: Mut | None = None,
    state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float = 1.0,
    output_final_state: bool = False,
    state_v_first: bool = False,
    intermediate_states: Mut | None = None,
) -> tuple[Tensor, Tensor]:
    """A few tokens of linear attention with a decay; see the public function.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16.
        k: like q.
        v: (batch, tokens, value_heads, value_dim); value_heads is a multiple of heads.
        g: (batch, tokens, value_heads) or (batch, tokens, value_heads, dim), logarithms of the decay.
        weight: (batch, tokens, value_heads) float32, factors of what a token adds to the state.
        initial_state: (sequences, value_heads, dim, value_dim) float32 or bfloat16.
        pool: (slots, value_heads, dim, value_dim), states that are read and written in place instead.
        state_indices: (sequences,) int32, the slot of every sequence in the pool, its own number unless given; -1 skips
            a sequence.
        cu_seqlens: (sequences + 1,) int32, where packed sequences start, and the end of the last; batch is then 1.
        scale: factor of o.
        output_final_state: whether to return the final state; not with a pool.
        state_v_first: whether states are (sequences, value_heads, value_dim, dim).
        intermediate_states: (batch, tokens, value_heads, dim, value_dim) float32 or bfloat16, where the state after
            every token goes; not those of sequences that are skipped.

    Returns:
        o, contiguous with the dtype of q, and the final state in float32, (0,) unless it is wanted.
    """
    batch, tokens, _, heads, dim, value_dim = check_qkv(q, k, v)
    number = check_cu_seqlens(cu_seqlens, q)
    known = dict(batch=batch, tokens=tokens, heads=heads)
    if g is not None and check.tensor(g, 'g').dim() == 4:
        check_gate(g, 'g', 'batch tokens heads dim', q, dim=dim, **known)
        check.unit_stride(g, 'g')
    else:
        check_gate(g, 'g', 'batch tokens heads', q, **known)
    check_gate(weight, 'weight', 'batch tokens heads', q, **known)
    if weight is not None:
        check.dtype(weight, 'weight', torch.float32)
    if pool is None and state_indices is not None:
        check.fail('pool', 'must be given with state_indices', 'None')
    check_state(initial_state, number, heads, dim, value_dim, state_v_first)
    if pool is not None:
        slots = check.tensor(pool, 'pool').shape[0] if pool.dim() else 0
        check_state(pool, slots, heads, dim, value_dim, state_v_first, 'pool', 'slots')
        check.packed(state_indices, 'state_indices', 'sequences', torch.int32, sequences=number)
        if initial_state is not None or output_final_state:
            check.fail('pool', 'must come without initial_state and output_final_state', 'both')
    check.same_device(q=q, initial_state=initial_state, pool=pool, state_indices=state_indices)
    check_snapshots(intermediate_states, v.shape, dim, state_v_first, q)
    o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    rows = (value_dim, dim) if state_v_first else (dim, value_dim)
    shape = (number, heads, *rows) if output_final_state else (0,)
    final = torch.empty(shape, dtype=torch.float32, device=q.device)
    if v.numel() == 0:
        if output_final_state:
            final.zero_() if initial_state is None else final.copy_(initial_state)
        return o, final
    end = pool if pool is not None else final if output_final_state else None
    static: tuple = (dim, value_dim, q.dtype, 0 if g is None else g.dim(), torch.float32 if g is None else g.dtype)
    static += (weight is not None, cu_seqlens is not None, None if initial_state is None else initial_state.dtype)
    static += (None if end is None else end.dtype, pool is not None, state_indices is not None, state_v_first)
    static += (None if intermediate_states is None else intermediate_states.dtype,)
    operands = (q, k, v, g, weight, cu_seqlens, initial_state, state_indices, end, o, number, scale)
    launch(recurrent_gla_kernel, static, *operands, intermediate_states, size=batch * tokens * heads)
    return o, final


@_fused_recurrent_gla.public
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
    state_v_first: bool = False,
    state_indices: Tensor | None = None,
    intermediate_states: Tensor | None = None,
    **foreign: Any,
) -> tuple[Tensor, Tensor | None]:
    """A few tokens of linear attention with a decay for each channel of k; no gradient. Takes the calls of fla.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16; dim is a multiple of 16 up to 256.
        k: like q.
        v: (batch, tokens, value_heads, value_dim); value_heads is a multiple of heads.
        gk: (batch, tokens, value_heads, dim) logarithms of the decay, at most 0, of any floating dtype.
        gv: accepted if None.
        scale: factor of o, dim ** -0.5 unless given.
        initial_state: (sequences, value_heads, dim, value_dim) float32 or bfloat16, 0 unless given.
        output_final_state: whether to return the final state.
        reverse: accepted if False.
        cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends; batch is then 1.
        g: another name of gk.
        state_v_first: whether states are (sequences, value_heads, value_dim, dim).
        state_indices: (sequences,) int32, slots of a pool of states. The pool is `initial_state`; its states are read
            and written in place. -1 skips a sequence, whose o is 0.
        intermediate_states: (batch, tokens, value_heads, dim, value_dim) float32 or bfloat16: the state after every
            token is written to it, but for sequences that are skipped. With `state_v_first` the last two are swapped.
        foreign: arguments of fla that have no meaning here, at their neutral value.

    Returns:
        o (batch, tokens, value_heads, value_dim), and the final state in float32 or None; with `state_indices` the
        pool instead of it.
    """
    refuse(dict(foreign, gv=gv, reverse=reverse))
    if gk is not None and g is not None:
        check.fail('g', 'must not come with another name of the same argument', 'both')
    gk = single(g if gk is None else gk, 'gk')
    if gk is not None:
        check.shape(gk, 'gk', 'batch tokens heads dim')
    states = (initial_state, output_final_state, state_v_first, state_indices, intermediate_states)
    return recur(q, k, v, gk, scale, *states, cu_seqlens)


def recur(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    scale: float | None,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    state_indices: Tensor | None,
    intermediate_states: Tensor | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Call the op for the public functions, which have checked g."""
    refuse_gradient(q=q, k=k, v=v, g=g, initial_state=initial_state, intermediate_states=intermediate_states)
    q, k, v = autocast(q, k, v)
    dim = check.shape(q, 'q', 'batch tokens heads dim')[3]
    cuts, indices = lengths_int32(cu_seqlens, 'cu_seqlens'), lengths_int32(state_indices, 'state_indices')
    pooled = indices is not None
    if pooled and initial_state is None:
        check.fail('initial_state', 'must be a pool of states with state_indices', 'None')
    begin, pool = (None, initial_state) if pooled else (dense(initial_state), None)
    options = (cuts, scale_of(scale, dim), output_final_state and not pooled, state_v_first, intermediate_states)
    o, final = fused_recurrent_gla.call(q, k, v, g, None, begin, pool, indices, *options)
    return o, (initial_state if pooled else final) if output_final_state else None


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
fused_recurrent_gla.cases(
    make=random_recurrent,
    match=dict(rtol=8e-3, atol=1e-4, rms=1e-3),
    smoke=grid(tokens=[0, 1], heads=[(1, 1)], dims=[(16, 16)], gate=[''])
    + grid(tokens=[3], heads=[(1, 2)], dims=[(48, 80)], gate=['head', 'channel'], batch=[2], state=[F32], final=[True])
    + grid(
        tokens=[2],
        heads=[(2, 2)],
        dims=[(32, 16)],
        gate=['channel'],
        dtype=[F16],
        state=[BF16],
        v_first=[True],
        after=[F32],
    )
    + grid(tokens=[1], heads=[(1, 2)], dims=[(16, 48)], gate=['head'], batch=[4], pool=[F32, BF16], weighted=[True])
    + grid(tokens=[1], heads=[(1, 1)], dims=[(16, 16)], gate=['head'], batch=[2], pool=[F32], indexed=[False])
    + grid(
        tokens=[(0, 2, 0, 1)],
        heads=[(1, 1)],
        dims=[(16, 32)],
        gate=['head'],
        pool=[F32],
        v_first=[True],
        behind=[2],
        after=[BF16],
    )
    + grid(tokens=[(1, 0)], heads=[(1, 1)], dims=[(16, 16)], gate=['channel'], state=[F32], final=[True], behind=[1]),
    full=grid(tokens=[1, 8, 65], heads=[(2, 4)], dims=[(128, 128), (256, 64)], gate=['head', 'channel'], batch=[3])
    + grid(tokens=[1], heads=[(4, 4)], dims=[(128, 128)], gate=['head'], batch=[64], pool=[F32], v_first=[False, True]),
    bench=grid(tokens=[1], heads=[(32, 32)], dims=[(128, 128)], gate=['head'], batch=[32, 1], pool=[F32])
    + grid(tokens=[1], heads=[(32, 32)], dims=[(128, 128)], gate=['channel'], batch=[32], pool=[F32], v_first=[True])
    + grid(tokens=[4], heads=[(32, 32)], dims=[(128, 128)], gate=['head'], batch=[32], state=[F32], final=[True]),
)
