"""Pre of a layer at once: projection, then mixes and their use.

    mixes            = norm_fn(residual, fn)                            see `norm_fn`
    pre, post, z     = split_mixes(mixes)                               see `split_mixes`
    comb             = sinkhorn(z)                                      see `sinkhorn`
    layer_input      = apply_mix(residual, pre)                         see `apply_mix`

The same bits as these four ops one after another: the arithmetic is theirs. In one pass over the residual where blocks
can share the channels of a token (`pre_device`). Elsewhere in two kernels, of which the second has two kinds of blocks
that do not wait for each other: some carry post and comb of many tokens through the chain of Sinkhorn, the others need
only pre. They take the tokens from the last to the first, since the projection has just left the last in the L2 cache.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Out, op
from tile_kernels.mhc._rows import (
    ROW_PASS_CONFIGS,
    ROW_THREADS,
    STREAMS,
    WARP,
    apply_to_vector,
    check_streams,
    flat,
    lead_of,
    load_streams,
    row_threads_for,
    store_vector,
    vector_width,
)
from tile_kernels.mhc.norm_fn import check_projection, project
from tile_kernels.mhc.norm_fn_kernels import MANY_PARTS, SPREAD, padded, rstd_from, sum_parts
from tile_kernels.mhc.post import post_
from tile_kernels.mhc.pre_kernels import goes_in_one_pass, pre_streams_kernel
from tile_kernels.mhc.sinkhorn import lanes_for, scale_matrix
from tile_kernels.mhc.split_mixes import affine, num_mixes, sigmoid

BF16, F32 = torch.bfloat16, torch.float32

#: Tokens of a block with a chain when there are few: their chains then run on as many SMs as can be.
FEW_TOKENS = 8

# Config -------------------------------------------------------------------------------------


def choose(hidden: int, num_streams: int, width: int, with_mixes: bool, num_tokens: int) -> dict:
    """Two vectors for each thread, as `apply_mix`; few tokens spread their chains over many blocks."""
    return dict(
        row_threads=row_threads_for(hidden // width, 2), mix_tokens=FEW_TOKENS if num_tokens <= SPREAD else WARP
    )


# Kernel -------------------------------------------------------------------------------------


@macro
def sum_tokens(mul_parts, square_parts, first, mul_shared, square_shared, num_threads, in_flight):
    """The products and sums of squares of the tokens from `first` on, the parts in ascending order.

    One thread for each sum: the loads of a sum do not wait for each other, those of the next sum wait for all.
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
    """The vectors of a thread in a round over the channels of a token."""
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
    """Blocks that carry `mix_tokens` tokens through the chain of Sinkhorn, then those of one token."""
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
            # many tokens: the few blocks with a chain must not cost the others; few: registers for all parts at once
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
                if rounds == 1:  # on their way while the parts are summed
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


# Ops ----------------------------------------------------------------------------------------


@op()
def mix_and_apply_(
    residual: Tensor,
    mul_parts: Tensor,
    square_parts: Tensor,
    scale: Tensor,
    base: Tensor,
    post: Out,
    comb: Out,
    layer_input: Out,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> None:
    """What follows the projection in `big_fuse`, into memory of the caller.

    Args:
        residual: (num_tokens, n, hidden) bfloat16, contiguous.
        mul_parts: (splits, num_tokens, n (2 + n)) float32, contiguous; parts that sum to the products.
        square_parts: (splits, num_tokens) float32, contiguous; parts that sum to the sums of squares.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        post: (num_tokens, n) float32, contiguous; overwritten.
        comb: (num_tokens, n, n) float32, contiguous; overwritten.
        layer_input: (num_tokens, hidden) bfloat16, contiguous; overwritten.
        repeat: as given to `sinkhorn`.
        eps: added to the mean square.
        pre_eps: added to pre.
        sinkhorn_eps: as given to `sinkhorn`.
        post_mult: factor of post.
    """
    (num_tokens,) = lead_of(residual, 'residual', 'num_streams hidden', BF16, lead=(residual.shape[0],))
    num_streams, hidden = residual.shape[-2:]
    check_streams(num_streams, hidden)
    width = num_mixes(num_streams)
    splits, _ = lead_of(
        mul_parts, 'mul_parts', 'num_mixes', F32, num_mixes=width, lead=(mul_parts.shape[0], num_tokens)
    )
    lead_of(square_parts, 'square_parts', '', F32, (splits, num_tokens))
    lead_of(post, 'post', 'num_streams', F32, (num_tokens,), num_streams=num_streams)
    lead_of(comb, 'comb', 'num_streams outputs', F32, (num_tokens,), num_streams=num_streams, outputs=num_streams)
    lead_of(layer_input, 'layer_input', 'hidden', BF16, (num_tokens,), hidden=hidden)
    check_mixes(scale, base, num_streams, repeat, residual)
    check.same_device(residual=residual, mul_parts=mul_parts, square_parts=square_parts)
    check.same_device(residual=residual, post=post, comb=comb, layer_input=layer_input)
    options = (repeat, eps, pre_eps, sinkhorn_eps, post_mult)
    outputs = (post.unsqueeze(-1), comb, layer_input)
    _launch(residual, (mul_parts, square_parts), scale, base, outputs, None, options)


def _launch(
    residual: Tensor,
    parts: tuple[Tensor, Tensor],
    scale: Tensor,
    base: Tensor,
    outputs: tuple[Tensor, ...],
    saved: tuple[Tensor, ...] | None,
    options: tuple,
) -> None:
    """`mix_and_apply` of residual (num_tokens, n, hidden) and what `project` gives; `saved` is pre, mixes and rstd."""
    num_streams, hidden = residual.shape[1:]
    post, comb, layer_input = outputs
    launch(
        mix_and_apply_kernel,
        (hidden, num_streams, vector_width(residual, layer_input), saved is not None),
        residual,
        *parts,
        scale,
        base,
        post,
        comb,
        layer_input,
        *(saved or (None, None, None)),
        *options,
    )


def check_mixes(scale: Tensor, base: Tensor, num_streams: int, repeat: int, residual: Tensor) -> None:
    """Check what turns a projection into coefficients."""
    check.shape(scale, 'scale', 'num_scales', dtype=F32, num_scales=3)
    check.shape(base, 'base', 'num_mixes', dtype=F32, num_mixes=num_mixes(num_streams))
    check.contiguous(scale, 'scale')
    check.contiguous(base, 'base')
    check.at_least(repeat, 1, 'repeat')
    check.same_device(residual=residual, scale=scale, base=base)


def fused_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    with_mixes: bool,
    options: tuple,
    layer: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Layer_input, post and comb, and `with_mixes` also pre, mixes and rstd, of residual (..., n, hidden).

    `options` are repeat, eps, pre_eps, sinkhorn_eps and post_mult. With a `layer` (x, its residual, post_mix and
    comb_mix, of all tokens in one dimension), residual is what `post` makes of these, and is written.
    """
    lead, _, width = check_projection(residual, fn)
    num_streams, hidden = residual.shape[-2:]
    check.shape(fn, 'fn', 'num_mixes num_streams*hidden', num_mixes=num_mixes(num_streams))
    check_mixes(scale, base, num_streams, options[0], residual)
    layer_input = residual.new_empty((*lead, hidden))
    post, comb = fn.new_empty((*lead, num_streams, 1)), fn.new_empty((*lead, num_streams, num_streams))
    streams = flat(residual, lead, num_streams, hidden)
    if layer is not None and not goes_in_one_pass(streams, fn, layer[:2]):
        post_.fn(*layer, streams)
        layer = None
    outputs = (flat(post, lead, num_streams, 1), flat(comb, lead, num_streams, num_streams))
    outputs = (*outputs, flat(layer_input, lead, hidden))
    saved: tuple[Tensor, ...] = ()
    kept = None
    if with_mixes:
        saved = (fn.new_empty((*lead, num_streams, 1)), fn.new_empty((*lead, width)), fn.new_empty(lead))
        kept = (flat(saved[0], lead, num_streams, 1), flat(saved[1], lead, width), flat(saved[2], lead))
    if goes_in_one_pass(streams, fn):
        kind = 'post_pre' if layer is not None else 'pre' if with_mixes else 'input'
        static = (hidden, num_streams, width, kind)
        if layer is None:
            inputs: tuple = (streams, None, None, None, fn, scale, base, None)
        else:
            inputs = (layer[1], layer[0], *layer[2:], fn, scale, base, streams)
        launch(pre_streams_kernel, static, *inputs, *outputs, *(kept or (None, None, None)), *options)
    else:
        _launch(streams, project(streams, fn), scale, base, outputs, kept, options)
    return layer_input, post, comb, *saved


@op(outputs='post comb layer_input')
def big_fuse(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    repeat: int = 10,
    eps: float = 1e-6,
    pre_eps: float = 1e-6,
    sinkhorn_eps: float = 1e-6,
    post_mult: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Coefficients and input of a layer from the residual streams, without gradients.

    Args:
        residual: (..., n, hidden) bfloat16, contiguous; n is 2, 4 or 8, hidden a multiple of 64.
        fn: (n (2 + n), n * hidden) float32, contiguous.
        scale: (3,) float32.
        base: (n (2 + n),) float32.
        repeat: as given to `sinkhorn`.
        eps: added to the mean square.
        pre_eps: added to pre.
        sinkhorn_eps: as given to `sinkhorn`.
        post_mult: factor of post.

    Returns:
        post (..., n, 1) and comb (..., n, n) float32, layer_input (..., hidden) bfloat16: the bits of `norm_fn`,
        `split_mixes`, `sinkhorn` and `apply_mix`.
    """
    options = (repeat, eps, pre_eps, sinkhorn_eps, post_mult)
    layer_input, post, comb, *_ = fused_pre(residual, fn, scale, base, False, options)
    return post, comb, layer_input


# Cases --------------------------------------------------------------------------------------


def _make(lead: tuple, hidden: int, num_streams: int) -> dict:
    width, k = num_mixes(num_streams), num_streams * hidden
    return dict(
        residual=torch.randn(*lead, num_streams, hidden, dtype=BF16),
        fn=torch.randn(width, k) * k**-0.5,
        scale=torch.rand(3) + 0.5,
        base=torch.randn(width) * 0.1,
        post_mult=2.0,
    )


def _make_(splits: int, num_tokens: int, hidden: int, num_streams: int) -> dict:
    made = _make((num_tokens,), hidden, num_streams)
    del made['fn']
    parts = dict(
        mul_parts=torch.randn(splits, num_tokens, num_mixes(num_streams)) * hidden**0.5,
        square_parts=(torch.rand(splits, num_tokens) + 0.5) * hidden,
    )
    outputs = dict(
        post=torch.empty(num_tokens, num_streams),
        comb=torch.empty(num_tokens, num_streams, num_streams),
        layer_input=torch.empty(num_tokens, hidden, dtype=BF16),
    )
    return made | parts | outputs


BENCH = (
    grid(lead=[(64,), (4096,), (8192,)], hidden=[4096], num_streams=[4])
    + grid(lead=[(4096,)], hidden=[2048, 7168, 8192], num_streams=[4])
    + grid(lead=[(4001,)], hidden=[2560], num_streams=[4])
)
CLOSE = dict(rtol=1e-3, atol=1e-4)
big_fuse.cases(
    make=_make,
    match=dict(rtol=1e-3, atol=1e-3),
    smoke=grid(lead=[(0,), (2, 3)], hidden=[128], num_streams=[4])
    + grid(lead=[(70,)], hidden=[64], num_streams=STREAMS)
    # ten warps that multiply, one of them idle, wide slices, and slices that do not fit
    + grid(lead=[(9,)], hidden=[320, 576, 704, 1088], num_streams=[4]),
    full=grid(lead=[(4001,), (512,)], hidden=[1280, 2560, 5120, 7168], num_streams=[4])
    + grid(lead=[(777,)], hidden=[2816, 8192], num_streams=[2, 4])
    + grid(lead=[(20001,)], hidden=[512], num_streams=[4]),  # more tokens of an owner than are kept for the chains
    bench=BENCH,
)
mix_and_apply_.cases(
    make=_make_,
    match=CLOSE,
    smoke=grid(splits=[1, 3], num_tokens=[0, 5], hidden=[576], num_streams=[4])
    + grid(splits=[2], num_tokens=[33], hidden=[64], num_streams=STREAMS),
    bench=grid(splits=[16], num_tokens=[4096], hidden=[4096], num_streams=[4]),
)
