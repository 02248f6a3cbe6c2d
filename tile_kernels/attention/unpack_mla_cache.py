"""Read an fp8 cache of latent keys: codes times their factors, in bfloat16.

    kv[c] = bfloat16(code[c] * f[c / 128])     512 latent channels
    kv[c] = rotary channel, as stored          64 behind them

Tokens of 584 bytes have 448 latent channels with a factor for every 64. A thread owns 8 channels of a token. Memory
bound: the floor is reading the tokens and writing the keys.
"""

import torch
from torch import Tensor

from tile_kernels.attention._samples import random_tokens
from tile_kernels.attention.pack_mla_cache import (
    CACHES,
    CODES,
    FACTOR_BYTES,
    GROUP,
    GROUPS,
    HALF,
    KEY,
    LATENT,
    PAGE_BYTES,
    ROTARY,
    ROW_BYTES,
    SMALL_GROUP,
    TOKEN_BYTES,
    check_pages,
    factor_of,
    page_parts,
    token_parts,
)
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

THREADS = 128
VECTORS = KEY // HALF

# Kernel -------------------------------------------------------------------------------------


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def unpack_mla_cache_kernel():
    """One thread for 16 bytes of a key."""
    num_tokens = T.dynamic('num_tokens')
    row = TOKEN_BYTES

    @T.prim_func
    def unpack_mla_cache(
        codes: T.StridedTensor((num_tokens, LATENT), (row, 1), T.float8_e4m3fn),
        factors: T.StridedTensor((num_tokens, GROUPS), (row // 4, 1), T.float32),
        rotary: T.StridedTensor((num_tokens, ROTARY), (row // 2, 1), T.bfloat16),
        kv: T.Tensor((num_tokens, KEY), T.bfloat16),
    ):
        with T.Kernel(T.ceildiv(num_tokens * VECTORS, THREADS), threads=THREADS) as pid:
            index = pid * THREADS + T.get_thread_binding()
            token = T.truncdiv(index, VECTORS)
            column = T.truncmod(index, VECTORS) * HALF
            x = T.alloc_local((HALF,), T.float8_e4m3fn)
            y = T.alloc_local((HALF,), T.bfloat16)
            if token < num_tokens:
                if column < LATENT:
                    for e in T.vectorized(HALF):
                        x[e] = codes[token, column + e]
                    factor = factors[token, T.truncdiv(column, GROUP)]
                    for e in T.unroll(HALF):
                        y[e] = T.cast(T.cast(x[e], T.float32) * factor, T.bfloat16)
                else:
                    for e in T.vectorized(HALF):
                        y[e] = rotary[token, column - LATENT + e]
                for e in T.vectorized(HALF):
                    kv[token, column + e] = y[e]

    return unpack_mla_cache


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def unpack_mla_pages_kernel():
    """The same for tokens of 584 bytes."""
    num_pages, page_size = T.dynamic('num_pages'), T.dynamic('page_size')
    code_stride, factor_stride, rotary_stride = (T.dynamic(f'{name}_stride') for name in ('code', 'factor', 'rotary'))
    vectors = LATENT // HALF

    @T.prim_func
    def unpack_mla_pages(
        codes: T.StridedTensor((num_pages, page_size, CODES), (code_stride, ROW_BYTES, 1), T.float8_e4m3fn),
        factors: T.StridedTensor((num_pages, page_size, FACTOR_BYTES), (factor_stride, FACTOR_BYTES, 1), T.uint8),
        rotary: T.StridedTensor((num_pages, page_size, ROTARY), (rotary_stride, ROW_BYTES // 2, 1), T.bfloat16),
        kv: T.Tensor((num_pages, page_size, LATENT), T.bfloat16),
    ):
        with T.Kernel(num_pages, T.ceildiv(page_size * vectors, THREADS), threads=THREADS) as (page, part):
            T.assume(code_stride % 16 == 0)
            T.assume(rotary_stride % 8 == 0)
            index = part * THREADS + T.get_thread_binding()
            token = T.truncdiv(index, vectors)
            column = T.truncmod(index, vectors) * HALF
            x = T.alloc_local((HALF,), T.float8_e4m3fn)
            y = T.alloc_local((HALF,), T.bfloat16)
            if token < page_size:
                if column < CODES:
                    for e in T.vectorized(HALF):
                        x[e] = codes[page, token, column + e]
                    factor = factor_of(factors[page, token, T.truncdiv(column, SMALL_GROUP)])
                    for e in T.unroll(HALF):
                        y[e] = T.cast(T.cast(x[e], T.float32) * factor, T.bfloat16)
                else:
                    for e in T.vectorized(HALF):
                        y[e] = rotary[page, token, column - CODES + e]
                for e in T.vectorized(HALF):
                    kv[page, token, column + e] = y[e]

    return unpack_mla_pages


# Op -----------------------------------------------------------------------------------------


@op(outputs='kv')
def unpack_mla_cache(cache: Tensor) -> Tensor:
    """The keys of an fp8 cache of latent attention; the inverse of `pack_mla_cache` but for rounding.

    Args:
        cache: (..., 656) uint8 or float8_e4m3fn, contiguous, such as (pages, page_size, 1, 656). Or
            (pages, page_size, 1, 584) with contiguous pages.

    Returns:
        (..., 576) or (pages, page_size, 1, 512) bfloat16. Bytes that were never packed give any number.
    """
    check.dtype(cache, 'cache', CACHES)
    if cache.dim() == 4 and cache.shape[-1] == PAGE_BYTES:
        check_pages(cache, 'cache')
        kv = torch.empty(*cache.shape[:-1], LATENT, dtype=torch.bfloat16, device=cache.device)
        launch(unpack_mla_pages_kernel, (), *page_parts(cache), kv.squeeze(2), size=kv.numel())
        return kv
    if cache.dim() < 2 or cache.shape[-1] != TOKEN_BYTES:
        check.fail(
            'cache', f'must be (..., {TOKEN_BYTES}) or (pages, page_size, 1, {PAGE_BYTES})', check.describe(cache)
        )
    check.contiguous(cache, 'cache')
    if cache.numel() and check.vector_bytes(cache) < 16:
        check.fail('cache', 'must begin at a multiple of 16 bytes', check.describe(cache))
    kv = torch.empty(*cache.shape[:-1], KEY, dtype=torch.bfloat16, device=cache.device)
    flat = kv.view(-1, KEY)
    launch(unpack_mla_cache_kernel, (), *token_parts(cache.view(-1, TOKEN_BYTES)), flat, size=flat.shape[0])
    return kv


# Cases --------------------------------------------------------------------------------------

unpack_mla_cache.cases(
    make=random_tokens,
    match='bitwise',
    smoke=grid(shape=[(0, 1), (1, 1), (2, 3, 1)], fp8=[False])
    + grid(shape=[(5, 1)], fp8=[True], odd=[True])
    + grid(shape=[(2, 4)], paged=[True], odd=[True])
    + grid(shape=[(0, 2)], paged=[True]),
    full=grid(shape=[(1001, 64, 1)], fp8=[False, True]),
    bench=grid(shape=[(128, 64, 1)], fp8=[False]) + grid(shape=[(128, 64)], paged=[True]),
)
