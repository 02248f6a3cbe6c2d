"""Attention: softmax of scaled scores times values, for dense and for packed sequences.

    s[i, j] = scale * sum_d q[i, d] * k[j, d]         or softcap * tanh(that / softcap)
    p[i, j] = exp(s[i, j]) / (sum_j exp(s[i, j]) + exp(sink))        over the keys that i sees
    o[i, d] = sum_j p[i, j] * v[j, d]
    lse[i]  = log sum_j exp(s[i, j])                  without the sink

Query i sees key j if -left <= j - (i + Sk - Sq) <= right. Compute bound for long sequences; no scores are stored. The
kernels for Hopper are in `attend_sm90_kernels`, by wgmma and TMA; those for others in `attend_kernels`, by mma. Queries
of 512 columns always take the latter.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import (
    FP8,
    HALVES,
    SINKS,
    WIDE_DIM,
    bound,
    check_band,
    check_dim,
    check_heads,
    check_sink,
    check_tensors,
    check_vectors,
    lengths_int32,
    refuse,
    take,
    take_margin,
    value_parts,
    window_of,
)
from tile_kernels.attention._samples import SUMS, products, random_attention
from tile_kernels.attention.attend_bwd_kernels import (
    BLOCK_K,
    attend_delta_kernel,
    attend_dkv_kernel,
    attend_dq_cast_kernel,
    attend_dq_kernel,
    attend_dsink_kernel,
    key_launches,
)
from tile_kernels.attention.attend_bwd_sm90_kernels import attend_bwd_sm90_kernel, bwd_keys
from tile_kernels.attention.attend_kernels import BLOCK_M, LOG2E, attend_kernel
from tile_kernels.attention.attend_sm90_kernels import ATTEND, attend_sm90_kernel
from tile_kernels.attention.decode import attend_cache, spread_scale, widen_queries
from tile_kernels.core import check
from tile_kernels.core.autograd import autocast, needs_gradient
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import gpu_of, launch, num_workers, variant_for
from tile_kernels.core.op import op

MAX_ROWS = (1 << 31) - (1 << 17)
#: In place of a scale of 0, which would make NaN of what is hidden.
MIN_SCALE = 1e-30


def num_blocks(x: Tensor, group: int, num_sequences: int, packed: bool, size: int = BLOCK_M) -> int:
    """Blocks of rows of a kv head, `group` for each token; packed sequences have numbers to spare."""
    rows = x.shape[-3] * group
    return rows // size + num_sequences + 1 if packed else -(-rows // size) * num_sequences


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    wide: bool = False,
) -> int:
    """Check the arguments of attention, which may be `wide`; returns the number of sequences."""
    check.together(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    packed = cu_seqlens_q is not None
    lead = '' if packed else 'batch '
    *batch, _, q_heads, dim = check.shape(q, 'q', f'{lead}tokens heads dim', dtype=HALVES)
    same = dict(batch=batch[0]) if batch else {}
    *_, k_tokens, kv_heads, _ = check.shape(k, 'k', f'{lead}tokens heads dim', dtype=q.dtype, dim=dim, **same)
    *_, value_dim = check.shape(
        v, 'v', f'{lead}tokens heads dim', dtype=q.dtype, tokens=k_tokens, heads=kv_heads, **same
    )
    check_dim(dim, 'the last extent of q', wide)
    check_dim(value_dim, 'the last extent of v')
    check_heads(q_heads, kv_heads)
    check_vectors(q=q, k=k, v=v)
    check_sink(sink, q_heads, q.dtype)
    check_band(left, right)
    check.at_least(softcap, 0.0, 'softcap')
    check.at_most(q.shape[-3] * q_heads // kv_heads, MAX_ROWS, 'tokens of q times query heads of a kv head')
    if cu_seqlens_q is not None:
        check.packed(cu_seqlens_q, 'cu_seqlens_q', 'sequences+1', torch.int32)
        number = cu_seqlens_q.shape[0] - 1
        check.at_least(number, 0, 'the number of sequences')
        check.packed(cu_seqlens_k, 'cu_seqlens_k', 'sequences+1', torch.int32, **{'sequences+1': number + 1})
    else:
        number = q.shape[0]
    check.packed(seqused_q, 'seqused_q', 'sequences', torch.int32, sequences=number)
    check.packed(seqused_k, 'seqused_k', 'sequences', torch.int32, sequences=number)
    lengths = dict(cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, seqused_q=seqused_q, seqused_k=seqused_k)
    check.same_device(q=q, k=k, v=v, sink=sink, **lengths)
    return number


# Ops ----------------------------------------------------------------------------------------


@op(outputs='dq dk dv dsink')
def attend_bwd(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `attend`.

    Args:
        do: gradient of o, contiguous.
        q: as in `attend`, as all that is not said here.
        k: as there.
        v: as there.
        o: first result of `attend`.
        lse: second result.
        sink: as there.
        cu_seqlens_q: as there.
        cu_seqlens_k: as there.
        seqused_q: as there.
        seqused_k: as there.
        scale: as there.
        left: as there.
        right: as there.
        softcap: as there.
        deterministic: whether the bits of dq must be equal in every run; those of the others always are.
        sm_margin: as there; without effect here.
        dlse: gradient of lse, contiguous.

    Returns:
        Gradients of q, k, v and sink in their dtypes, contiguous; the last has shape (0,) without a sink.
    """
    number = _check(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, left, right, softcap)
    packed = cu_seqlens_q is not None
    q_heads, kv_heads, dim, value_dim = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    shape = (*q.shape[:-1], value_dim)
    for name, x in (('do', do), ('o', o)):
        check.dtype(x, name, q.dtype)
        if tuple(x.shape) != shape:
            check.fail(name, f'must be {shape}', check.describe(x))
        check.contiguous(x, name)
        check_vectors(**{name: x})
    check.dtype(lse, 'lse', torch.float32)
    lse_shape = (q_heads, q.shape[0]) if packed else (q.shape[0], q_heads, q.shape[1])
    if tuple(lse.shape) != lse_shape:
        check.fail('lse', f'must be {lse_shape}', check.describe(lse))
    check.contiguous(lse, 'lse')
    if dlse is not None:
        check.dtype(dlse, 'dlse', torch.float32)
        if tuple(dlse.shape) != lse_shape:
            check.fail('dlse', f'must be {lse_shape}', check.describe(dlse))
        check.contiguous(dlse, 'dlse')
    check.same_device(q=q, do=do, o=o, lse=lse, dlse=dlse)
    idle = q.numel() == 0 or k.numel() == 0
    new = torch.zeros if idle else torch.empty
    dq, dk, dv = (new(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    dsink = torch.empty(0, device=q.device) if sink is None else new(sink.shape, dtype=sink.dtype, device=q.device)
    if idle:
        return dq, dk, dv, dsink
    lead = (None,) if packed else ()
    sink_dtype = None if sink is None else sink.dtype
    both = sink is not None and dlse is not None
    below, delta, *plain = torch.empty(3 if both else 2, q.shape[:-1].numel(), dtype=torch.float32, device=q.device)
    rows = (o.view(-1, value_dim), do.view(-1, value_dim), lse[lead], None if dlse is None else dlse[lead], sink)
    delta_static = (value_dim, q.dtype, sink_dtype, dlse is not None)
    launch(attend_delta_kernel, delta_static, *rows, below, delta, plain[0] if both else None)
    if sink is not None:
        own_delta = (plain[0] if both else delta).view(-1, q_heads)
        launch(attend_dsink_kernel, (sink.dtype,), below.view(-1, q_heads), own_delta, sink, dsink)
    static: tuple = (dim, value_dim, q.dtype, packed, seqused_q is not None, seqused_k is not None)
    static += (left >= 0 or right >= 0, softcap > 0)
    operands = (q[lead], k[lead], v[lead], do[lead], below, delta, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    options: tuple = (number, number.bit_length() if isinstance(number, int) else 0)
    options += (scale / softcap if softcap > 0 else scale * LOG2E, softcap * LOG2E, bound(left), bound(right), scale)
    ordered = deterministic or torch.are_deterministic_algorithms_enabled()
    hopper = attend_bwd_sm90_kernel.claims((*static, not ordered), gpu_of(q))
    if hopper:
        blocks = num_blocks(k, 1, number, packed, bwd_keys(dim, value_dim))
        dq_sum = None if ordered else torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        given = (*operands, None if dq_sum is None else dq_sum[lead], dk[lead], dv[lead], blocks, *options)
        launch(attend_bwd_sm90_kernel, (*static, not ordered), *given, size=blocks)
        if dq_sum is not None:
            launch(attend_dq_cast_kernel, (q.dtype,), dq_sum.view(-1, 8), dq.view(-1, 8), scale)
            return dq, dk, dv, dsink
    blocks = num_blocks(q, q_heads // kv_heads, number, packed)
    launch(attend_dq_kernel, static, *operands, dq[lead], blocks, *options, size=blocks)
    blocks = num_blocks(k, 1, number, packed, BLOCK_K)
    for result in () if hopper else key_launches(dim, value_dim):
        launch(attend_dkv_kernel, (*static, result), *operands, dk[lead], dv[lead], blocks, *options, size=blocks)
    return dq, dk, dv, dsink


@op(outputs='o lse', backward=attend_bwd)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    scale: float = 1.0,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    deterministic: bool = False,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of dense or packed sequences; see `flash_attn_func` and `flash_attn_varlen_func`.

    Args:
        q: (batch, tokens, heads, dim), or (tokens, heads, dim) with `cu_seqlens_q`.
        k: the same with its own number of tokens, and of heads that divides that of q.
        v: like k, with a dim of its own.
        sink: (heads,) logits that join the denominator.
        cu_seqlens_q: (sequences + 1,) int32, where packed sequences of queries start, and the end of the last.
        cu_seqlens_k: the same of keys.
        seqused_q: (sequences,) int32, the queries of a sequence that count.
        seqused_k: the same of keys.
        scale: factor of the scores.
        left: keys before the own position that a query sees; -1 is all.
        right: keys behind it.
        softcap: bound of the scores, 0 for none.
        deterministic: whether dq must have equal bits in every run.
        sm_margin: SMs that the persistent kernel of Hopper leaves free; without effect elsewhere.

    Returns:
        o, contiguous with the dtype of q, and lse (batch, heads, tokens) or (heads, tokens) float32.
    """
    number = _check(q, k, v, sink, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, left, right, softcap, True)
    check.at_least(sm_margin, 0, 'sm_margin')
    packed = cu_seqlens_q is not None
    q_heads, kv_heads, dim, value_dim = q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]
    lse_shape = (q_heads, q.shape[0]) if packed else (q.shape[0], q_heads, q.shape[1])
    if k.shape[-3] == 0:
        lse = torch.full(lse_shape, -math.inf, dtype=torch.float32, device=q.device)
        return torch.zeros(*q.shape[:-1], value_dim, dtype=q.dtype, device=q.device), lse
    o = torch.empty(*q.shape[:-1], value_dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device)
    static: tuple = (dim, value_dim, q.dtype, packed, seqused_q is not None, seqused_k is not None)
    static += (left >= 0 or right >= 0, softcap > 0, None if sink is None else sink.dtype)
    blocks = num_blocks(q, q_heads // kv_heads, number, packed)
    lead = (None,) if packed else ()
    given = (q[lead], k[lead], v[lead], cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    bits = number.bit_length() if isinstance(number, int) else 0
    size = blocks if q.numel() else 0
    if dim != WIDE_DIM and variant_for(ATTEND, static, gpu_of(q)) is attend_sm90_kernel:
        if scale < 0.0:  # the kernel takes the maximum before it scales
            given, scale = (-q[lead], *given[1:]), -scale
        workers = max(num_workers(q) - sm_margin, 1)
        own_scale = scale / softcap if softcap > 0 else max(scale * LOG2E, MIN_SCALE)
        options: tuple = (number, bits, own_scale, softcap * LOG2E, bound(left), bound(right), workers)
        launch(attend_sm90_kernel, static, *given, sink, o[lead], lse[lead].transpose(1, 2), *options, size=size)
        return o, lse
    own_scale = scale / softcap if softcap > 0 else scale * LOG2E
    options = (blocks, number, bits, own_scale, softcap * LOG2E, bound(left), bound(right))
    launch(attend_kernel, static, *given, sink, o[lead], lse[lead].transpose(1, 2), *options, size=size)
    return o, lse


# Public functions ---------------------------------------------------------------------------


def may_split(num_splits: int, *tensors: Tensor | None) -> bool:
    """Whether keys are to be split, which is possible only where no gradients are recorded."""
    check.integer(num_splits, 'num_splits', least=0)
    needed = num_splits != 1 and needs_gradient(*tensors)
    if num_splits > 1 and needed:
        check.fail('num_splits', 'must be 0 or 1 where a gradient is needed', str(num_splits))
    return num_splits != 1 and not needed


def _attend_wide(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *lengths: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention of heads of 512 columns: one call for each half of the values."""
    parts = value_parts(q, v)
    if needs_gradient(q, k, v, sink):
        check.fail('q', f'must not require a gradient with {WIDE_DIM} columns', check.describe(q))
    halves = [attend(q, k, part, sink, *lengths, **options) for part in parts]
    return torch.cat([o for o, _ in halves], dim=-1), halves[0][1]


def _default_scale(softmax_scale: float | None, q: Tensor) -> float:
    if softmax_scale is None:
        return max(q.shape[-1], 1) ** -0.5
    check.number(softmax_scale, 'softmax_scale')
    return softmax_scale


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
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
    """Attention of dense sequences, differentiable in q, k, v and sink; takes the calls of FlashAttention.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16; dim is a multiple of 8 up to 256. The last dimension is
            dense, base and other strides are multiples of 16 bytes. Without gradients, dim and value_dim may be 512, or
            q, k and v float8_e4m3fn; the result is then bfloat16.
        k: (batch, keys, kv_heads, dim); heads is a multiple of kv_heads.
        v: (batch, keys, kv_heads, value_dim).
        softmax_scale: factor of the scores, 1 / sqrt(dim) unless given.
        causal: a query sees no key behind its own position; the last query stands at the last key.
        window_size: keys before and behind its own position that a query sees; -1 or None is no bound.
        softcap: bound c of the scores: c * tanh(score / c); 0 is none.
        sink: (heads,) float32 or of the dtype of q: logits that join the denominator; also `learnable_sink`, `s_aux`
            and `attn_sink`.
        deterministic: whether the gradient of q must have the same bits in every run, as under
            `torch.use_deterministic_algorithms`; those of k, v and sink always have. It costs time on Hopper.
        num_splits: into how many parts keys are split; 0 chooses. Only without gradients.
        return_lse: also return lse; also `return_attn_probs`.
        q_descale: (batch, kv_heads) float32, or one number on the device: factor of fp8 queries; 1 unless given.
        k_descale: the same of keys.
        v_descale: the same of values.
        foreign: `sm_margin`, the SMs to leave free on Hopper; it has no effect where keys are split. Arguments of
            FlashAttention that have no meaning here are taken at their neutral value.

    Returns:
        o (batch, tokens, heads, value_dim), with `return_lse` also lse (batch, heads, tokens) float32 without the sink.
        A query that sees no key has o = 0 and lse = -inf.
    """
    sink = take(foreign, sink, None, *SINKS)
    return_lse = bool(return_lse or foreign.pop('return_attn_probs', False))
    sm_margin = take_margin(foreign)
    refuse(foreign)
    batch = check.shape(q, 'q', 'batch tokens heads dim')[0]
    check_tensors(k=k, v=v, sink=sink)
    splitting = may_split(num_splits, q, k, v, sink)
    left, right = window_of(causal, window_size)
    if q.dtype is FP8:
        q, factors = widen_queries(q, k, v, q_descale, k_descale, v_descale, batch)
    else:
        refuse(dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale))
        (q, k, v), factors = autocast(q, k, v), {}
    options: dict[str, Any] = dict(scale=_default_scale(softmax_scale, q), left=left, right=right, softcap=softcap)
    if factors or splitting:
        o, lse = attend_cache(q, k, v, sink=sink, num_splits=num_splits, **options, **factors)
        lse = lse.transpose(1, 2)
    else:
        run = _attend_wide if q.shape[-1] == WIDE_DIM else attend
        o, lse = run(q, k, v, sink, deterministic=bool(deterministic), sm_margin=sm_margin, **options)
    return (o, lse) if return_lse else o


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
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
    """Attention of packed sequences, differentiable in q, k, v and sink; takes the calls of FlashAttention.

    Args:
        q: (tokens, heads, dim), all sequences one behind the other; otherwise as in `flash_attn_func`.
        k: (keys, kv_heads, dim).
        v: (keys, kv_heads, value_dim).
        cu_seqlens_q: (sequences + 1,) int32 or int64 on the device: 0, and where every sequence of queries ends.
        cu_seqlens_k: the same of keys.
        max_seqlen_q: accepted; a wrong value changes nothing.
        max_seqlen_k: the same.
        softmax_scale: as in `flash_attn_func`.
        causal: as there, for every sequence.
        window_size: as there.
        softcap: as there.
        sink: as there.
        deterministic: as there.
        num_splits: as there.
        return_lse: as there.
        seqused_q: (sequences,) int32, the queries of a sequence that count; the others give 0.
        seqused_k: the same of keys; the mask is aligned to the shortened length.
        block_table: (sequences, most_pages) int32, also `page_table`: k and v are pages as in
            `flash_attn_with_kvcache`, with lengths `seqused_k` or those of `cu_seqlens_k`; there is no gradient.
        q_descale: (sequences, kv_heads) float32, or one number on the device: factor of fp8 queries; 1 unless given.
        k_descale: the same of keys; in pages, keys may be of fp8 and queries not. Then there may also be one for every
            token and head, (pages, page_size, kv_heads).
        v_descale: the same of values.
        foreign: as there; `sm_margin` has no effect with pages.

    Returns:
        o (tokens, heads, value_dim), with `return_lse` also lse (heads, tokens). Tokens behind the last sequence have
        o = 0, lse = -inf and gradient 0.
    """
    sink = take(foreign, sink, None, *SINKS)
    block_table = take(foreign, block_table, None, 'page_table')
    return_lse = bool(return_lse or foreign.pop('return_attn_probs', False))
    sm_margin = take_margin(foreign)
    refuse(foreign)
    check.shape(q, 'q', 'tokens heads dim')
    check_tensors(k=k, v=v, sink=sink)
    splitting = may_split(num_splits, q, k, v, sink)
    for name, number in (('max_seqlen_q', max_seqlen_q), ('max_seqlen_k', max_seqlen_k)):
        if number is not None and not isinstance(number, Tensor):
            check.integer(number, name, least=0)
    check.tensor(cu_seqlens_q, 'cu_seqlens_q')
    left, right = window_of(causal, window_size)
    cu_q, cu_k = lengths_int32(cu_seqlens_q, 'cu_seqlens_q'), lengths_int32(cu_seqlens_k, 'cu_seqlens_k')
    used_q, used_k = lengths_int32(seqused_q, 'seqused_q'), lengths_int32(seqused_k, 'seqused_k')
    options: dict[str, Any] = dict(scale=_default_scale(softmax_scale, q), left=left, right=right, softcap=softcap)
    number = check.shape(cu_seqlens_q, 'cu_seqlens_q', 'sequences+1')[0] - 1
    factors: dict[str, Any] = {}
    check.at_least(number, 0, 'the number of sequences')
    if block_table is not None:
        if needs_gradient(q, k, v, sink):
            check.fail('block_table', 'must be None where a gradient is needed', check.describe(block_table))
        if used_k is None:
            used_k = check.tensor(cu_k, 'cu_seqlens_k').diff()
        kv_heads = check.shape(k, 'k', 'pages page_size heads dim')[2]
        options['block_table'] = lengths_int32(block_table, 'block_table')
        if q.dtype is not FP8:
            refuse(dict(q_descale=q_descale))
            factors = dict(k_descale=spread_scale(k_descale, 'k_descale', number, kv_heads, k, True))
            factors |= dict(v_descale=spread_scale(v_descale, 'v_descale', number, kv_heads, k, True))
        cu_k, splitting = None, True
    else:
        check.tensor(cu_k, 'cu_seqlens_k')
        if q.dtype is not FP8:
            refuse(dict(q_descale=q_descale, k_descale=k_descale, v_descale=v_descale))
            q, k, v = autocast(q, k, v)
    if q.dtype is FP8:
        q, factors = widen_queries(q, k, v, q_descale, k_descale, v_descale, number)
    if factors or splitting:
        o, lse = attend_cache(
            q, k, v, used_k, cu_q, cu_k, used_q, sink=sink, num_splits=num_splits, **options, **factors
        )
        lse = lse.transpose(0, 1)
    else:
        options |= dict(deterministic=bool(deterministic), sm_margin=sm_margin)
        run = _attend_wide if q.shape[-1] == WIDE_DIM else attend
        o, lse = run(q, k, v, sink, cu_q, cu_k, used_q, used_k, **options)
    return (o, lse) if return_lse else o


# Cases --------------------------------------------------------------------------------------

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CAUSAL = (-1, 0)
D64, D72, D192 = (64, 64), (72, 72), (192, 128)
SMOKE = (
    grid(queries=[0, 1, 5], keys=[0, 5], heads=[(1, 1)], dims=[D64])
    + grid(queries=[70], keys=[64], heads=[(3, 1)], dims=[D64], band=[CAUSAL], batch=[2])
    + grid(queries=[5], keys=[70], heads=[(2, 2)], dims=[D72], dtype=[F16], band=[CAUSAL, (3, 0), (0, 2)], sink=[F16])
    + grid(queries=[5], keys=[64], heads=[(8, 1)], dims=[D192], softcap=[2.0], sink=[F32], batch=[2], used=[(0, 33)])
    + grid(
        queries=[(0, 5, 0, 70, 1)],
        keys=[(3, 5, 7, 40, 0)],
        heads=[(2, 1)],
        dims=[D64],
        band=[(-1, -1), CAUSAL],
        behind=[2],
        used=[(), (3, 4, 0, 33, 0)],
    )
    + grid(queries=[()], keys=[()], heads=[(2, 2)], dims=[D64], behind=[3])
    + grid(queries=[(33, 20)], keys=[(33, 20)], heads=[(3, 3)], dims=[D64], band=[(8, 4)], fused=[True], sink=[BF16])
    + grid(queries=[(9, 8)], keys=[(9, 70)], heads=[(1, 1)], dims=[D64], band=[CAUSAL], used_q=[(7, 8)])
)
BENCH = (
    grid(queries=[8192], keys=[8192], heads=[(32, 32), (32, 8)], dims=[(128, 128)], batch=[4], band=[CAUSAL])
    + grid(queries=[8192], keys=[8192], heads=[(32, 32)], dims=[D64, D192, (256, 256)], batch=[2], band=[CAUSAL])
    + grid(queries=[(8001,) * 4], keys=[(8001,) * 4], heads=[(24, 8)], dims=[(128, 128)], band=[CAUSAL])
    + grid(queries=[4096], keys=[4096], heads=[(64, 8)], dims=[D64], batch=[1], band=[(128, 0)], sink=[BF16])
)
FULL = (
    grid(queries=[1, 127, 129], keys=[8191], heads=[(6, 2)], dims=[(128, 128), D72], band=[CAUSAL])
    + grid(queries=[129], keys=[129], heads=[(2, 1)], dims=[(40, 40), (80, 80), (96, 112), (256, 256)], band=[(9, 5)])
    + grid(queries=[tuple(range(1, 300))], keys=[tuple(range(299, 0, -1))], heads=[(2, 1)], dims=[D64], band=[CAUSAL])
)
attend.cases(make=random_attention, match=SUMS, smoke=SMOKE, full=FULL, bench=BENCH, flops=products)


def _make_bwd(**case: Any) -> dict:
    """Results and their gradient beside the arguments; the results are those of the twin."""
    given = random_attention(**case)
    small = given['q'].numel() < 1 << 20 and given['k'].numel() < 1 << 20
    shape = (*given['q'].shape[:-1], given['v'].shape[-1])
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    if type(given['q']) is Tensor and (small or given['q'].is_cuda):
        o, lse = (attend.twin if small else attend.call)(**given)
    else:  # a dry run
        o, lse = torch.randn(shape).to(given['q'].dtype), torch.full(lse_shape, 8.0)
    return dict(do=torch.randn(shape).to(o.dtype), o=o, lse=lse, **given)


attend_bwd.cases(
    make=_make_bwd,
    match=dict(rtol=2e-2, atol=2e-2),
    smoke=SMOKE,
    full=FULL,
    bench=BENCH,
    flops=lambda do, o, lse, **given: 5 * products(**given) // 2,
)
