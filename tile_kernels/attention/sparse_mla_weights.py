"""Weights of the listed keys of sparse latent attention, summed over heads: the target of the loss of an indexer.

    p_sum[i, n] = sum_h exp(scale * sum_c q[i, h, c] * kv[indices[i, n], c] - lse[i, h])        lse with the sink

A thread block owns 64 entries of the list of a token and gathers their keys once. Products are by mma with keys as rows
and 16 heads as columns; heads follow one another, so no score reaches memory. Compute bound.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import HALVES, check_extents, check_sink, check_vectors
from tile_kernels.attention._samples import random_lists
from tile_kernels.attention.mla_decode_kernels import LOG2E
from tile_kernels.attention.pack_mla_cache import KEY
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

#: Entries of a list and heads of a tile: 90 KB of shared memory, which every GPU has.
ENTRIES, HEADS = 64, 16

# Kernel -------------------------------------------------------------------------------------


@kernel(pass_configs=PLAIN_PRODUCTS)
def sparse_mla_weights_kernel(dtype: torch.dtype, shortened: bool, sink_dtype: torch.dtype | None):
    """With `shortened`, lists have lengths of their own."""
    tokens, heads, keys, topk = (T.dynamic(name) for name in ('tokens', 'heads', 'keys', 'topk'))
    kv_stride, num_lengths = T.dynamic('kv_stride'), T.dynamic('num_lengths')
    q_strides = [T.dynamic('q_stride0'), T.dynamic('q_stride1')]
    elem, inf = T.dtype(dtype), math.inf

    @T.prim_func
    def sparse_mla_weights(
        q: T.StridedTensor((tokens, heads, KEY), (*q_strides, 1), elem),
        kv: T.StridedTensor((keys, KEY), (kv_stride, 1), elem),
        indices: T.Tensor((tokens, topk), T.int32),
        topk_length: T.Tensor((num_lengths,), T.int32),
        lse: T.Tensor((tokens, heads), T.float32),
        sink: T.Tensor((heads,), T.dtype(sink_dtype or torch.float32)),
        p_sum: T.Tensor((tokens, topk), T.float32),
        scale: T.float32,
    ):
        with T.Kernel(tokens, T.ceildiv(topk, ENTRIES), threads=128) as (token, tile):
            for stride in (*q_strides, kv_stride):
                T.assume(stride % 8 == 0)
            k_shared, q_shared = T.alloc_shared((ENTRIES, KEY), elem), T.alloc_shared((HEADS, KEY), elem)
            key_shared = T.alloc_shared((ENTRIES,), T.int32)
            below_shared = T.alloc_shared((HEADS,), T.float32)
            acc = T.alloc_fragment((ENTRIES, HEADS), T.float32)
            sums, total = T.alloc_fragment((ENTRIES,), T.float32), T.alloc_fragment((ENTRIES,), T.float32)
            number = T.alloc_var(T.int32)
            number = topk
            if shortened:
                number = T.min(topk_length[token], topk)
            for i in T.Parallel(ENTRIES):
                key_shared[i] = -1
                if tile * ENTRIES + i < number:  # noqa: SIM102 - the second condition reads
                    if indices[token, tile * ENTRIES + i] < keys:
                        key_shared[i] = indices[token, tile * ENTRIES + i]
            for i, c in T.Parallel(ENTRIES, KEY):
                k_shared[i, c] = T.if_then_else(key_shared[i] >= 0, kv[T.max(key_shared[i], 0), c], T.cast(0.0, elem))
            T.clear(total)
            for step in T.serial(T.truncdiv(heads + HEADS - 1, HEADS)):
                first = step * HEADS
                for h, c in T.Parallel(HEADS, KEY):
                    q_shared[h, c] = T.if_then_else(
                        first + h < heads, q[token, T.min(first + h, heads - 1), c], T.cast(0.0, elem)
                    )
                for h in T.Parallel(HEADS):
                    own = lse[token, T.min(first + h, heads - 1)] * LOG2E
                    below = T.alloc_var(T.float32)
                    below = own
                    if sink_dtype is not None:
                        other = T.cast(sink[T.min(first + h, heads - 1)], T.float32) * LOG2E
                        larger, smaller = T.max(own, other), T.min(own, other)
                        below = larger + T.log2(1.0 + T.exp2(smaller - larger))
                        if T.Or(other == inf, own == inf):
                            below = inf
                    below_shared[h] = T.if_then_else(first + h < heads, below, T.float32(inf))
                T.clear(acc)
                T.gemm(k_shared, q_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                for i, h in T.Parallel(ENTRIES, HEADS):
                    acc[i, h] = T.exp2(acc[i, h] * scale - below_shared[h])
                T.reduce_sum(acc, sums, dim=1)
                for i in T.Parallel(ENTRIES):
                    total[i] = total[i] + sums[i]
            for i in T.Parallel(ENTRIES):
                if tile * ENTRIES + i < topk:
                    p_sum[token, tile * ENTRIES + i] = T.if_then_else(key_shared[i] >= 0, total[i], T.float32(0.0))

    return sparse_mla_weights


# Op -----------------------------------------------------------------------------------------


@op(outputs='p_sum')
def sparse_mla_weights(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    lse: Tensor,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """Weights of listed keys, summed over heads; see `return_p_sum` of `flash_mla_sparse_fwd`.

    Args:
        q: (tokens, heads, 576) bfloat16 or float16.
        kv: (keys, 1, 576) of q's dtype.
        indices: (tokens, 1, topk) int32, the keys of every token.
        lse: (tokens, heads) float32: the third result of `sparse_mla`.
        topk_length: (tokens,) int32, how many entries of a list count.
        sink: (heads,) logits that join the denominator.
        scale: factor of the scores.

    Returns:
        (tokens, topk) float32, 0 where an entry is none.
    """
    tokens, heads, _ = check_extents(q, 'q', f'tokens heads {KEY}', HALVES)
    check_extents(kv, 'kv', f'keys 1 {KEY}', q.dtype)
    _, _, topk = check_extents(indices, 'indices', 'tokens 1 topk', torch.int32, tokens=tokens)
    check_vectors(q=q, kv=kv)
    check.contiguous(indices, 'indices')
    check.packed(lse, 'lse', 'tokens heads', torch.float32, tokens=tokens, heads=heads)
    check.packed(topk_length, 'topk_length', 'tokens', torch.int32, tokens=tokens)
    check_sink(sink, heads, q.dtype)
    check.same_device(q=q, kv=kv, indices=indices, lse=lse, topk_length=topk_length, sink=sink)
    idle = q.numel() == 0 or kv.numel() == 0
    p_sum = (torch.zeros if idle else torch.empty)(tokens, topk, dtype=torch.float32, device=q.device)
    static = (q.dtype, topk_length is not None, None if sink is None else sink.dtype)
    operands = (q, kv.squeeze(1), indices.squeeze(1), topk_length, lse, sink, p_sum, scale * LOG2E)
    launch(sparse_mla_weights_kernel, static, *operands, size=0 if idle or topk == 0 else tokens)
    return p_sum


# Cases --------------------------------------------------------------------------------------


def _make(**case: Any) -> dict:
    """The lists of `sparse_mla`, and lse as if all scores were those of normal numbers."""
    given = random_lists(**case)
    lse = torch.randn(given['q'].shape[:2]) + 4
    if len(lse) > 1:
        lse[-1] = math.inf  # it lists no key
    return given | dict(lse=lse)


BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
sparse_mla_weights.cases(
    make=_make,
    match=dict(rtol=2e-3, atol=1e-4),
    smoke=grid(tokens=[0, 1], keys=[5, 0], heads=[1], topk=[32])
    + grid(tokens=[3], keys=[40], heads=[17], topk=[72], sink=[F32], short=[True], dtype=[F16])
    + grid(tokens=[1], keys=[3], heads=[2], topk=[0])
    + grid(tokens=[2], keys=[9], heads=[33], topk=[64], sink=[BF16]),
    full=grid(tokens=[513], keys=[8191], heads=[16, 24, 130], topk=[2048], sink=[F32], short=[True]),
    bench=grid(tokens=[4096], keys=[8192], heads=[128], topk=[2048]),
    flops=lambda q, indices, **_: 2 * q.numel() * indices.shape[-1],
)
