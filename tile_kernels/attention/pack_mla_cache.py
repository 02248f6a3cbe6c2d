"""Write latent keys into an fp8 cache: 656 bytes for every token, or 584 for keys of 512 channels.

    f[g]    = 2^ceil(log2(max(max_j |kv[128 g + j]| / 448, 1e-4)))      of the four groups of 128 latent channels
    code[c] = e4m3(kv[c] / f[c / 128])                                  round to nearest even
    token   = 512 codes, 4 factors in float32, 64 rotary channels in bfloat16

Keys of 512 channels are values as a whole. The first 448 have a factor for every 64; it is stored as its exponent byte,
and the last 64 are rotary. A page has 576 bytes of codes and rotary channels for every token. Behind them stand 8 bytes
of factors for every token, the last of which is 0.

A warp packs one token: a lane owns 16 channels, and the lanes of a group find its maximum. A NaN stays NaN and does not
count for the maximum. Memory bound: the floor is reading the keys and writing the tokens.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import FP8, check_extents, check_vectors
from tile_kernels.attention._samples import random_latents
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import WARP, T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import Mut, op
from tile_kernels.device.bits import bits_of, float_of

#: Channels of a key: the latent ones, which are also the value, and the rotary ones.
LATENT, ROTARY = 512, 64
KEY = LATENT + ROTARY
#: Latent channels of a factor, and how many factors a token has.
GROUP = 128
GROUPS = LATENT // GROUP
TOKEN_BYTES = LATENT + 4 * GROUPS + 2 * ROTARY
CACHES = (torch.uint8, FP8)
#: Keys of 512 channels in pages: codes, channels of a factor, bytes of a token before and in the factors of a page.
CODES = LATENT - ROTARY
SMALL_GROUP = 64
ROW_BYTES = CODES + 2 * ROTARY
FACTOR_BYTES = 8
PAGE_BYTES = ROW_BYTES + FACTOR_BYTES  # of every token

WARPS = 4
LANE = LATENT // WARP
HALF = 8  # rotary channels of a lane, and of a load


def token_parts(cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, factors and rotary channels of packed tokens, as views of (..., 656) bytes."""
    codes = cache.view(FP8)[..., :LATENT]
    factors = cache.view(torch.float32)[..., LATENT // 4 : LATENT // 4 + GROUPS]
    rotary = cache.view(torch.bfloat16)[..., (LATENT + 4 * GROUPS) // 2 :]
    return codes, factors, rotary


def page_parts(cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, exponents of factors and rotary channels of pages, as views of (pages, page_size, 1, 584) bytes."""
    page_size = cache.shape[1]
    flat = cache.view(torch.uint8).flatten(1)
    rows = flat[:, : page_size * ROW_BYTES].unflatten(1, (page_size, ROW_BYTES))
    factors = flat[:, page_size * ROW_BYTES :].unflatten(1, (page_size, FACTOR_BYTES))
    return rows[..., :CODES].view(FP8), factors, rows[..., CODES:].view(torch.bfloat16)


def check_pages(cache: Tensor, name: str) -> None:
    """Pages of 584 bytes per token must have no gaps inside and begin at multiples of 16 bytes."""
    check.shape(cache, name, f'pages page_size 1 {PAGE_BYTES}', dtype=CACHES, **{'1': 1, f'{PAGE_BYTES}': PAGE_BYTES})
    check.multiple(cache.shape[1], 2, 'page_size')
    if cache.numel() and (not cache[0].is_contiguous() or check.vector_bytes(cache[:, 0, 0]) < 16):
        check.fail(name, 'must have contiguous pages at multiples of 16 bytes', check.describe(cache))


# Kernels ------------------------------------------------------------------------------------


def factor_of(exponent: Any) -> Any:
    """The factor with this exponent byte; 255 is NaN."""
    bits = T.cast(exponent, T.uint32)
    usual = T.if_then_else(bits == T.uint32(0), T.uint32(1 << 22), bits << T.uint32(23))
    return float_of(T.if_then_else(bits == T.uint32(255), T.uint32(0x7FC00000), usual))


@macro
def encode(x, v, y, lanes: int):
    """Codes of the 16 channels of a lane, whose group has so many lanes; returns the exponent byte of its factor."""
    amax = T.alloc_var(T.float32, init=0.0)
    for e in T.unroll(LANE):
        v[e] = T.cast(x[e], T.float32)
        amax = T.max(amax, T.abs(v[e]))
    for step in range(lanes.bit_length() - 1):
        amax = T.max(amax, T.shfl_xor(amax, 1 << step))
    least = T.max(T.ieee_fdiv(amax, T.float32(448.0)), T.float32(1e-4))
    power = (bits_of(least) + T.uint32(0x7FFFFF)) >> T.uint32(23)  # the exponent, rounded up
    inverse = T.if_then_else(power < T.uint32(255), float_of((T.uint32(254) - power) << T.uint32(23)), T.float32(0.0))
    for e in T.unroll(LANE):
        v[e] = v[e] * inverse
    for e in T.vectorized(LANE):
        y[e] = T.cast(v[e], T.float8_e4m3fn)
    return power


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def pack_mla_pages_kernel(placed: bool):
    """Keys of 512 channels; `placed` as in `pack_mla_cache_kernel`."""
    num_tokens, num_pages, page_size = T.dynamic('num_tokens'), T.dynamic('num_pages'), T.dynamic('page_size')
    stride = T.dynamic('stride')
    code_stride, factor_stride, rotary_stride = (T.dynamic(f'{name}_stride') for name in ('code', 'factor', 'rotary'))
    code_lanes = CODES // LANE

    @T.prim_func
    def pack_mla_pages(
        kv: T.StridedTensor((num_tokens, LATENT), (stride, 1), T.bfloat16),
        slots: T.Tensor((num_tokens,), T.int64),
        codes: T.StridedTensor((num_pages, page_size, CODES), (code_stride, ROW_BYTES, 1), T.float8_e4m3fn),
        factors: T.StridedTensor((num_pages, page_size, FACTOR_BYTES), (factor_stride, FACTOR_BYTES, 1), T.uint8),
        rotary: T.StridedTensor((num_pages, page_size, ROTARY), (rotary_stride, ROW_BYTES // 2, 1), T.bfloat16),
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * WARP) as pid:
            T.assume(stride % 8 == 0)
            T.assume(code_stride % 16 == 0)
            T.assume(rotary_stride % 8 == 0)
            lane = T.get_thread_binding() % WARP
            token = pid * WARPS + T.get_thread_binding() // WARP
            x = T.alloc_local((LANE,), T.bfloat16)
            v = T.alloc_local((LANE,), T.float32)
            y = T.alloc_local((LANE,), T.float8_e4m3fn)
            slot = T.alloc_var(T.int64, init=T.int64(-1))
            if token < num_tokens:
                slot = slots[token] if placed else T.cast(token, T.int64)
                for half in T.unroll(LANE // HALF):
                    for e in T.vectorized(HALF):
                        x[half * HALF + e] = kv[token, lane * LANE + half * HALF + e]
                power = encode(x, v, y, SMALL_GROUP // LANE)
                if T.And(slot >= T.int64(0), slot < T.cast(num_pages, T.int64) * page_size):
                    page = T.cast(T.truncdiv(slot, T.cast(page_size, T.int64)), T.int32)
                    offset = T.cast(T.truncmod(slot, T.cast(page_size, T.int64)), T.int32)
                    if lane < code_lanes:
                        for e in T.vectorized(LANE):
                            codes[page, offset, lane * LANE + e] = y[e]
                    else:
                        for half in T.unroll(LANE // HALF):
                            for e in T.vectorized(HALF):
                                rotary[page, offset, (lane - code_lanes) * LANE + half * HALF + e] = x[half * HALF + e]
                    if lane % (SMALL_GROUP // LANE) == 0:
                        factors[page, offset, lane // (SMALL_GROUP // LANE)] = T.cast(
                            T.if_then_else(lane < code_lanes, power, T.uint32(0)), T.uint8
                        )

    return pack_mla_pages


@kernel(pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True})
def pack_mla_cache_kernel(placed: bool):
    """With `placed`, a token goes to its slot; otherwise tokens go one behind the other."""
    num_tokens, num_slots, stride = T.dynamic('num_tokens'), T.dynamic('num_slots'), T.dynamic('stride')
    row = TOKEN_BYTES

    @T.prim_func
    def pack_mla_cache(
        kv: T.StridedTensor((num_tokens, KEY), (stride, 1), T.bfloat16),
        slots: T.Tensor((num_tokens,), T.int64),
        codes: T.StridedTensor((num_slots, LATENT), (row, 1), T.float8_e4m3fn),
        factors: T.StridedTensor((num_slots, GROUPS), (row // 4, 1), T.float32),
        rotary: T.StridedTensor((num_slots, ROTARY), (row // 2, 1), T.bfloat16),
    ):
        with T.Kernel(T.ceildiv(num_tokens, WARPS), threads=WARPS * WARP) as pid:
            T.assume(stride % 8 == 0)
            lane = T.get_thread_binding() % WARP
            token = pid * WARPS + T.get_thread_binding() // WARP
            x = T.alloc_local((LANE,), T.bfloat16)
            v = T.alloc_local((LANE,), T.float32)
            y = T.alloc_local((LANE,), T.float8_e4m3fn)
            r = T.alloc_local((HALF,), T.bfloat16)
            slot = T.alloc_var(T.int64, init=T.int64(-1))
            if token < num_tokens:
                slot = slots[token] if placed else T.cast(token, T.int64)
                for half in T.unroll(LANE // HALF):
                    for e in T.vectorized(HALF):
                        x[half * HALF + e] = kv[token, lane * LANE + half * HALF + e]
                power = encode(x, v, y, GROUP // LANE)
                if T.And(slot >= T.int64(0), slot < T.cast(num_slots, T.int64)):
                    for e in T.vectorized(LANE):
                        codes[slot, lane * LANE + e] = y[e]
                    if lane % (GROUP // LANE) == 0:
                        factors[slot, lane // (GROUP // LANE)] = float_of(power << T.uint32(23))
                    if lane < ROTARY // HALF:
                        for e in T.vectorized(HALF):
                            r[e] = kv[token, LATENT + lane * HALF + e]
                        for e in T.vectorized(HALF):
                            rotary[slot, lane * HALF + e] = r[e]

    return pack_mla_cache


# Op -----------------------------------------------------------------------------------------


@op()
def _pack_mla_cache(kv: Tensor, cache: Mut, slots: Tensor | None = None) -> None:
    """Pack tokens into a cache; see the public function.

    Args:
        kv: (tokens, 576) or (tokens, 512) bfloat16, rows of 16-byte vectors.
        cache: (slots, 656) uint8 or float8_e4m3fn, contiguous; with 512 channels (pages, page_size, 1, 584).
        slots: (tokens,) int64.
    """
    if check.tensor(kv, 'kv').shape[-1:] == (LATENT,):
        tokens = check.shape(kv, 'kv', 'tokens channels', dtype=torch.bfloat16)[0]
        check_vectors(kv=kv)
        check_pages(cache, 'cache')
        if slots is None:
            check.at_least(cache.shape[0] * cache.shape[1], tokens, 'slots of cache')
        check.packed(slots, 'slots', 'tokens', torch.int64, tokens=tokens)
        check.same_device(kv=kv, cache=cache, slots=slots)
        size = tokens if cache.numel() else 0
        launch(pack_mla_pages_kernel, (slots is not None,), kv, slots, *page_parts(cache), size=size)
        return
    tokens, _ = check_extents(kv, 'kv', f'tokens {KEY}', torch.bfloat16)
    check_vectors(kv=kv)
    capacity, _ = check_extents(cache, 'cache', f'slots {TOKEN_BYTES}', CACHES)
    check.contiguous(cache, 'cache')
    if cache.numel() and check.vector_bytes(cache) < 16:
        check.fail('cache', 'must begin at a multiple of 16 bytes', check.describe(cache))
    if slots is None:
        check.at_least(capacity, tokens, 'slots of cache')
    check.packed(slots, 'slots', 'tokens', torch.int64, tokens=tokens)
    check.same_device(kv=kv, cache=cache, slots=slots)
    parts = token_parts(cache)
    launch(pack_mla_cache_kernel, (slots is not None,), kv, slots, *parts, size=tokens if cache.numel() else 0)


@_pack_mla_cache.public
def pack_mla_cache(kv: Tensor, cache: Tensor | None = None, slots: Tensor | None = None) -> Tensor:
    """Quantize latent keys into tokens of 656 bytes: 512 e4m3 codes, 4 float32 factors, 64 bfloat16 rotary channels.

    Keys of 512 channels take 584 bytes: 448 codes and 64 rotary channels in bfloat16. Exponent bytes of the factors of
    64 channels stand behind all tokens of the page, 8 for each token.

    Args:
        kv: (tokens, 576) or (tokens, 512) bfloat16. Without `cache` any leading dimensions, such as
            (pages, page_size, 1, 576); for 512 channels exactly these, since factors belong to pages.
        cache: (pages, page_size, 1, 656 or 584) uint8 or float8_e4m3fn, contiguous; written in place. There may be
            gaps between pages of 584 bytes. A new uint8 tensor unless given.
        slots: (tokens,) int64, page * page_size + offset of every token. A token with a slot outside the cache, such
            as -1, is skipped. Without slots, tokens fill the cache from its start. A slot must not occur twice.

    Returns:
        The cache. Tokens have the same bits on every GPU.
    """
    check.tensor(kv, 'kv')
    if kv.shape[-1:] == (LATENT,) and (cache is not None or kv.dim() == 4):
        return _pack_pages(kv, cache, slots)
    if kv.dim() < 2 or kv.shape[-1] != KEY:
        check.fail('kv', f'must be (tokens, {KEY}), or {LATENT} channels with pages', check.describe(kv))
    if cache is None:
        if slots is not None:
            check.fail('slots', 'must come with a cache', check.describe(slots))
        cache = torch.empty(*kv.shape[:-1], TOKEN_BYTES, dtype=torch.uint8, device=kv.device)
    elif kv.dim() != 2:
        check.fail('kv', f'must be (tokens, {KEY}) with a cache', check.describe(kv))
    check.dtype(check.tensor(cache, 'cache'), 'cache', CACHES)
    if cache.dim() < 2 or cache.shape[-1] != TOKEN_BYTES:
        check.fail('cache', f'must be (pages, page_size, 1, {TOKEN_BYTES})', check.describe(cache))
    check.contiguous(cache, 'cache')
    pack_mla_cache.call(kv.reshape(-1, KEY), cache.view(-1, TOKEN_BYTES), slots)
    return cache


def _pack_pages(kv: Tensor, cache: Tensor | None, slots: Tensor | None) -> Tensor:
    """Keys of 512 channels in pages of 584 bytes per token."""
    if cache is None:
        if slots is not None:
            check.fail('slots', 'must come with a cache', check.describe(slots))
        cache = torch.empty(*kv.shape[:-1], PAGE_BYTES, dtype=torch.uint8, device=kv.device)
        kv = kv.reshape(-1, LATENT)
    pack_mla_cache.call(kv, cache, slots)
    return cache


# Cases --------------------------------------------------------------------------------------

pack_mla_cache.cases(
    make=random_latents,
    match='bitwise',
    smoke=grid(tokens=[0, 1, 5], spare=[0, 3])
    + grid(tokens=[9], spare=[4], placed=[True], fp8=[True, False])
    + grid(tokens=[6], spare=[0], placed=[True], odd=[True], strided=[True])
    + grid(tokens=[0, 5], spare=[3], page=[4], odd=[False])
    + grid(tokens=[9], spare=[7], page=[16], placed=[True], odd=[True], fp8=[True], strided=[True]),
    full=grid(tokens=[8191, 100_003], spare=[77], placed=[True])
    + grid(tokens=[1], spare=[3_400_000], placed=[True], last=[True]),  # past 2^31 bytes
    bench=grid(tokens=[128, 8192], spare=[64], placed=[True])
    + grid(tokens=[8192], spare=[0])
    + grid(tokens=[8192], spare=[64], placed=[True], page=[64]),
)
