"""Twins of the public functions of attention, whose arguments are those of other libraries.

They translate the arguments and call the twins of the ops, all in float64. Gradients are those of PyTorch's autograd.
Arguments without a meaning, such as `dropout_p`, are ignored.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.reference.attention import append as append_twin
from tile_kernels.reference.attention import attend as attend_twin
from tile_kernels.reference.attention import block_sparse as block_sparse_twin
from tile_kernels.reference.attention import combine as combine_twin
from tile_kernels.reference.attention import decode as decode_twin
from tile_kernels.reference.attention import fp8_mqa_logits as fp8_mqa_logits_twin
from tile_kernels.reference.attention import fp8_paged_mqa_logits as fp8_paged_mqa_logits_twin
from tile_kernels.reference.attention import index_topk as index_topk_twin
from tile_kernels.reference.attention import mla_decode as mla_decode_twin
from tile_kernels.reference.attention import mqa_logits as mqa_logits_twin
from tile_kernels.reference.attention import nsa_attend as nsa_attend_twin
from tile_kernels.reference.attention import pack_mla_cache as pack_mla_cache_twin
from tile_kernels.reference.attention import sparse_mla as sparse_mla_twin
from tile_kernels.reference.attention import sparse_mla_weights as sparse_mla_weights_twin
from tile_kernels.reference.attention import topk_indices as topk_indices_twin
from tile_kernels.reference.attention import unpack_mla_cache as unpack_mla_cache

FP8 = torch.float8_e4m3fn
LATENT, KEY, TOKEN_BYTES = 512, 576, 656


def _named(foreign: dict[str, Any], value: Any, *names: str) -> Any:
    """A value that may be given under other names."""
    return next((foreign[name] for name in names if foreign.get(name) is not None), value)


def _sink(foreign: dict[str, Any], sink: Tensor | None) -> Tensor | None:
    return _named(foreign, sink, 'learnable_sink', 's_aux', 'attn_sink')


def _formula(q: Tensor, softmax_scale: float | None, causal: bool, window_size: Any, softcap: float) -> dict[str, Any]:
    left, right = (-1 if side is None else side for side in window_size)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return dict(scale=scale, left=left, right=0 if causal else right, softcap=softcap)


def _factors(*descales: Tensor | None, number: int, kv_heads: int, device: torch.device) -> list[Tensor]:
    ones = torch.ones(number, kv_heads, device=device)
    return [
        ones if descale is None else descale if descale.dim() == 3 else descale.to(ones).expand(number, kv_heads)
        for descale in descales
    ]


def _joined(q_descale: Tensor, k_descale: Tensor) -> Tensor:
    return k_descale if k_descale.dim() == 3 else q_descale * k_descale


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 1,
    return_lse: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of dense sequences."""
    options = _formula(q, softmax_scale, causal, window_size, softcap)
    if q.dtype is FP8:
        own = _factors(q_descale, k_descale, v_descale, number=len(q), kv_heads=k.shape[2], device=q.device)
        options |= dict(k_descale=_joined(own[0], own[1]), v_descale=own[2])
        o, lse = decode_twin(q.to(torch.bfloat16), k, v, sink=_sink(foreign, sink), **options)
        lse = lse.transpose(1, 2)
    else:
        o, lse = attend_twin(q, k, v, _sink(foreign, sink), **options)
    return (o, lse) if return_lse or foreign.get('return_attn_probs') else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: Any = None,
    max_seqlen_k: Any = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool = False,
    num_splits: int = 1,
    return_lse: bool = False,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of packed sequences."""
    options = _formula(q, softmax_scale, causal, window_size, softcap)
    table = _named(foreign, block_table, 'page_table')
    if table is not None and seqused_k is None and cu_seqlens_k is not None:
        seqused_k = cu_seqlens_k.diff()
    if table is not None or q.dtype is FP8:
        number = len(cu_seqlens_q) - 1
        own = _factors(q_descale, k_descale, v_descale, number=number, kv_heads=k.shape[-2], device=q.device)
        if k.dtype is FP8:
            options |= dict(k_descale=_joined(own[0], own[1]), v_descale=own[2])
        cu_k = cu_seqlens_k if table is None else None
        q = q.to(torch.bfloat16) if q.dtype is FP8 else q
        given = (seqused_k, cu_seqlens_q, cu_k, seqused_q, table, _sink(foreign, sink))
        o, lse = decode_twin(q, k, v, *given, **options)
        lse = lse.transpose(0, 1)
    else:
        lengths = cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k
        o, lse = attend_twin(q, k, v, _sink(foreign, sink), *lengths, **options)
    return (o, lse) if return_lse or foreign.get('return_attn_probs') else o


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: Tensor | int,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    num_splits: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out: Tensor | None = None,
    return_softmax_lse: bool = False,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few queries over a cache."""
    options = _formula(q, softmax_scale, causal, window_size, softcap)
    table = _named(foreign, block_table, 'page_table')
    lengths = torch.as_tensor(cache_seqlens, device=q.device).expand(len(q)).int()
    factors = {}
    if k_cache.dtype is FP8:
        own = _factors(q_descale, k_descale, v_descale, number=len(q), kv_heads=k_cache.shape[2], device=q.device)
        factors = dict(k_descale=own[1], v_descale=own[2])
        options |= dict(k_descale=_joined(own[0], own[1]), v_descale=own[2])
    if k is not None and v is not None:
        append_twin(k, v, k_cache, v_cache, lengths, None, table, cache_batch_idx, **factors)
        lengths = lengths + k.shape[1]
    q = q.to(torch.bfloat16) if q.dtype is FP8 else q
    options |= dict(cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)
    given = dict(cache_seqlens=lengths, block_table=table, sink=_sink(foreign, sink))
    o, lse = decode_twin(q, k_cache, v_cache, **given, **options)
    if out is not None:
        o = out.copy_(o)
    return (o, lse.transpose(1, 2)) if return_softmax_lse else o


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, *, sink: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The merge of parts of attention."""
    return combine_twin(out_partial, lse_partial, sink, out_dtype)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with heads before tokens; `is_causal` aligns to the top left."""
    queries, keys = query.shape[2], key.shape[2]
    right = -1
    if is_causal:
        right = max(queries - keys, 0)
        key, value = key[:, :, :queries], value[:, :, :queries]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    return attend_twin(q, k, v, scale=q.shape[-1] ** -0.5 if scale is None else scale, right=right)[0].transpose(1, 2)


# Latent attention ---------------------------------------------------------------------------


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: Any = None,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    *,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Latent attention over a cache."""
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    own_sink = attn_sink if extra_k_cache is None else None
    o, lse = mla_decode_twin(q, k_cache, block_table, cache_seqlens, indices, topk_length, own_sink, scale, causal)
    if extra_k_cache is not None:
        extra = (None, None, extra_indices_in_kvcache, extra_topk_length, None, scale)
        parts = [(o, lse), mla_decode_twin(q, extra_k_cache, *extra)]
        outs, logs = (torch.stack(part) for part in zip(*parts, strict=True))
        o, lse = combine_twin(outs, logs.masked_fill(logs == math.inf, -math.inf), attn_sink)
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    return o, lse.transpose(1, 2)


def pack_mla_cache(kv: Tensor, cache: Tensor | None = None, slots: Tensor | None = None) -> Tensor:
    """Latent keys as tokens of 656 bytes, or of 584 in pages."""
    if kv.shape[-1] == LATENT:
        if cache is None:
            cache = torch.empty(*kv.shape[:-1], 584, dtype=torch.uint8, device=kv.device)
        pack_mla_cache_twin(kv.reshape(-1, LATENT), cache, slots)
        return cache
    if cache is None:
        cache = torch.empty(*kv.shape[:-1], TOKEN_BYTES, dtype=torch.uint8, device=kv.device)
    pack_mla_cache_twin(kv.reshape(-1, KEY), cache.view(-1, TOKEN_BYTES), slots)
    return cache


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
    """Latent attention over listed keys."""
    o, top, lse = sparse_mla_twin(q, kv, indices, topk_length, attn_sink, sm_scale)
    if not return_p_sum:
        return o, top, lse
    with torch.no_grad():
        return o, top, lse, sparse_mla_weights_twin(q, kv, indices, lse, topk_length, attn_sink, sm_scale)


# Indexer ------------------------------------------------------------------------------------


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """Scores of all keys."""
    return fp8_mqa_logits_twin(q, *kv, weights, cu_seq_len_k_start, cu_seq_len_k_end, clean_logits)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule_meta: Any = None,
    max_context_len: int = 0,
    clean_logits: bool = False,
) -> Tensor:
    """Scores of all keys of a paged cache."""
    lengths = context_lens[:, None] if context_lens.dim() == 1 else context_lens
    return fp8_paged_mqa_logits_twin(q, kv_cache, weights, lengths, block_table, max_context_len, clean_logits)


def mqa_logits(q: Tensor, k: Tensor, weights: Tensor, cu_seq_len_k_start: Tensor, cu_seq_len_k_end: Tensor) -> Tensor:
    """Scores of all keys in half precision."""
    return mqa_logits_twin(q, k, weights, cu_seq_len_k_start, cu_seq_len_k_end)


def topk_indices(
    logits: Tensor, k: int, start: Tensor | None = None, end: Tensor | None = None, *, return_values: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The columns of the k largest numbers."""
    indices, values = topk_indices_twin(logits, k, start, end, return_values)
    return (indices, values) if return_values else indices


def index_topk(q: Tensor, kv: tuple[Tensor, Tensor], weights: Tensor, start: Tensor, end: Tensor, k: int) -> Tensor:
    """The k keys of largest score."""
    return index_topk_twin(q, *kv, weights, start, end, k)


# Blocks of keys -----------------------------------------------------------------------------


def block_sparse_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    counts: Tensor,
    *,
    block: tuple[int, int] = (128, 128),
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Any = (-1, -1),
    softcap: float = 0.0,
    sink: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    **foreign: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention to listed blocks of keys."""
    options = _formula(q, softmax_scale, causal, window_size, softcap)
    o, lse = block_sparse_twin(q, k, v, indices, counts, _sink(foreign, sink), block[0], **options)
    return (o, lse) if return_lse or foreign.get('return_attn_probs') else o


# Native sparse attention --------------------------------------------------------------------


def _compressed(q: Tensor, k: Tensor, v: Tensor, size: int, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of one sequence to the means of complete blocks, and the score of every block it has."""
    tokens, heads, kv_heads, number = q.shape[0], q.shape[1], k.shape[1], q.shape[0] // size
    group, token = heads // kv_heads, torch.arange(tokens, device=q.device)
    means = [x[: number * size].unflatten(0, (number, size)).float().mean(1).to(x.dtype).double() for x in (k, v)]
    wide = [x.repeat_interleave(group, 1).transpose(0, 1) for x in means]
    block = torch.arange(-(-tokens // size), device=q.device)
    visible = (block[:number] + 1) * size - 1 <= token[:, None]
    scores = (q.double().transpose(0, 1) @ wide[0].mT * scale).masked_fill(~visible, -math.inf)
    weights = torch.where(visible.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    own = token[:, None] // size
    sums = torch.zeros(kv_heads, tokens, len(block), dtype=torch.float64, device=q.device)
    sums[..., :number] = weights.detach().unflatten(0, (kv_heads, group)).sum(1)
    sums = torch.where((block == 0) | (block == own) | (block == own - 1), math.inf, sums)
    return (weights @ wide[1]).transpose(0, 1), sums.masked_fill(block > own, -math.inf)


def parallel_nsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor | None = None,
    g_slc: Tensor | None = None,
    g_swa: Tensor | None = None,
    block_indices: Tensor | None = None,
    block_counts: Tensor | int = 16,
    block_size: int = 64,
    window_size: int = 0,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Native sparse attention: every branch of every sequence."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    cuts = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64, device=q.device)
    for b, (first, end) in itertools.product(range(len(q)), itertools.pairwise(cuts)):
        rows = b, slice(first, end)
        own = q[rows], k[rows], v[rows]
        compressed, scores = _compressed(*own, block_size, scale)
        counts = None
        if block_indices is None:
            lists = topk_indices_twin(scores.flatten(0, 1).float(), int(block_counts))[0]
            lists = lists.unflatten(0, scores.shape[:2]).transpose(0, 1)
        else:
            lists = block_indices[rows]
            counts = block_counts[rows][None] if isinstance(block_counts, Tensor) else None
        one_q, one_k, one_v = (x[None] for x in own)
        branch = nsa_attend_twin(one_q, one_k, one_v, lists[None], counts, None, block_size, scale)[0][0].double()
        total = branch if g_slc is None else branch * g_slc[rows].unsqueeze(-1)
        if g_cmp is not None:
            total = total + compressed * g_cmp[rows].unsqueeze(-1)
        if window_size > 0:
            window = attend_twin(one_q, one_k, one_v, scale=scale, left=window_size - 1, right=0)[0][0].double()
            total = total + (window if g_swa is None else window * g_swa[rows].unsqueeze(-1))
        o[rows] = total
    return o.to(q.dtype)


__all__ = [
    'block_sparse_attn_func',
    'flash_attn_combine',
    'flash_attn_func',
    'flash_attn_varlen_func',
    'flash_attn_with_kvcache',
    'flash_mla_sparse_fwd',
    'flash_mla_with_kvcache',
    'fp8_mqa_logits',
    'fp8_paged_mqa_logits',
    'index_topk',
    'mqa_logits',
    'pack_mla_cache',
    'parallel_nsa',
    'scaled_dot_product_attention',
    'topk_indices',
    'unpack_mla_cache',
]


def __dir__() -> list[str]:
    return __all__
