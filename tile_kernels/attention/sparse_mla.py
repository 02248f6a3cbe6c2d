"""Latent attention of tokens that see listed keys only, for prefill and training.

    s[i, h, j] = scale * sum_c q[i, h, c] * kv[j, c]                        c < 576, j in indices[i]
    p[i, h, j] = exp(s[i, h, j]) / (sum_j exp(s[i, h, j]) + exp(sink[h]))   keys listed twice count twice
    o[i, h, d] = sum_j p[i, h, j] * kv[j, d]                                d < 512
    lse[i, h]  = log sum_j exp(s[i, h, j])                                  without the sink

dq = scale * ds kv and dkv = scale * ds^T q + p^T do, with ds = p * (do kv^T - sum_d o * do); dsink follows from p, too.

A thread block owns up to 64 heads of a token and gathers its keys. Compute bound with many heads; with few, the floor
is reading the listed keys of every token from the L2 cache. GPUs without wgmma run the kernel of `mla_decode`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import check_extents, check_sink, check_vectors, lengths_int32, table_int32
from tile_kernels.attention._samples import LATENT_SUMS, random_lists
from tile_kernels.attention.mla_decode import MAX_ROWS, check_queries, latent_parts
from tile_kernels.attention.mla_decode_kernels import LISTED, LOG2E, PACKED_HEADS, mla_decode_kernel
from tile_kernels.attention.pack_mla_cache import KEY, LATENT
from tile_kernels.attention.sparse_mla_bwd_kernels import sparse_mla_bwd_kernel, sparse_mla_sum_kernel, tile_heads
from tile_kernels.attention.sparse_mla_bwd_sm90_kernels import sparse_mla_bwd_sm90_kernel
from tile_kernels.attention.sparse_mla_sm90_kernels import sparse_mla_sm90_kernel
from tile_kernels.attention.sparse_mla_weights import sparse_mla_weights
from tile_kernels.core import check
from tile_kernels.core.autograd import autocast
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import gpu_of, launch
from tile_kernels.core.op import op

#: Variants of the kernels.
SPARSE_MLA = sparse_mla_sm90_kernel, mla_decode_kernel
SPARSE_MLA_BWD = sparse_mla_bwd_sm90_kernel, sparse_mla_bwd_kernel
#: Stored gradients of listed keys, at most, in a deterministic gradient.
CHUNK_BYTES = 256 << 20

# Ops ----------------------------------------------------------------------------------------


def check_sparse(q: Tensor, kv: Tensor, indices: Tensor, topk_length: Tensor | None, sink: Tensor | None) -> None:
    """Check the arguments of sparse latent attention."""
    check_queries(q, 'tokens', MAX_ROWS)
    tokens, heads, _ = q.shape
    keys, _, _ = check_extents(kv, 'kv', f'keys 1 {KEY}', q.dtype)
    check_vectors(kv=kv)
    check_extents(indices, 'indices', 'tokens 1 topk', torch.int32, tokens=tokens)
    check.contiguous(indices, 'indices')
    check.packed(topk_length, 'topk_length', 'tokens', torch.int32, tokens=tokens)
    check_sink(sink, heads, q.dtype)
    check.at_most(tokens, MAX_ROWS, 'tokens of q')
    check.at_most(keys, MAX_ROWS, 'keys of kv')
    check.same_device(q=q, kv=kv, indices=indices, topk_length=topk_length, sink=sink)


@op(outputs='dq dkv dsink')
def sparse_mla_bwd(
    do: Tensor,
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    o: Tensor,
    lse: Tensor,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sparse_mla`.

    Args:
        do: gradient of o, contiguous.
        q: as in `sparse_mla`, as all that is not said here.
        kv: as there.
        indices: as there.
        o: first result of `sparse_mla`.
        lse: its third result.
        topk_length: as there.
        sink: as there.
        scale: as there.
        deterministic: whether gradients of keys are summed in the order of tokens, with the same bits in every run;
            otherwise atomics add them in any order. It needs up to 256 MiB more and reads them once more.

    Returns:
        Gradients of q, kv and sink in their dtypes, contiguous; the last has shape (0,) without a sink.
    """
    check_sparse(q, kv, indices, topk_length, sink)
    tokens, heads, _ = q.shape
    keys, topk = kv.shape[0], indices.shape[2]
    for name, x in (('do', do), ('o', o)):
        check.packed(x, name, 'tokens heads value_dim', q.dtype, tokens=tokens, heads=heads, value_dim=LATENT)
        check_vectors(**{name: x})
    check.packed(lse, 'lse', 'tokens heads', torch.float32, tokens=tokens, heads=heads)
    check.same_device(q=q, do=do, o=o, lse=lse)
    idle = tokens == 0 or keys == 0 or topk == 0
    dq = (torch.zeros if idle else torch.empty)(q.shape, dtype=q.dtype, device=q.device)
    dkv = torch.zeros(keys, KEY, dtype=torch.float32, device=q.device)
    terms = torch.zeros(tokens if sink is not None else 0, heads, dtype=torch.float32, device=q.device)
    if not idle:
        tile = tile_heads(heads, gpu_of(q))
        static = (q.dtype, topk_length is not None, None if sink is None else sink.dtype, deterministic, tile)
        parts = latent_parts(kv.unsqueeze(0))
        operands = (do, q, parts[0], parts[2], indices.squeeze(1), topk_length, o, lse, sink, dq)
        given = terms if sink is not None else None
        if not deterministic:
            launch(SPARSE_MLA_BWD, static, *operands, dkv, given, 0, tokens, scale, size=heads)
        else:
            tiles = -(-heads // tile)
            chunk = max(1, CHUNK_BYTES // (4 * KEY * topk * tiles))
            for first in range(0, tokens, chunk):
                number = min(chunk, tokens - first)
                rows = torch.empty(number * tiles * topk, KEY, dtype=torch.float32, device=q.device)
                launch(SPARSE_MLA_BWD, static, *operands, rows, given, first, number, scale, size=heads)
                order, start = sorted_pairs(indices[first : first + number, 0], topk_length, first, keys)
                launch(sparse_mla_sum_kernel, (), rows, order, start, dkv, tiles, topk, size=keys)
    dsink = torch.empty(0, device=q.device) if sink is None else terms.sum(0).to(sink.dtype)
    return dq, dkv.to(kv.dtype).view(kv.shape), dsink


def sorted_pairs(indices: Tensor, topk_length: Tensor | None, first: int, keys: int) -> tuple[Tensor, Tensor]:
    """Entries of lists in the order of their keys, those of one key in the order of tokens; where every key starts."""
    none = (indices < 0) | (indices >= keys)
    if topk_length is not None:
        place = torch.arange(indices.shape[1], device=indices.device)
        none = none | (place >= topk_length[first : first + len(indices), None])
    listed, order = indices.masked_fill(none, keys).flatten().sort(stable=True)
    start = torch.searchsorted(listed, torch.arange(keys + 1, dtype=listed.dtype, device=listed.device))
    return order, start


@op(outputs='o max_logits lse', backward=sparse_mla_bwd)
def sparse_mla(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    sink: Tensor | None = None,
    scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Latent attention over listed keys; see `flash_mla_sparse_fwd`.

    Args:
        q: (tokens, heads, 576) bfloat16 or float16.
        kv: (keys, 1, 576) of q's dtype.
        indices: (tokens, 1, topk) int32, the keys of every token.
        topk_length: (tokens,) int32, how many of them count.
        sink: (heads,) logits that join the denominator.
        scale: factor of the scores.
        deterministic: whether the gradient has the same bits in every run.

    Returns:
        o (tokens, heads, 512) of q's dtype, the largest score and lse, both (tokens, heads) float32.
    """
    check_sparse(q, kv, indices, topk_length, sink)
    tokens, heads, _ = q.shape
    o = torch.empty(tokens, heads, LATENT, dtype=q.dtype, device=q.device)
    max_logits = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    lse = torch.empty_like(max_logits)
    if kv.shape[0] == 0 or indices.shape[2] == 0:
        return o.zero_(), max_logits.fill_(-math.inf), lse.fill_(math.inf)
    sink_dtype = None if sink is None else sink.dtype
    static: tuple = (q.dtype, False, LISTED, topk_length is not None, False, sink_dtype, False, True)
    static += (heads > PACKED_HEADS, False)
    launch(
        SPARSE_MLA,
        static,
        q.unsqueeze(1),
        *latent_parts(kv.unsqueeze(0)),
        indices.squeeze(1),
        topk_length,
        sink,
        o[None, :, None],
        lse[None, :, None],
        max_logits.unsqueeze(1),
        tokens,
        1,
        0,
        scale * LOG2E,
        size=heads if tokens else 0,
    )
    return o, max_logits, lse


# Public function ----------------------------------------------------------------------------


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = LATENT,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    *,
    return_p_sum: bool = False,
) -> tuple[Tensor, ...]:
    """Latent attention of tokens that see listed keys only; takes the calls of FlashMLA. Differentiable in q, kv, sink.

    Only o has a gradient. With `torch.use_deterministic_algorithms` it has the same bits in every run.

    Args:
        q: (tokens, heads, 576) bfloat16 or float16, with any number of heads.
        kv: (keys, 1, 576) of q's dtype; the first 512 channels are the values.
        indices: (tokens, 1, topk) int32, the keys that a token sees. Entries below 0, or not below `keys`, are none and
            load nothing; a key that occurs twice counts twice.
        sm_scale: factor of the scores.
        d_v: 512.
        attn_sink: (heads,) logits that join the denominator.
        topk_length: (tokens,) int32: only so many entries of a token count.
        return_p_sum: also return the weights of all listed keys, summed over heads: what an indexer learns.

    Returns:
        o (tokens, heads, 512), the largest score and lse, both (tokens, heads) float32, natural logarithms without the
        sink. A token that sees no key has o = 0, largest score -inf and lse = +inf. With `return_p_sum` also the sums
        (tokens, topk) float32, 0 where an entry is none, without a gradient.
    """
    check.equal(d_v, LATENT, 'd_v')
    check.number(sm_scale, 'sm_scale')
    q, kv = autocast(check.tensor(q, 'q'), check.tensor(kv, 'kv'))
    listed: Any = table_int32(check.tensor(indices, 'indices'), 'indices')
    limit = lengths_int32(topk_length, 'topk_length')
    ordered = torch.are_deterministic_algorithms_enabled()
    o, top, lse = sparse_mla(q, kv, listed, limit, attn_sink, scale=sm_scale, deterministic=ordered)
    if not return_p_sum:
        return o, top, lse
    sink = None if attn_sink is None else attn_sink.detach()
    return o, top, lse, sparse_mla_weights(q.detach(), kv.detach(), listed, lse.detach(), limit, sink, sm_scale)


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SMOKE = (
    grid(tokens=[0, 1], keys=[5, 0], heads=[1], topk=[32])
    + grid(tokens=[3], keys=[40], heads=[17], topk=[40], sink=[F32], short=[True], dtype=[F16])
    + grid(tokens=[2], keys=[9], heads=[33], topk=[64], sink=[BF16])
    + grid(tokens=[2], keys=[70], heads=[65], topk=[300])
    + grid(tokens=[1], keys=[3], heads=[2], topk=[0])
)
FULL = grid(tokens=[513], keys=[8191], heads=[16, 24, 64, 128], topk=[2048], sink=[F32], short=[True])
BENCH = grid(tokens=[4096], keys=[8192], heads=[128, 16], topk=[2048])


def products(q: Tensor, indices: Tensor, **others: object) -> int:
    """Operations of the two products."""
    return 2 * q.shape[0] * q.shape[1] * indices.shape[-1] * (KEY + LATENT)


sparse_mla.cases(make=random_lists, match=LATENT_SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=products)


def _make_bwd(deterministic: bool = False, **case: Any) -> dict:
    """Results and their gradient beside the arguments; the results are those of the twin."""
    given = random_lists(**case)
    shape = (*given['q'].shape[:2], LATENT)
    small = given['q'].numel() < 1 << 20
    if type(given['q']) is Tensor and (small or given['q'].is_cuda):
        o, _, lse = (sparse_mla.twin if small else sparse_mla.call)(**given)
    else:  # a dry run
        o, lse = torch.randn(shape).to(given['q'].dtype), torch.full(shape[:2], 8.0)
    return dict(do=torch.randn(shape).to(o.dtype), o=o, lse=lse, **given, deterministic=deterministic)


BOTH = [False, True]
sparse_mla_bwd.cases(
    make=_make_bwd,
    match=dict(rtol=2e-2, atol=2e-2),
    smoke=grid(tokens=[1, 0], keys=[5], heads=[1], topk=[32])
    + grid(tokens=[3], keys=[20], heads=[17], topk=[40], sink=[F32], short=[True], deterministic=BOTH)
    + grid(tokens=[2], keys=[9], heads=[33], topk=[32], dtype=[F16], deterministic=[True])
    + grid(tokens=[2], keys=[70], heads=[65], topk=[200], sink=[F32], deterministic=BOTH),
    full=grid(tokens=[65], keys=[500], heads=[16, 24, 128], topk=[256], sink=[F32], short=[True], deterministic=BOTH),
    bench=grid(tokens=[4096], keys=[8192], heads=[128], topk=[2048])
    + grid(tokens=[256], keys=[8192], heads=[128], topk=[2048], deterministic=[True]),
    flops=lambda do, o, lse, **given: 5 * products(**given) // 2,
)
