"""Append keys and values to a cache, dense or in pages.

    k_cache[token cache_seqlens[b] + i of sequence b] = k[b, i]        the same for v

A cache of fp8 gets k / k_descale, saturated. A sequence whose cache would overflow is left as it was, and tokens of
pages that do not exist are dropped. A thread block copies the heads of one token, 16 bytes at a time. Memory bound.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import FP8, HALVES, check_dim, check_table, check_vectors
from tile_kernels.attention._samples import starts
from tile_kernels.attention.decode_kernels import strided
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op

THREADS = 128
WIDTH = 8
PAGE_MULTIPLE = 16

# Kernel -------------------------------------------------------------------------------------


@macro
def copy_heads(x, cache, batch, token, page, slot, descale, sequence, heads, thread):
    """Copy the heads of a token."""
    vectors = x.shape[3] // WIDTH
    narrow = x.dtype != cache.dtype
    values = T.alloc_local((WIDTH,), x.dtype)
    codes = T.alloc_local((WIDTH,), cache.dtype)
    for step in T.serial(T.ceildiv(heads * vectors, THREADS)):
        index = step * THREADS + thread
        head, column = T.truncdiv(index, vectors), T.truncmod(index, vectors) * WIDTH
        if head < heads:
            for e in T.vectorized(WIDTH):
                values[e] = x[batch, token, head, column + e]
            for e in T.unroll(WIDTH):
                if narrow:
                    codes[e] = T.cast(T.cast(values[e], T.float32) / descale[sequence, head], cache.dtype)
                else:
                    codes[e] = values[e]
            for e in T.vectorized(WIDTH):
                cache[page, slot, head, column + e] = codes[e]


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def append_kernel(
    head_dim: int, value_dim: int, dtype: torch.dtype, key_dtype: torch.dtype, packed: bool, paged: bool, indexed: bool
):
    """`packed` tokens belong to sequences of `cu_seqlens`; `indexed` ones to rows of the cache of `cache_batch_idx`."""
    batch, tokens, heads = T.dynamic('batch'), T.dynamic('tokens'), T.dynamic('heads')
    k_batch, k_tokens = T.dynamic('k_batch'), T.dynamic('k_tokens')
    num_starts, num_lengths, num_scales = T.dynamic('num_starts'), T.dynamic('num_lengths'), T.dynamic('num_scales')
    num_tables, num_pages, num_index = T.dynamic('num_tables'), T.dynamic('num_pages'), T.dynamic('num_index')
    table_stride = T.dynamic('table_stride')
    elem, key_elem = T.dtype(dtype), T.dtype(key_dtype)
    k_type, k_strides = strided('k', (batch, tokens, heads, head_dim), elem)
    v_type, v_strides = strided('v', (batch, tokens, heads, value_dim), elem)
    k_cache_type, k_cache_strides = strided('k_cache', (k_batch, k_tokens, heads, head_dim), key_elem)
    v_cache_type, v_cache_strides = strided('v_cache', (k_batch, k_tokens, heads, value_dim), key_elem)

    @T.prim_func
    def append(
        k: k_type,
        v: v_type,
        k_cache: k_cache_type,
        v_cache: v_cache_type,
        cache_seqlens: T.Tensor((num_lengths,), T.int32),
        cu_seqlens: T.Tensor((num_starts,), T.int32),
        block_table: T.StridedTensor((num_tables, num_pages), (table_stride, 1), T.int32),
        cache_batch_idx: T.Tensor((num_index,), T.int32),
        k_descale: T.Tensor((num_scales, heads), T.float32),
        v_descale: T.Tensor((num_scales, heads), T.float32),
        bits: T.int32,
    ):
        with T.Kernel(batch * tokens, threads=THREADS) as pid:
            for stride in k_strides + v_strides + k_cache_strides + v_cache_strides:
                T.assume(stride % 8 == 0)
            thread = T.get_thread_binding()
            sequence = T.alloc_var(T.int32, init=0)
            added = T.alloc_var(T.int32, init=0)  # tokens of the sequence that are appended
            own = T.alloc_var(T.int32, init=0)  # which of them this is
            page = T.alloc_var(T.int32, init=0)
            slot = T.alloc_var(T.int32, init=0)
            if packed:
                for step in T.serial(bits):
                    later = sequence + (1 << (bits - 1 - step))
                    if later <= num_lengths:  # noqa: SIM102
                        if cu_seqlens[T.min(later, num_lengths)] <= pid:
                            sequence = later
                if sequence < num_lengths:
                    added = cu_seqlens[T.min(sequence + 1, num_lengths)] - cu_seqlens[sequence]
                    own = pid - cu_seqlens[sequence]
            else:
                sequence = T.truncdiv(pid, tokens)
                added = tokens
                own = pid - sequence * tokens
            if sequence < num_lengths:
                length = T.max(cache_seqlens[T.min(sequence, num_lengths - 1)], 0)
                key = length + own
                if length + added <= (num_pages * k_tokens if paged else k_tokens):
                    slot = key
                    page = sequence
                    if indexed:
                        page = cache_batch_idx[sequence]
                    if paged:
                        slot = T.truncmod(key, k_tokens)
                        page = block_table[sequence, T.truncdiv(key, k_tokens)]
                    if T.And(page >= 0, page < k_batch):
                        row, token = (0, pid) if packed else (sequence, own)
                        copy_heads(k, k_cache, row, token, page, slot, k_descale, sequence, heads, thread)
                        copy_heads(v, v_cache, row, token, page, slot, v_descale, sequence, heads, thread)

    return append


# Op -----------------------------------------------------------------------------------------


@op()
def append(
    k: Tensor,
    v: Tensor,
    k_cache: Mut,
    v_cache: Mut,
    cache_seqlens: Tensor,
    cu_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> None:
    """Write keys and values behind those of a cache; lengths are not changed.

    Args:
        k: (batch, tokens, kv_heads, dim) bfloat16 or float16, or (tokens, kv_heads, dim) with `cu_seqlens`.
        v: the same with a dim of its own.
        k_cache: (batch, keys, kv_heads, dim), or (pages, page_size, kv_heads, dim) with `block_table`; of k's dtype or
            float8_e4m3fn.
        v_cache: the same with the dim of v.
        cache_seqlens: (sequences,) int32, the keys that every sequence has already.
        cu_seqlens: (sequences + 1,) int32, where packed sequences of new tokens start, and the end of the last.
        block_table: (sequences, most_pages) int32, the pages of every sequence.
        cache_batch_idx: (sequences,) int32, the row of a dense cache of every sequence.
        k_descale: (sequences, kv_heads) float32, what fp8 keys are divided by.
        v_descale: the same of values.
    """
    packed, paged = cu_seqlens is not None, block_table is not None
    lead = 'tokens' if packed else 'batch tokens'
    *batch, _, heads, dim = check.shape(k, 'k', f'{lead} heads dim', dtype=HALVES)
    value_dim = check.shape(v, 'v', f'{lead} heads dim', dtype=k.dtype)[-1]
    if v.shape[:-1] != k.shape[:-1]:
        check.fail('v', f'must be {(*k.shape[:-1], "dim")}', check.describe(v))
    number = check.shape(cu_seqlens, 'cu_seqlens', 'sequences+1')[0] - 1 if cu_seqlens is not None else batch[0]
    check.at_least(number, 0, 'the number of sequences')
    same = {} if paged or cache_batch_idx is not None else dict(batch=number)
    names = 'pages page_size heads dim' if paged else 'batch tokens heads dim'
    known: dict[str, Any] = dict(heads=heads, **same)
    check.shape(k_cache, 'k_cache', names, dtype=(k.dtype, FP8), dim=dim, **known)
    check.shape(v_cache, 'v_cache', names, dtype=k_cache.dtype, dim=value_dim, **known)
    if v_cache.shape[:-1] != k_cache.shape[:-1]:
        check.fail('v_cache', f'must be {(*k_cache.shape[:-1], "dim")}', check.describe(v_cache))
    check_dim(dim, 'the last extent of k', True)
    check_dim(value_dim, 'the last extent of v', True)
    check_vectors(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    check.packed(cache_seqlens, 'cache_seqlens', 'sequences', torch.int32, sequences=number)
    check.packed(cu_seqlens, 'cu_seqlens', 'sequences+1', torch.int32)
    check_table(block_table, number)
    check.packed(cache_batch_idx, 'cache_batch_idx', 'sequences', torch.int32, sequences=number)
    if paged:
        check.multiple(k_cache.shape[1], PAGE_MULTIPLE, 'page_size')
        if cache_batch_idx is not None:
            check.fail('cache_batch_idx', 'must be None with pages', check.describe(cache_batch_idx))
    for name, x in (('k_descale', k_descale), ('v_descale', v_descale)):
        if (k_cache.dtype is FP8) != (x is not None):
            check.fail(name, 'must come with a cache of fp8, and only then', check.describe(x))
        check.packed(x, name, 'sequences kv_heads', torch.float32, sequences=number, kv_heads=heads)
    check.same_device(
        k=k,
        v=v,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_seqlens=cache_seqlens,
        cu_seqlens=cu_seqlens,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    lead_index = (None,) if packed else ()
    launch(
        append_kernel,
        (dim, value_dim, k.dtype, k_cache.dtype, packed, paged, cache_batch_idx is not None),
        k[lead_index],
        v[lead_index],
        k_cache,
        v_cache,
        cache_seqlens,
        cu_seqlens,
        block_table,
        cache_batch_idx,
        k_descale,
        v_descale,
        number.bit_length() if isinstance(number, int) else 0,
        size=k.numel() if number and k_cache.numel() and (block_table is None or block_table.numel()) else 0,
    )


# Cases --------------------------------------------------------------------------------------


def _make(
    new: Any,
    lengths: tuple,
    heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    page: int = 0,
    fp8: bool = False,
    indexed: bool = False,
) -> dict:
    """The last sequence but one has no capacity, and the last a hole, if there are so many."""
    number, packed = len(lengths), isinstance(new, tuple)
    lead = (sum(new),) if packed else (number, new)
    k, v = (torch.randn(*lead, heads, dim).to(dtype) * 200 for dim in dims)
    made: dict[str, Any] = dict(k=k, v=v, cu_seqlens=starts(new) if packed else None)
    stored = torch.float8_e4m3fn if fp8 else dtype
    most = 48
    given = torch.tensor(lengths)
    if number > 2:
        given[-2] = most
    if page:
        pages = most // page
        table = torch.arange(number * pages).flip(0).view(number, pages).int()
        table[-1, -1] = -1
        shape: tuple = (number * pages, page)
        made['block_table'] = table
    else:
        shape = (number + 1 if indexed else number, most)
    if indexed:
        made['cache_batch_idx'] = torch.arange(number, 0, -1).int()
    made |= dict(k_cache=torch.randn(*shape, heads, dims[0]).to(stored))
    made |= dict(v_cache=torch.randn(*shape, heads, dims[1]).to(stored), cache_seqlens=given.int())
    if fp8:
        made |= dict(k_descale=torch.rand(number, heads) + 0.5, v_descale=torch.rand(number, heads) + 0.5)
    return made


BF16, F16 = torch.bfloat16, torch.float16
append.cases(
    make=_make,
    match='bitwise',
    smoke=grid(new=[0, 1, 3], lengths=[(0, 5, 40, 33)], heads=[2], dims=[(64, 32)], page=[16])
    + grid(new=[(2, 0, 1, 15)], lengths=[(9, 3, 0, 31)], heads=[3], dims=[(64, 64)], page=[16], fp8=[True])
    + grid(new=[2], lengths=[(7, 4)], heads=[1], dims=[(40, 64)], dtype=[F16], indexed=[False, True]),
    full=grid(new=[1, 16], lengths=[tuple(range(32))], heads=[8], dims=[(128, 128)], page=[16], fp8=[False, True]),
    bench=grid(new=[1], lengths=[(17,) * 32], heads=[8], dims=[(128, 128)], page=[16], fp8=[False, True]),
)
