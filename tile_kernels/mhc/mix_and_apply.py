"""From the parts of a projection to the coefficients and the input of a layer.

    mixes        = sum of mul_parts, times rsqrt(mean square + eps)     see `norm_fn`
    pre, post, z = split_mixes(mixes)                                   see `split_mixes`
    comb         = sinkhorn(z)                                          see `sinkhorn`
    layer_input  = apply_mix(residual, pre)                             see `apply_mix`

The bits are those of the four ops. Some blocks compute post and comb of many tokens: the long dependency chain of
Sinkhorn. The other blocks compute pre and layer_input of one token each. Neither waits for the other. Blocks take
tokens from the last to the first, because the projection has just left the last ones in the L2 cache.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import empty, op
from tile_kernels.mhc._checks import (
    BF16,
    F32,
    STREAMS,
    check_first_extent,
    check_scale_and_base,
    check_streams,
    lead_of,
    num_mixes,
    reshaped,
    vector_width,
)
from tile_kernels.mhc._macros import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    affine,
    apply_to_vector,
    load_streams,
    padded,
    row_threads_for,
    rstd_from,
    sigmoid,
    store_vector,
    sum_parts,
)
from tile_kernels.mhc._samples import pre_inputs
from tile_kernels.mhc.norm_fn_kernels import MANY_PARTS, SPREAD
from tile_kernels.mhc.sinkhorn_kernels import lanes_for, scale_matrix

#: Tokens of a block that runs Sinkhorn, if there are few tokens: they then run on as many SMs as possible.
FEW_TOKENS = 8

# Config ------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, width: int, with_mixes: bool, num_tokens: int) -> dict:
    """Two vectors for each thread, as in `apply_mix`; Sinkhorn of few tokens runs on many SMs."""
    return dict(
        row_threads=row_threads_for(hidden // width, 2), mix_tokens=FEW_TOKENS if num_tokens <= SPREAD else WARP
    )


# Kernel ------------------------------------------------------------------------------------


@macro
def sum_tokens(mul_parts, square_parts, first, mul_shared, square_shared, num_threads, in_flight):
    """Sum the parts of the products and squares of the tokens from `first` on, in ascending order.

    One thread for each sum, so that the loads of a sum are independent.
    """
    tokens, columns = square_shared.shape[0], mul_shared.shape[1] - 1
    last = mul_parts.shape[1] - 1
    for r in T.serial(-(-tokens * (columns + 1) // num_threads)):
        index = r * num_threads + T.get_thread_binding()
        if index < tokens * columns:
            token, j = T.min(first + index // columns, last), index % columns
            mul = sum_parts(lambda s: mul_parts[s, token, j], mul_parts.shape[0], in_flight)  # noqa: B023
            mul_shared[index // columns, j] = mul
        elif index < tokens * (columns + 1):
            token = T.min(first + index - tokens * columns, last)
            square = sum_parts(lambda s: square_parts[s, token], mul_parts.shape[0], in_flight)  # noqa: B023
            square_shared[index - tokens * columns] = square


@macro
def load_round(residual, token, round, x_local, vectors, row_threads):
    """Load the vectors of a thread in a round over the channels of a token."""
    num_streams, num_vectors = residual.shape[1], residual.shape[2] // x_local.shape[1]
    for v in T.unroll(vectors):
        index = (round * vectors + v) * row_threads + T.get_thread_binding()
        if index < num_vectors:
            load_streams(residual, token, index, x_local, v * num_streams)


@kernel(
    choose=choose, space=dict(row_threads=ROW_THREADS, mix_tokens=(FEW_TOKENS, WARP)), pass_configs=ROW_PASS_CONFIGS
)
def mix_and_apply_kernel(
    hidden: int, num_streams: int, width: int, with_mixes: bool, *, row_threads: int, mix_tokens: int
):
    """First the blocks that run Sinkhorn for `mix_tokens` tokens, then the blocks of one token."""
    num_vectors, vectors = hidden // width, 2
    rounds = -(-num_vectors // (vectors * row_threads))
    crowded = mix_tokens > FEW_TOKENS
    in_flight = 8 if crowded else MANY_PARTS
    lanes = lanes_for(num_streams, num_streams)
    held = num_streams // lanes
    tokens = min(mix_tokens, row_threads // lanes)
    width_mixes = num_mixes(num_streams)
    columns = padded(width_mixes)
    num_tokens, splits = T.dynamic('num_tokens'), T.dynamic('splits')

    @T.prim_func
    def mix_and_apply(
        residual: T.Tensor((num_tokens, num_streams, hidden), T.bfloat16),
        mul_parts: T.Tensor((splits, num_tokens, columns), T.float32),
        square_parts: T.Tensor((splits, num_tokens), T.float32),
        scale: T.Tensor((3,), T.float32),
        base: T.Tensor((width_mixes,), T.float32),
        post: T.Tensor((num_tokens, num_streams, 1), T.float32),
        comb: T.Tensor((num_tokens, num_streams, num_streams), T.float32),
        layer_input: T.Tensor((num_tokens, hidden), T.bfloat16),
        pre: T.Tensor((num_tokens, num_streams, 1), T.float32),
        mixes: T.Tensor((num_tokens, width_mixes), T.float32),
        rstd: T.Tensor((num_tokens,), T.float32),
        repeat: T.int32,
        eps: T.float32,
        pre_eps: T.float32,
        sinkhorn_eps: T.float32,
        post_mult: T.float32,
    ):
        mix_blocks = T.ceildiv(num_tokens, tokens)
        with T.Kernel(mix_blocks + num_tokens, threads=row_threads) as pid:
            # many tokens: Sinkhorn must not limit occupancy; few: enough registers to load all parts at once
            T.annotate_min_blocks_per_sm(1024 // row_threads if crowded else 1)
            x_local = T.alloc_local((vectors * num_streams, width), T.bfloat16)
            y_local = T.alloc_local((1, width), T.bfloat16)
            mix_local = T.alloc_local((num_streams,), T.float32)
            share_local = T.alloc_local((num_streams,), T.float32)
            k_local = T.alloc_local((num_streams, held), T.float32)
            mul_shared = T.alloc_shared((tokens, columns + 1), T.float32)  # rows in different banks
            square_shared = T.alloc_shared((tokens,), T.float32)
            pre_shared = T.alloc_shared((num_streams,), T.float32)
            tx = T.get_thread_binding()

            if pid < mix_blocks:
                sum_tokens(mul_parts, square_parts, pid * tokens, mul_shared, square_shared, row_threads, in_flight)
                T.sync_threads()
                if tx < -(-tokens * lanes // WARP) * WARP:
                    slot = T.min(tx // lanes, tokens - 1)  # shuffles need all lanes
                    mine, first = pid * tokens + slot, tx % lanes * held
                    token = T.min(mine, num_tokens - 1)
                    owner = (tx < tokens * lanes) & (mine < num_tokens)
                    for i in T.unroll(num_streams):
                        share_local[i] = mul_shared[slot, i]
                        mix_local[i] = mul_shared[slot, num_streams + i]
                        for c in T.unroll(held):
                            k_local[i, c] = mul_shared[slot, 2 * num_streams + i * num_streams + first + c]
                    factor = rstd_from(square_shared[slot], T.float32(1.0 / (num_streams * hidden)), eps)
                    for i in T.unroll(num_streams):
                        mix_local[i] = T.ieee_mul(mix_local[i], factor)
                        share_local[i] = T.ieee_mul(share_local[i], factor)
                        for c in T.unroll(held):
                            k_local[i, c] = T.ieee_mul(k_local[i, c], factor)
                    if with_mixes:  # noqa: SIM102 - known when the kernel is built
                        if owner:
                            if tx % lanes == 0:
                                rstd[token] = factor
                            for i in T.unroll(num_streams):
                                if i // held == tx % lanes:
                                    z = affine(share_local[i], scale[0], base[i])
                                    pre[token, i, 0] = T.ieee_add(sigmoid(z), pre_eps)
                                    mixes[token, i] = share_local[i]
                                    mixes[token, num_streams + i] = mix_local[i]
                                for c in T.unroll(held):
                                    mixes[token, 2 * num_streams + i * num_streams + first + c] = k_local[i, c]
                    for i in T.unroll(num_streams):
                        z = affine(mix_local[i], scale[1], base[num_streams + i])
                        mix_local[i] = T.ieee_mul(sigmoid(z), post_mult)
                        for c in T.unroll(held):
                            j = 2 * num_streams + i * num_streams + first + c
                            k_local[i, c] = affine(k_local[i, c], scale[2], base[j])
                    scale_matrix(k_local, lanes, held, 1.0, repeat, sinkhorn_eps)
                    if owner:
                        for i in T.unroll(num_streams):
                            if i // held == tx % lanes:
                                post[token, i, 0] = mix_local[i]
                            for c in T.unroll(held):
                                comb[token, i, first + c] = k_local[i, c]
            else:
                token = num_tokens - 1 - (pid - mix_blocks)
                if rounds == 1:  # in flight while the parts are summed
                    load_round(residual, token, 0, x_local, vectors, row_threads)
                if tx < WARP:  # a lane for each product of pre, and one for the squares
                    j = T.min(tx, num_streams - 1)
                    total = sum_parts(
                        lambda s: T.if_then_else(tx == num_streams, square_parts[s, token], mul_parts[s, token, j]),
                        splits,
                        in_flight,
                    )
                    inverse = T.float32(1.0 / (num_streams * hidden))
                    factor = rstd_from(T.shfl_sync(total, num_streams), inverse, eps)
                    if tx < num_streams:
                        z = affine(T.ieee_mul(total, factor), scale[0], base[j])
                        pre_shared[tx] = T.ieee_add(sigmoid(z), pre_eps)
                T.sync_threads()
                for c in T.unroll(num_streams):
                    mix_local[c] = pre_shared[c]
                for round in T.serial(rounds):
                    if rounds > 1:
                        load_round(residual, token, round, x_local, vectors, row_threads)
                    for v in T.unroll(vectors):
                        index = (round * vectors + v) * row_threads + tx
                        if index < num_vectors:
                            apply_to_vector(x_local, v * num_streams, mix_local, y_local)
                            store_vector(y_local, 0, layer_input, token, 0, index)

    return mix_and_apply


# Op ----------------------------------------------------------------------------------------


def launch_mix_and_apply(
    residual: Tensor,
    parts: tuple[Tensor, Tensor],
    scale: Tensor,
    base: Tensor,
    outputs: tuple[Tensor, ...],
    saved: tuple[Tensor, ...] | None,
    options: tuple,
) -> None:
    """Launch the kernel.

    `outputs` are post, comb and layer_input, `saved` pre, mixes and rstd. `options` are repeat, eps, pre_eps,
    sinkhorn_eps and post_mult.
    """
    num_streams, hidden = residual.shape[1:]
    static = (hidden, num_streams, vector_width(residual, outputs[2]), saved is not None)
    tensors = (residual, *parts, scale, base, *outputs, *(saved or (None, None, None)))
    launch(mix_and_apply_kernel, static, *tensors, *options)


@op(outputs='post comb layer_input', out=True, instead='mhc.pre')
def mix_and_apply(
    residual: Tensor,
    mul_parts: Tensor,
    square_parts: Tensor,
    scale: Tensor,
    base: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients and input of a layer from the parts of a projection.

    Args:
        residual: (num_tokens, n, hidden) bfloat16, contiguous.
        mul_parts: (splits, num_tokens, n (2 + n)) float32, contiguous; parts that sum to the products.
        square_parts: (splits, num_tokens) float32, contiguous; parts that sum to the sums of squares.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        repeat: as given to `sinkhorn`.
        eps: added to the mean square.
        pre_eps: added to pre.
        sinkhorn_eps: as given to `sinkhorn`.
        post_mult: factor of post.

    Returns:
        post (num_tokens, n) and comb (num_tokens, n, n) float32, layer_input (num_tokens, hidden) bfloat16.
    """
    num_tokens, num_streams, hidden = check.shape(residual, 'residual', 'num_tokens num_streams hidden', dtype=BF16)
    check.contiguous(residual, 'residual')
    check_streams(num_streams, hidden)
    width = num_mixes(num_streams)
    splits, *_ = check.shape(
        mul_parts, 'mul_parts', 'splits num_tokens num_mixes', dtype=F32, num_tokens=num_tokens, num_mixes=width
    )
    check.contiguous(mul_parts, 'mul_parts')
    lead_of(square_parts, 'square_parts', '', F32, (splits, num_tokens))
    check_scale_and_base(scale, base, num_streams)
    check.at_least(repeat, 1, 'repeat')
    check.same_device(residual=residual, mul_parts=mul_parts, square_parts=square_parts, scale=scale, base=base)
    post = empty('post', (num_tokens, num_streams), F32, residual.device)
    comb = empty('comb', (num_tokens, num_streams, num_streams), F32, residual.device)
    layer_input = empty('layer_input', (num_tokens, hidden), BF16, residual.device)
    options = (repeat, eps, pre_eps, sinkhorn_eps, post_mult)
    outputs = (post.unsqueeze(-1), comb, layer_input)
    launch_mix_and_apply(residual, (mul_parts, square_parts), scale, base, outputs, None, options)
    return post, comb, layer_input


def mhc_pre_big_fuse_fwd(
    gemm_out_mul: Tensor,
    gemm_out_sqrsum: Tensor,
    mhc_scale: Tensor,
    mhc_base: Tensor,
    residual: Tensor,
    post_mix: Tensor,
    comb_mix: Tensor,
    layer_input: Tensor,
    rms_eps: float,
    mhc_pre_eps: float,
    mhc_sinkhorn_eps: float,
    mhc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 16,
) -> None:
    """Write coefficients and input of a layer, from parts (n_splits, num_tokens, ...) of its projection."""
    check_first_extent(gemm_out_mul, 'gemm_out_mul', n_splits)
    num_tokens, num_streams, _ = check.shape(residual, 'residual', 'num_tokens num_streams hidden')
    mix_and_apply.out(
        residual,
        gemm_out_mul,
        gemm_out_sqrsum,
        mhc_scale,
        mhc_base,
        sinkhorn_repeat,
        rms_eps,
        mhc_pre_eps,
        mhc_sinkhorn_eps,
        mhc_post_mult_value,
        post=reshaped(post_mix, 'post_mix', num_tokens, num_streams),
        comb=reshaped(comb_mix, 'comb_mix', num_tokens, num_streams, num_streams),
        layer_input=layer_input,
    )


# Cases -------------------------------------------------------------------------------------


def _make(splits: int, num_tokens: int, hidden: int, num_streams: int) -> dict:
    made = pre_inputs((num_tokens,), hidden, num_streams)
    del made['fn']
    parts = dict(
        mul_parts=torch.randn(splits, num_tokens, num_mixes(num_streams)) * hidden**0.5,
        square_parts=(torch.rand(splits, num_tokens) + 0.5) * hidden,
    )
    return made | parts


mix_and_apply.cases(
    make=_make,
    match=dict(rtol=1e-3, atol=1e-4),
    smoke=grid(splits=[1, 3], num_tokens=[0, 5], hidden=[576], num_streams=[4])
    + grid(splits=[2], num_tokens=[33], hidden=[64], num_streams=STREAMS),
    bench=grid(splits=[16], num_tokens=[4096], hidden=[4096], num_streams=[4]),
)
