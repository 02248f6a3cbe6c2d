"""Read an fp8 cache of latent keys: codes times their factors, in bfloat16.

    kv[c] = bfloat16(code[c] * f[c / 128])     512 latent channels
    kv[c] = rotary channel, as stored          64 behind them

A thread owns 8 channels of a token. Memory bound: the floor is reading the tokens and writing the keys.
"""

import torch
from torch import Tensor

from tile_kernels.attention._samples import random_tokens
from tile_kernels.attention.pack_mla_cache import (
    CACHES,
    GROUP,
    GROUPS,
    HALF,
    KEY,
    LATENT,
    ROTARY,
    TOKEN_BYTES,
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


# Op -----------------------------------------------------------------------------------------


@op(outputs='kv')
def unpack_mla_cache(cache: Tensor) -> Tensor:
    """The keys of an fp8 cache of latent attention; the inverse of `pack_mla_cache` but for rounding.

    Args:
        cache: (..., 656) uint8 or float8_e4m3fn, contiguous, such as (pages, page_size, 1, 656).

    Returns:
        (..., 576) bfloat16. Bytes that were never packed give any number.
    """
    check.dtype(cache, 'cache', CACHES)
    if cache.dim() < 2 or cache.shape[-1] != TOKEN_BYTES:
        check.fail('cache', f'must be (..., {TOKEN_BYTES})', check.describe(cache))
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
    smoke=grid(shape=[(0, 1), (1, 1), (2, 3, 1)], fp8=[False]) + grid(shape=[(5, 1)], fp8=[True], odd=[True]),
    full=grid(shape=[(1001, 64, 1)], fp8=[False, True]),
    bench=grid(shape=[(128, 64, 1)], fp8=[False]),
)
