"""Kernel of `pre_bwd` between `apply_mix_bwd_kernel` and `norm_fn_bwd_kernel`: gradients of the coefficients.

    dz[t]    = gradients through sigmoid and Sinkhorn                           see `split_mixes`, `sinkhorn`
    o[t]     = dz[t] scale rstd[t], rounded to TF32, in two parts               see `norm_fn_bwd_kernels.py`
    pull[t]  = factor of the residual in its gradient
    parts of dscale and dbase: sums over the tokens of a warp

The coefficients of a token are 2 + n rows of n: pre, post, and the rows of comb. As in Sinkhorn a few lanes own a
token, each with the same columns of all rows. Latency bound by Sinkhorn.
"""

from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T
from tile_kernels.mhc._checks import num_mixes
from tile_kernels.mhc._macros import affine, high_of, round_to_tf32, sigmoid
from tile_kernels.mhc.norm_fn_bwd_kernels import clear_dfn
from tile_kernels.mhc.sinkhorn_kernels import columns_of, lanes_for, load_matrix, sum_lanes, unscale_matrix


def tokens_of_a_warp(num_streams: int) -> int:
    """Tokens of a warp, which sums their gradients into one part."""
    return WARP // lanes_for(num_streams, num_streams)


@kernel(choose=lambda *static: dict(num_threads=WARP), space=dict(num_threads=(WARP,)))
def mixes_bwd_kernel(k: int, num_streams: int, width: int, repeat: int, clears: bool, *, num_threads: int):
    """One warp for each part, `width` elements in an access to inputs. `clears` as in `prepare_bwd_kernel`."""
    lanes, rows, columns = lanes_for(num_streams, num_streams), 2 + num_streams, num_mixes(num_streams)
    held, width = columns_of(num_streams, lanes, width)
    tokens = tokens_of_a_warp(num_streams)
    num_tokens, num_parts = T.dynamic('num_tokens'), T.dynamic('num_parts')

    @T.prim_func
    def mixes_bwd(
        scale_parts: T.Tensor((num_parts, 3), T.float32),
        base_parts: T.Tensor((num_parts, columns), T.float32),
        dpre: T.Tensor((num_tokens, 1, num_streams), T.float32),
        dpost: T.Tensor((num_tokens, 1, num_streams), T.float32),
        dcomb: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        mixes: T.Tensor((num_tokens, rows, num_streams), T.float32),
        rstd: T.Tensor((num_tokens,), T.float32),
        scale: T.Tensor((3,), T.float32),
        base: T.Tensor((columns,), T.float32),
        o_parts: T.Tensor((num_tokens, 2 * columns), T.bfloat16),
        pull: T.Tensor((num_tokens,), T.float32),
        dfn: T.Tensor((columns * k,), T.float32),
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
    ):
        with T.Kernel(num_parts, threads=num_threads) as pid:
            mix_local = T.alloc_local((rows, held), T.float32)
            dz_local = T.alloc_local((rows, held), T.float32)
            dpre_local = T.alloc_local((1, held), T.float32)
            dpost_local = T.alloc_local((1, held), T.float32)
            k_local = T.alloc_local((num_streams, held), T.float32)
            g_local = T.alloc_local((num_streams, held), T.float32)
            high_local = T.alloc_local((held,), T.bfloat16)
            low_local = T.alloc_local((held,), T.bfloat16)
            tx = T.get_thread_binding()
            mine, first = pid * tokens + tx // lanes, tx % lanes * held
            token = T.min(mine, num_tokens - 1)  # shuffles need all lanes

            T.pdl_trigger()
            if clears:
                clear_dfn(dfn, pid * num_threads + tx, num_parts * num_threads)
            load_matrix(mixes, token, first, held, mix_local, width)
            load_matrix(dcomb, token, first, held, g_local, width)
            load_matrix(dpre, token, first, held, dpre_local, width)
            load_matrix(dpost, token, first, held, dpost_local, width)
            for i in T.unroll(num_streams):
                for c in T.unroll(held):
                    k_local[i, c] = affine(mix_local[2 + i, c], scale[2], base[(2 + i) * num_streams + first + c])
            unscale_matrix(k_local, g_local, lanes, held, 1.0, repeat, sinkhorn_eps, num_threads)
            for c in T.unroll(held):
                s = sigmoid(affine(mix_local[0, c], scale[0], base[first + c]))
                dz_local[0, c] = dpre_local[0, c] * (s * (1.0 - s))
                p = sigmoid(affine(mix_local[1, c], scale[1], base[num_streams + first + c]))
                dz_local[1, c] = dpost_local[0, c] * post_mult * (p * (1.0 - p))
                for i in T.unroll(num_streams):
                    dz_local[2 + i, c] = g_local[i, c]

            total = T.alloc_var(T.float32, init=0.0)
            for r in T.unroll(rows):
                for c in T.unroll(held):
                    dmix = dz_local[r, c] * scale[T.min(r, 2)]
                    total = T.ieee_fmaf(dmix, mix_local[r, c], total)
                    value = round_to_tf32(dmix * rstd[token])
                    high_local[c] = T.cast(high_of(value), T.bfloat16)
                    low_local[c] = T.cast(value - high_of(value), T.bfloat16)
                if mine < num_tokens:
                    for c in T.vectorized(held):
                        o_parts[token, r * num_streams + first + c] = high_local[c]
                    for c in T.vectorized(held):
                        o_parts[token, columns + r * num_streams + first + c] = low_local[c]
            total = sum_lanes(total, lanes)
            if mine < num_tokens and tx % lanes == 0:
                pull[token] = -total * (rstd[token] * rstd[token]) * T.float32(1.0 / k)

            for part in (0, 1, 2):
                total = 0.0
                for r in range(num_streams if part == 2 else 1):
                    for c in T.unroll(held):
                        total = T.ieee_fmaf(dz_local[part + r, c], mix_local[part + r, c], total)
                total = T.warp_reduce_sum(T.if_then_else(mine < num_tokens, total, T.float32(0.0)))
                if tx == 0:
                    scale_parts[pid, part] = total
            for r in T.unroll(rows):
                for c in T.unroll(held):
                    total = T.if_then_else(mine < num_tokens, dz_local[r, c], T.float32(0.0))
                    for step in (16, 8, 4, 2, 1):
                        if step >= lanes:
                            total = total + T.shfl_xor(total, step)
                    if tx < lanes:
                        base_parts[pid, r * num_streams + first + c] = total

    return mixes_bwd
