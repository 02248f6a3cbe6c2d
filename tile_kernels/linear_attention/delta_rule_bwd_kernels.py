"""Kernels of the gradient of the delta rule. See `delta_rule` for the names.

    du  = scale P^T do + e^{G_C - G} k dS',      dx = (1 + A)^-T du,      dv = beta dx
    dS  = e^{G_C} dS' + scale (e^G q)^T do - (beta e^G k)^T dx
    dP  = scale do u^T,      dA = -dx u^T
    dq  = scale e^G do S^T + (dP e^{G_i - G_j}) k
    r   = -e^G dx S^T + (dA e^{G_i - G_j}) k
    c   = e^{G_C - G} u dS'^T + (dP e^{G_i - G_j})^T q + (beta dA e^{G_i - G_j})^T k
    dk  = beta r + c,      dbeta = k . r + dx . v
    dG  = q . dq + beta k . r - k . c,      the last one also the sums over the chunk of what decays to its end
    dg_t = sum_{i >= t} dG_i

The states before every chunk are computed again and kept for the call (`delta_states_kernel`). One kernel goes over the
chunks backwards. The last one owns a chunk of a value head and computes all that needs no order.
"""

from typing import Any

import torch

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.linear_attention.delta_rule_kernels import (
    PLAIN,
    PORTABLE,
    beta_of,
    early_decay,
    fetch_numbers,
    fetch_rows,
    fetch_square,
    find_chunk,
    find_sequence,
    late_decay,
    load_beta,
    load_decayed,
    load_state,
    load_sums,
    load_tile,
    load_undecayed,
    meets,
    padded,
    row_factors,
    state_shape,
    store_state,
    strided,
    sums_shape,
    threads_of,
    value_tile,
)


@kernel(pass_configs=PORTABLE)
def delta_dstates_kernel(
    dim: int,
    value_dim: int,
    dtype: torch.dtype,
    chunk: int,
    packed: bool,
    form: int,
    channels: bool,
    initial: torch.dtype | None,
    v_first: bool,
    final: bool,
):
    """dv, dx and the gradient of the state behind every chunk; `initial` is the dtype of the initial state."""
    batch_size, num_tokens, heads, value_heads = (
        T.dynamic(n) for n in ('batch_size', 'num_tokens', 'heads', 'v_heads')
    )
    num_starts, num_chunks, number = T.dynamic('num_starts'), T.dynamic('num_chunks'), T.dynamic('number')
    elem, wide, tile, threads = T.dtype(dtype), padded(dim), value_tile(dim, value_dim), threads_of(chunk)
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    states = state_shape(number, value_heads, dim, value_dim, v_first)
    stages = 1 if channels else 2
    rowwise = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def delta_dstates(
        do: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        q: q_type,
        k: k_type,
        g_sum: T.Tensor(sums_shape(batch_size, num_tokens, value_heads, dim, channels), T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        scores: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        inverse: T.Tensor((num_chunks, value_heads, chunk, chunk), elem),
        dfinal_state: T.Tensor(states, T.float32),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        dv: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        dx: T.Tensor((batch_size, num_tokens, value_heads, value_dim), elem),
        dh: T.Tensor((num_chunks, value_heads, dim, value_dim), elem),
        dinitial_state: T.Tensor(states, T.dtype(initial or torch.float32)),
        num_sequences: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(-(-value_dim // tile), value_heads, num_sequences, threads=threads) as (
            part,
            value_head,
            sequence,
        ):
            for stride in q_strides + k_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((stages, chunk, wide), elem)
            k_shared = T.alloc_shared((stages, chunk, wide), elem)
            do_shared = T.alloc_shared((2, chunk, tile), elem)
            scores_shared = T.alloc_shared((2, chunk, chunk), elem)
            inverse_shared = T.alloc_shared((2, chunk, chunk), elem)
            beta_shared = T.alloc_shared((2, chunk), T.float32)
            sum_shared = T.alloc_shared((2, chunk), T.float32)
            dx_shared = T.alloc_shared((chunk, tile), elem)
            dy_shared = T.alloc_shared((chunk, tile), elem)
            state_shared = T.alloc_shared((wide, tile), elem)
            factor_shared = T.alloc_shared((chunk,), T.float32)
            since_shared = T.alloc_shared((chunk,), T.float32)
            until_shared = T.alloc_shared((chunk,), T.float32)
            last_shared = T.alloc_shared((wide,), T.float32)
            state = T.alloc_fragment((wide, tile), T.float32)
            acc = T.alloc_fragment((chunk, tile), T.float32)
            fresh = T.alloc_fragment((chunk, tile), T.float32)

            own = find_sequence(cu_seqlens, sequence, num_tokens, chunk, packed)
            head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
            column = part * tile
            if final:
                load_state(dfinal_state, sequence, value_head, column, state, v_first)
            else:
                T.clear(state)
            steps = T.truncdiv(own.length + chunk - 1, chunk)
            for ahead in T.serial(steps + 1):  # one chunk is copied while the one behind it is computed
                slot, other = ahead % 2, 1 - ahead % 2
                T.ptx_wait_group(0)
                T.sync_threads()
                if ahead < steps:
                    next_step = steps - 1 - ahead
                    next_first, next_rows = own.start + next_step * chunk, own.length - next_step * chunk
                    fetch_rows(do, own.batch, next_first, value_head, next_rows, column, do_shared, slot, threads)
                    fetch_square(scores, own.index + next_step, value_head, scores_shared, slot, threads)
                    fetch_square(inverse, own.index + next_step, value_head, inverse_shared, slot, threads)
                    fetch_numbers(beta, own.batch, next_first, value_head, next_rows, beta_shared, slot)
                    if not channels:
                        fetch_rows(q, own.batch, next_first, head, next_rows, 0, q_shared, slot, threads)
                        fetch_rows(k, own.batch, next_first, head, next_rows, 0, k_shared, slot, threads)
                        fetch_numbers(g_sum, own.batch, next_first, value_head, next_rows, sum_shared, slot)
                    T.ptx_commit_group()
                if ahead > 0:
                    step = steps - ahead
                    first, rows, index = own.start + step * chunk, own.length - step * chunk, own.index + step
                    used, at = T.min(rows, chunk), 0 if channels else other
                    T.copy(state, state_shared)
                    row_factors(
                        beta_shared, sum_shared, other, factor_shared, since_shared, until_shared, form, channels
                    )
                    if channels:
                        load_decayed(q, g_sum, own.batch, first, head, value_head, used, q_shared)
                        load_undecayed(k, g_sum, own.batch, first, head, value_head, used, k_shared, last_shared)
                    for i, j in T.Parallel(wide, tile):
                        if T.And(i < dim, column + j < value_dim):
                            dh[index, value_head, i, column + j] = state_shared[i, j]

                    T.clear(acc)
                    T.gemm(k_shared[at, :, :], state_shared, acc, policy=rowwise)
                    T.clear(fresh)
                    T.gemm(scores_shared[other, :, :], do_shared[other, :, :], fresh, transpose_A=True, policy=rowwise)
                    for i, j in T.Parallel(chunk, tile):
                        later = acc[i, j] if channels else acc[i, j] * until_shared[i]
                        dx_shared[i, j] = fresh[i, j] * scale + later
                    T.clear(fresh)
                    T.gemm(inverse_shared[other, :, :], dx_shared, fresh, transpose_A=True, policy=rowwise)
                    for i, j in T.Parallel(chunk, tile):
                        if T.And(i < rows, column + j < value_dim):
                            dx[own.batch, first + i, value_head, column + j] = fresh[i, j]
                            dv[own.batch, first + i, value_head, column + j] = fresh[i, j] * factor_shared[i]
                    for i, j in T.Parallel(chunk, tile):
                        decay = T.float32(1.0) if channels else since_shared[i]
                        dx_shared[i, j] = -fresh[i, j] * (factor_shared[i] * decay)
                        dy_shared[i, j] = T.cast(do_shared[other, i, j], T.float32) * (scale * decay)
                    for i, j in T.Parallel(wide, tile):
                        state[i, j] = state[i, j] * (T.exp(last_shared[i]) if channels else since_shared[chunk - 1])
                    if channels:
                        load_decayed(k, g_sum, own.batch, first, head, value_head, used, k_shared)
                    T.gemm(q_shared[at, :, :], dy_shared, state, transpose_A=True)
                    T.gemm(k_shared[at, :, :], dx_shared, state, transpose_A=True)
            if initial is not None:
                store_state(state, dinitial_state, sequence, value_head, column, v_first)

    return delta_dstates


@macro
def load_matrix(x, index, head, column, x_shared):
    """Load columns of a state of a chunk; 0 behind its last row and column."""
    for i, j in T.Parallel(x_shared.shape[0], x_shared.shape[1]):
        inside = T.And(i < x.shape[2], column + T.truncdiv(j, 8) * 8 < x.shape[3])
        x_shared[i, j] = T.if_then_else(inside, x[index, head, i, column + j], T.cast(0.0, x_shared.dtype))


@macro
def store_rows(x, batch, first, head, rows, acc):
    """Store rows of a gradient."""
    for i, d in T.Parallel(acc.shape[0], acc.shape[1]):
        if T.And(i < rows, d < x.shape[3]):
            x[batch, first + i, head, d] = T.cast(acc[i, d], x.dtype)


@macro
def clear_rows(x, batch, first, head, rows, size: int):
    """Rows of nobody have gradient 0."""
    for i, d in T.Parallel(size, padded(x.shape[3])):
        if T.And(i < rows, d < x.shape[3]):
            x[batch, first + i, head, d] = T.cast(0.0, x.dtype)


def slope_of(x, form: int):
    """The derivative of the factor of a token by its input."""
    if form == PLAIN:
        return T.float32(1.0)
    return beta_of(x, form) / (T.float32(1.0) + T.exp(x))


@kernel(pass_configs=PORTABLE)
def delta_gradients_kernel(
    dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, grouped: bool
):
    """dq, dk, dg and dbeta of a chunk; with `grouped` heads, dq and dk are those of value heads in float32."""
    batch_size, num_tokens, heads, value_heads = (
        T.dynamic(n) for n in ('batch_size', 'num_tokens', 'heads', 'v_heads')
    )
    num_starts, num_chunks = T.dynamic('num_starts'), T.dynamic('num_chunks')
    elem, wide, tile = T.dtype(dtype), padded(dim), value_tile(dim, value_dim)
    threads = threads_of(chunk) * (1 if dim <= 128 else 2)
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    v_type, v_strides = strided('v', (batch_size, num_tokens, value_heads, value_dim), elem)
    values = (batch_size, num_tokens, value_heads, value_dim)
    out = T.float32 if grouped else elem
    rowwise = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def delta_gradients(
        do: T.Tensor(values, elem),
        q: q_type,
        k: k_type,
        v: v_type,
        g_sum: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        u: T.Tensor(values, elem),
        dx: T.Tensor(values, elem),
        h: T.Tensor((num_chunks, value_heads, dim, value_dim), elem),
        dh: T.Tensor((num_chunks, value_heads, dim, value_dim), elem),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        dq: T.Tensor((batch_size, num_tokens, value_heads, dim), out),
        dk: T.Tensor((batch_size, num_tokens, value_heads, dim), out),
        dv: T.Tensor(values, elem),
        dg: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        dbeta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(num_chunks, value_heads, threads=threads) as (index, value_head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((chunk, wide), elem)
            k_shared = T.alloc_shared((chunk, wide), elem)
            do_shared = T.alloc_shared((chunk, tile), elem)
            u_shared = T.alloc_shared((chunk, tile), elem)
            dx_shared = T.alloc_shared((chunk, tile), elem)
            h_shared = T.alloc_shared((wide, tile), elem)
            dh_shared = T.alloc_shared((wide, tile), elem)
            dp_shared = T.alloc_shared((chunk, chunk), elem)
            da_shared = T.alloc_shared((chunk, chunk), elem)
            db_shared = T.alloc_shared((chunk, chunk), elem)
            rest_shared = T.alloc_shared((chunk, chunk), elem)
            sum_shared = T.alloc_shared((chunk,), T.float32)
            beta_shared = T.alloc_shared((chunk,), T.float32)
            dsum_shared = T.alloc_shared((chunk,), T.float32)
            later_shared = T.alloc_shared((chunk,), T.float32)
            whole_shared = T.alloc_shared((wide,), T.float32)
            dq_acc = T.alloc_fragment((chunk, wide), T.float32)
            r_acc = T.alloc_fragment((chunk, wide), T.float32)
            c_acc = T.alloc_fragment((chunk, wide), T.float32)
            terms = T.alloc_fragment((chunk, wide), T.float32)
            dp = T.alloc_fragment((chunk, chunk), T.float32)
            da = T.alloc_fragment((chunk, chunk), T.float32)
            dx_terms = T.alloc_fragment((chunk, tile), T.float32)
            h_terms = T.alloc_fragment((wide, tile), T.float32)
            dx_sum = T.alloc_fragment((chunk,), T.float32)
            value_shared = T.alloc_shared((chunk,), T.float32)
            h_sum = T.alloc_fragment((wide,), T.float32)
            row_sum = T.alloc_fragment((chunk,), T.float32)
            total = T.alloc_var(T.float32, init=0.0)
            thread = T.get_thread_binding()

            own = find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, chunk, packed)
            batch, first, rows = own.batch, own.first, own.rows
            if T.And(rows > 0, own.sequence < num_sequences):
                head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
                load_tile(q, batch, first, head, rows, 0, q_shared)
                load_tile(k, batch, first, head, rows, 0, k_shared)
                load_sums(g_sum, batch, first, value_head, rows, sum_shared)
                load_beta(beta, batch, first, value_head, rows, beta_shared, form)
                T.clear(dq_acc)
                T.clear(r_acc)
                T.clear(c_acc)
                T.clear(dp)
                T.clear(da)
                T.clear(dx_sum)
                T.clear(h_sum)
                for part in T.serial(-(-value_dim // tile)):
                    column = part * tile
                    load_tile(do, batch, first, value_head, rows, column, do_shared)
                    load_tile(u, batch, first, value_head, rows, column, u_shared)
                    load_tile(dx, batch, first, value_head, rows, column, dx_shared)
                    load_matrix(h, index, value_head, column, h_shared)
                    load_matrix(dh, index, value_head, column, dh_shared)
                    T.gemm(do_shared, u_shared, dp, transpose_B=True, policy=rowwise)
                    T.gemm(dx_shared, u_shared, da, transpose_B=True, policy=rowwise)
                    T.gemm(do_shared, h_shared, dq_acc, transpose_B=True, policy=rowwise)
                    T.gemm(dx_shared, h_shared, r_acc, transpose_B=True, policy=rowwise)
                    T.gemm(u_shared, dh_shared, c_acc, transpose_B=True, policy=rowwise)
                    T.clear(dx_terms)
                    for i, j in T.Parallel(chunk, tile):
                        if T.And(i < rows, column + T.truncdiv(j, 8) * 8 < value_dim):
                            value = T.cast(v[batch, first + i, value_head, column + j], T.float32)  # type: ignore[index]
                            dx_terms[i, j] = T.cast(dx_shared[i, j], T.float32) * value
                    T.reduce_sum(dx_terms, dx_sum, dim=1, clear=False)
                    for i, j in T.Parallel(wide, tile):
                        h_terms[i, j] = T.cast(h_shared[i, j], T.float32) * T.cast(dh_shared[i, j], T.float32)
                    T.reduce_sum(h_terms, h_sum, dim=1, clear=False)

                # What passes through the states.
                for i, d in T.Parallel(chunk, wide):
                    dq_acc[i, d] = dq_acc[i, d] * (scale * T.exp(sum_shared[i]))
                    r_acc[i, d] = -r_acc[i, d] * T.exp(sum_shared[i])
                    c_acc[i, d] = c_acc[i, d] * T.exp(sum_shared[chunk - 1] - sum_shared[i])
                for i, d in T.Parallel(chunk, wide):
                    terms[i, d] = c_acc[i, d] * T.cast(k_shared[i, d], T.float32)
                T.reduce_sum(terms, row_sum, dim=1)
                T.copy(row_sum, later_shared)
                T.copy(h_sum, whole_shared)
                T.copy(dx_sum, value_shared)

                # What passes inside the chunk.
                for i, j in T.Parallel(chunk, chunk):
                    decay = T.exp(sum_shared[i] - sum_shared[j])
                    dp[i, j] = T.if_then_else(j <= i, dp[i, j] * (scale * decay), T.float32(0.0))
                    da[i, j] = T.if_then_else(j < i, -da[i, j] * decay, T.float32(0.0))
                for i, j in T.Parallel(chunk, chunk):
                    dp_shared[i, j] = dp[i, j]
                    da_shared[i, j] = da[i, j]
                    db_shared[i, j] = da[i, j] * beta_shared[i]
                for i, j in T.Parallel(chunk, chunk):
                    rest_shared[i, j] = dp[i, j] - T.cast(T.cast(dp[i, j], elem), T.float32)
                T.gemm(dp_shared, k_shared, dq_acc, policy=rowwise)
                T.gemm(da_shared, k_shared, r_acc, policy=rowwise)
                T.gemm(dp_shared, q_shared, c_acc, transpose_A=True, policy=rowwise)
                T.gemm(db_shared, k_shared, c_acc, transpose_A=True, policy=rowwise)

                for i, d in T.Parallel(chunk, wide):
                    terms[i, d] = r_acc[i, d] * T.cast(k_shared[i, d], T.float32)
                T.reduce_sum(terms, row_sum, dim=1)
                for i in T.Parallel(chunk):
                    if i < rows:
                        slope = slope_of(beta[batch, first + i, value_head], form)
                        dbeta[batch, first + i, value_head] = (row_sum[i] + value_shared[i]) * slope
                for i, d in T.Parallel(chunk, wide):
                    r_acc[i, d] = r_acc[i, d] * beta_shared[i]
                    terms[i, d] = dq_acc[i, d] * T.cast(q_shared[i, d], T.float32) + (
                        r_acc[i, d] - c_acc[i, d]
                    ) * T.cast(k_shared[i, d], T.float32)
                    c_acc[i, d] = c_acc[i, d] + r_acc[i, d]
                T.reduce_sum(terms, row_sum, dim=1)
                T.copy(row_sum, dsum_shared)
                # With equal keys dq is a telescoping sum. dg needs dq without this: its pairs cancel.
                T.gemm(rest_shared, k_shared, dq_acc, policy=rowwise)
                store_rows(dq, batch, first, value_head, rows, dq_acc)
                store_rows(dk, batch, first, value_head, rows, c_acc)
                T.sync_threads()
                for d in T.serial(wide):
                    total = total + whole_shared[d]
                total = total * T.exp(sum_shared[chunk - 1])
                for i in T.serial(chunk):
                    total = total + later_shared[i]
                for i in T.serial(chunk):
                    total = total + T.if_then_else(i >= thread, dsum_shared[T.min(i, chunk - 1)], T.float32(0.0))
                if thread < rows:
                    dg[batch, first + thread, value_head] = total
            elif rows > 0:
                clear_rows(dq, batch, first, value_head, rows, chunk)
                clear_rows(dk, batch, first, value_head, rows, chunk)
                clear_rows(dv, batch, first, value_head, rows, chunk)
                for i in T.Parallel(chunk):
                    if i < rows:
                        dg[batch, first + i, value_head] = 0.0
                        dbeta[batch, first + i, value_head] = 0.0

    return delta_gradients


def rounded(x: Any, decay: Any, elem: Any) -> Any:
    """A row times its decay, as the products read it."""
    return T.cast(T.cast(T.cast(x, T.float32) * decay, elem), T.float32)


@kernel(pass_configs=PORTABLE)
def delta_channel_gradients_kernel(
    dim: int, value_dim: int, dtype: torch.dtype, chunk: int, packed: bool, form: int, grouped: bool
):
    """`delta_gradients_kernel` for gates of every channel; pairs of rows are taken as `delta_channel_scores_kernel`."""
    batch_size, num_tokens = T.dynamic('batch_size'), T.dynamic('num_tokens')
    heads, value_heads = T.dynamic('heads'), T.dynamic('value_heads')
    num_starts, num_chunks = T.dynamic('num_starts'), T.dynamic('num_chunks')
    elem, wide, tile = T.dtype(dtype), padded(dim), 32
    threads = threads_of(chunk) * (1 if dim <= 128 else 2)
    levels = chunk.bit_length() - 1
    q_type, q_strides = strided('q', (batch_size, num_tokens, heads, dim), elem)
    k_type, k_strides = strided('k', (batch_size, num_tokens, heads, dim), elem)
    v_type, v_strides = strided('v', (batch_size, num_tokens, value_heads, value_dim), elem)
    values = (batch_size, num_tokens, value_heads, value_dim)
    out = T.float32 if grouped else elem
    rowwise = T.GemmWarpPolicy.FullRow

    @T.prim_func
    def delta_channel_gradients(
        do: T.Tensor(values, elem),
        q: q_type,
        k: k_type,
        v: v_type,
        g_sum: T.Tensor((batch_size, num_tokens, value_heads, dim), T.float32),
        beta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        u: T.Tensor(values, elem),
        dx: T.Tensor(values, elem),
        h: T.Tensor((num_chunks, value_heads, dim, value_dim), elem),
        dh: T.Tensor((num_chunks, value_heads, dim, value_dim), elem),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        dq: T.Tensor((batch_size, num_tokens, value_heads, dim), out),
        dk: T.Tensor((batch_size, num_tokens, value_heads, dim), out),
        dv: T.Tensor(values, elem),
        dg: T.Tensor((batch_size, num_tokens, value_heads, dim), T.float32),
        dbeta: T.Tensor((batch_size, num_tokens, value_heads), T.float32),
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(num_chunks, value_heads, threads=threads) as (index, value_head):
            for stride in q_strides + k_strides + v_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((chunk, wide), elem)
            k_shared = T.alloc_shared((chunk, wide), elem)
            scaled_q = T.alloc_shared((chunk, wide), elem)
            scaled_k = T.alloc_shared((chunk, wide), elem)
            do_shared = T.alloc_shared((chunk, tile), elem)
            u_shared = T.alloc_shared((chunk, tile), elem)
            dx_shared = T.alloc_shared((chunk, tile), elem)
            h_shared = T.alloc_shared((wide, tile), elem)
            dh_shared = T.alloc_shared((wide, tile), elem)
            dp_shared = T.alloc_shared((chunk, chunk), elem)
            da_shared = T.alloc_shared((chunk, chunk), elem)
            all_dp = T.alloc_shared((chunk, chunk), elem)
            all_da = T.alloc_shared((chunk, chunk), elem)
            sum_shared = T.alloc_shared((chunk, wide), T.float32)
            dsum_shared = T.alloc_shared((chunk, wide), T.float32)
            beta_shared = T.alloc_shared((chunk,), T.float32)
            diagonal_shared = T.alloc_shared((chunk,), T.float32)
            value_shared = T.alloc_shared((chunk,), T.float32)
            later_shared = T.alloc_shared((wide,), T.float32)
            whole_shared = T.alloc_shared((wide,), T.float32)
            acc = T.alloc_fragment((chunk, wide), T.float32)
            r_acc = T.alloc_fragment((chunk, wide), T.float32)
            terms = T.alloc_fragment((chunk, wide), T.float32)
            dp = T.alloc_fragment((chunk, chunk), T.float32)
            da = T.alloc_fragment((chunk, chunk), T.float32)
            dx_terms = T.alloc_fragment((chunk, tile), T.float32)
            h_terms = T.alloc_fragment((wide, tile), T.float32)
            dx_sum = T.alloc_fragment((chunk,), T.float32)
            h_sum = T.alloc_fragment((wide,), T.float32)
            row_sum = T.alloc_fragment((chunk,), T.float32)
            column_sum = T.alloc_fragment((wide,), T.float32)
            total = T.alloc_var(T.float32, init=0.0)
            thread = T.get_thread_binding()

            own = find_chunk(cu_seqlens, index, num_sequences, bits, num_tokens, chunk, packed)
            batch, first, rows = own.batch, own.first, own.rows
            if T.And(rows > 0, own.sequence < num_sequences):
                head = T.truncdiv(value_head, T.truncdiv(value_heads, heads))
                load_tile(q, batch, first, head, rows, 0, q_shared)
                load_tile(k, batch, first, head, rows, 0, k_shared)
                load_beta(beta, batch, first, value_head, rows, beta_shared, form)
                for i, d in T.Parallel(chunk, wide):
                    sum_shared[i, d] = T.if_then_else(
                        T.truncdiv(d, 4) * 4 < dim,
                        g_sum[batch, first + T.min(i, rows - 1), value_head, d],
                        T.float32(0.0),
                    )

                # dq and r, which belong to the later row of a pair.
                T.clear(acc)
                T.clear(r_acc)
                T.clear(dp)
                T.clear(da)
                T.clear(dx_sum)
                for part in T.serial(-(-value_dim // tile)):
                    column = part * tile
                    load_tile(do, batch, first, value_head, rows, column, do_shared)
                    load_tile(u, batch, first, value_head, rows, column, u_shared)
                    load_tile(dx, batch, first, value_head, rows, column, dx_shared)
                    load_matrix(h, index, value_head, column, h_shared)
                    T.gemm(do_shared, u_shared, dp, transpose_B=True, policy=rowwise)
                    T.gemm(dx_shared, u_shared, da, transpose_B=True, policy=rowwise)
                    T.gemm(do_shared, h_shared, acc, transpose_B=True, policy=rowwise)
                    T.gemm(dx_shared, h_shared, r_acc, transpose_B=True, policy=rowwise)
                    T.clear(dx_terms)
                    for i, j in T.Parallel(chunk, tile):
                        if T.And(i < rows, column + T.truncdiv(j, 8) * 8 < value_dim):
                            value = T.cast(v[batch, first + i, value_head, column + j], T.float32)  # type: ignore[index]
                            dx_terms[i, j] = T.cast(dx_shared[i, j], T.float32) * value
                    T.reduce_sum(dx_terms, dx_sum, dim=1, clear=False)
                T.copy(dx_sum, value_shared)
                for i, d in T.Parallel(chunk, wide):
                    acc[i, d] = acc[i, d] * (scale * T.exp(sum_shared[i, d]))
                    r_acc[i, d] = -r_acc[i, d] * T.exp(sum_shared[i, d])
                for i, j in T.Parallel(chunk, chunk):
                    all_dp[i, j] = dp[i, j] * scale  # kept here: the registers are needed for sums
                    all_da[i, j] = -da[i, j]
                    if i == j:
                        diagonal_shared[i] = dp[i, j] * scale
                # Sums of dg cancel pair by pair. Both sides of a pair therefore multiply the same rounded rows.
                for i, d in T.Parallel(chunk, wide):
                    dsum_shared[i, d] = acc[i, d] * T.cast(q_shared[i, d], T.float32) + (
                        r_acc[i, d] * beta_shared[i]
                    ) * T.cast(k_shared[i, d], T.float32)
                for level in T.serial(levels):
                    for i, d in T.Parallel(chunk, wide):
                        scaled_k[i, d] = T.cast(k_shared[i, d], T.float32) * early_decay(sum_shared, i, d, level)
                    for i, j in T.Parallel(chunk, chunk):
                        used = meets(i, j, level)
                        dp_shared[i, j] = T.if_then_else(used, all_dp[i, j], T.cast(0.0, elem))
                        da_shared[i, j] = T.if_then_else(used, all_da[i, j], T.cast(0.0, elem))
                    T.clear(terms)
                    T.gemm(dp_shared, scaled_k, terms, policy=rowwise)
                    for i, d in T.Parallel(chunk, wide):
                        late = late_decay(sum_shared, i, d, level)
                        acc[i, d] = acc[i, d] + terms[i, d] * late
                        dsum_shared[i, d] = dsum_shared[i, d] + terms[i, d] * rounded(q_shared[i, d], late, elem)
                    T.clear(terms)
                    T.gemm(da_shared, scaled_k, terms, policy=rowwise)
                    for i, d in T.Parallel(chunk, wide):
                        late = late_decay(sum_shared, i, d, level)
                        r_acc[i, d] = r_acc[i, d] + terms[i, d] * late
                        dsum_shared[i, d] = dsum_shared[i, d] + terms[i, d] * rounded(
                            k_shared[i, d], late * beta_shared[i], elem
                        )
                for i, d in T.Parallel(chunk, wide):
                    acc[i, d] = acc[i, d] + diagonal_shared[i] * T.cast(k_shared[i, d], T.float32)
                    terms[i, d] = r_acc[i, d] * T.cast(k_shared[i, d], T.float32)
                T.reduce_sum(terms, row_sum, dim=1)
                for i in T.Parallel(chunk):
                    if i < rows:
                        slope = slope_of(beta[batch, first + i, value_head], form)
                        dbeta[batch, first + i, value_head] = (row_sum[i] + value_shared[i]) * slope
                for i, d in T.Parallel(chunk, wide):
                    r_acc[i, d] = r_acc[i, d] * beta_shared[i]
                store_rows(dq, batch, first, value_head, rows, acc)

                # c, which belongs to the earlier row.
                T.clear(acc)
                T.clear(h_sum)
                for part in T.serial(-(-value_dim // tile)):
                    column = part * tile
                    load_tile(u, batch, first, value_head, rows, column, u_shared)
                    load_matrix(h, index, value_head, column, h_shared)
                    load_matrix(dh, index, value_head, column, dh_shared)
                    T.gemm(u_shared, dh_shared, acc, transpose_B=True, policy=rowwise)
                    for i, j in T.Parallel(wide, tile):
                        h_terms[i, j] = T.cast(h_shared[i, j], T.float32) * T.cast(dh_shared[i, j], T.float32)
                    T.reduce_sum(h_terms, h_sum, dim=1, clear=False)
                T.copy(h_sum, whole_shared)
                for i, d in T.Parallel(chunk, wide):
                    acc[i, d] = acc[i, d] * T.exp(sum_shared[chunk - 1, d] - sum_shared[i, d])
                    terms[i, d] = acc[i, d] * T.cast(k_shared[i, d], T.float32)
                for i, d in T.Parallel(chunk, wide):
                    dsum_shared[i, d] = dsum_shared[i, d] - terms[i, d]
                T.reduce_sum(terms, column_sum, dim=0)
                T.copy(column_sum, later_shared)
                for level in T.serial(levels):
                    for i, d in T.Parallel(chunk, wide):
                        late = late_decay(sum_shared, i, d, level)
                        scaled_q[i, d] = T.cast(q_shared[i, d], T.float32) * late
                        scaled_k[i, d] = T.cast(k_shared[i, d], T.float32) * (late * beta_shared[i])
                    for i, j in T.Parallel(chunk, chunk):
                        used = meets(i, j, level)
                        dp_shared[i, j] = T.if_then_else(used, all_dp[i, j], T.cast(0.0, elem))
                        da_shared[i, j] = T.if_then_else(used, all_da[i, j], T.cast(0.0, elem))
                    T.clear(terms)
                    T.gemm(dp_shared, scaled_q, terms, transpose_A=True, policy=rowwise)
                    T.gemm(da_shared, scaled_k, terms, transpose_A=True, policy=rowwise)
                    for i, d in T.Parallel(chunk, wide):
                        early = early_decay(sum_shared, i, d, level)
                        acc[i, d] = acc[i, d] + terms[i, d] * early
                        dsum_shared[i, d] = dsum_shared[i, d] - terms[i, d] * rounded(k_shared[i, d], early, elem)
                T.sync_threads()
                for d in T.Parallel(wide):
                    later_shared[d] = later_shared[d] + whole_shared[d] * T.exp(sum_shared[chunk - 1, d])
                for i, d in T.Parallel(chunk, wide):
                    acc[i, d] = acc[i, d] + diagonal_shared[i] * T.cast(q_shared[i, d], T.float32) + r_acc[i, d]
                store_rows(dk, batch, first, value_head, rows, acc)
                T.sync_threads()
                for block in T.serial(-(-dim // threads)):
                    column = block * threads + thread
                    if column < dim:
                        total = later_shared[column]
                        for back in T.serial(chunk):
                            i = chunk - 1 - back
                            if i < rows:
                                total = total + dsum_shared[i, column]
                                dg[batch, first + i, value_head, column] = total
            elif rows > 0:
                clear_rows(dq, batch, first, value_head, rows, chunk)
                clear_rows(dk, batch, first, value_head, rows, chunk)
                clear_rows(dv, batch, first, value_head, rows, chunk)
                clear_rows(dg, batch, first, value_head, rows, chunk)
                for i in T.Parallel(chunk):
                    if i < rows:
                        dbeta[batch, first + i, value_head] = 0.0

    return delta_channel_gradients


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def delta_group_kernel(dim: int, dtype: torch.dtype):
    """Sum gradients of q and k over the value heads of a head, in their order."""
    num_rows, num_values = T.dynamic('num_rows'), T.dynamic('num_values')
    elem, block, threads = T.dtype(dtype), 4, 64
    wide = -(-dim // 64) * 64

    @T.prim_func
    def delta_group(
        wide_dq: T.Tensor((num_values, dim), T.float32),
        wide_dk: T.Tensor((num_values, dim), T.float32),
        dq: T.Tensor((num_rows, dim), elem),
        dk: T.Tensor((num_rows, dim), elem),
        group: T.int32,
    ):
        with T.Kernel(T.ceildiv(num_rows, block), threads=threads) as pid:
            q_sum = T.alloc_fragment((block, wide), T.float32)
            k_sum = T.alloc_fragment((block, wide), T.float32)
            T.clear(q_sum)
            T.clear(k_sum)
            for member in T.serial(group):
                for i, d in T.Parallel(block, wide):
                    if T.And(pid * block + i < num_rows, d < dim):
                        q_sum[i, d] = q_sum[i, d] + wide_dq[(pid * block + i) * group + member, d]
                        k_sum[i, d] = k_sum[i, d] + wide_dk[(pid * block + i) * group + member, d]
            for i, d in T.Parallel(block, wide):
                if T.And(pid * block + i < num_rows, d < dim):
                    dq[pid * block + i, d] = T.cast(q_sum[i, d], elem)
                    dk[pid * block + i, d] = T.cast(k_sum[i, d], elem)

    return delta_group
