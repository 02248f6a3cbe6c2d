"""Engram hash: the rows of the embedding tables for the n-grams that end at a token.

    mix[l, t, i]  = mix[l, t, i - 1] ^ (ids[t, i] * multipliers[l, i])       int64, wrapping; mix[l, t, -1] = 0
    hash[l, t, (i - 1) * heads + j] = mix[l, t, i] mod vocab_sizes[l, i - 1, j] + offsets[l, (i - 1) * heads + j]

for i = 1 .. ngram - 1, with the remainder of floor division; -1 for image tokens. A thread owns one column of a layer
and loops over a few tokens, so it computes the inverse of a divisor once. Neighbouring threads write neighbouring
numbers. The divisions limit the speed.
"""

import torch
from torch import Tensor

from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import kernel
from tile_kernels.core.lang import T, macro
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op


def choose(ngram: int, num_heads: int, masked: bool, size: int) -> dict:
    """Four tokens use one computed inverse; few tokens are spread over more threads."""
    return dict(block_tokens=4 if size >= 2048 else 1, num_threads=128)


@macro
def floor_mod(value, divisor, inverse):
    """Remainder in 0 .. divisor - 1 of an int64 by an int32 divisor > 0; `inverse` is 1 / divisor in float64.

    For value < 0, the remainder of ~value >= 0 is counted back from the end. The high word is reduced first. The rest
    is below divisor * 2^32, so the quotient has 32 bits. A quotient estimated in float64 is off by at most one.
    """
    negative = value < T.int64(0)
    magnitude = T.reinterpret(T.if_then_else(negative, ~value, value), T.uint64)
    high = T.cast(magnitude >> T.uint64(32), T.uint32) % T.cast(divisor, T.uint32)
    rest = (T.cast(high, T.uint64) << T.uint64(32)) | (magnitude & T.uint64(0xFFFFFFFF))
    quotient = T.cast(T.cast(rest, T.float64) * inverse, T.int64)
    remainder = T.alloc_var(T.int64)
    remainder = T.cast(rest, T.int64) - quotient * T.cast(divisor, T.int64)
    if remainder < T.int64(0):
        remainder = remainder + T.cast(divisor, T.int64)
    if remainder >= T.cast(divisor, T.int64):
        remainder = remainder - T.cast(divisor, T.int64)
    low = T.cast(remainder, T.int32)
    return T.if_then_else(negative, divisor - 1 - low, low)


@kernel(
    choose=choose,
    space=dict(block_tokens=(1, 2, 4, 8), num_threads=(64, 128, 256)),
    pass_configs={'TL_DISABLE_SAFE_MEMORY_ACCESS': True},
)
def hash_kernel(ngram: int, num_heads: int, masked: bool, *, block_tokens: int, num_threads: int):
    """A thread has one column; a block has `lanes` tokens in parallel and `block_tokens` in sequence."""
    columns = (ngram - 1) * num_heads
    lanes = max(1, num_threads // columns)
    rounds = -(-columns // num_threads) if columns > num_threads else 1
    num_tokens, num_layers = T.dynamic('num_tokens'), T.dynamic('num_layers')

    @T.prim_func
    def hash(
        ngram_token_ids: T.Tensor((num_tokens, ngram), T.int32),
        multipliers: T.Tensor((num_layers, ngram), T.int64),
        vocab_sizes: T.Tensor((num_layers, columns), T.int32),
        offsets: T.Tensor((num_layers, columns), T.int32),
        image_token_mask: T.Tensor((num_tokens,), T.uint8),
        out: T.Tensor((num_layers, num_tokens, columns), T.int32),
    ):
        with T.Kernel(T.ceildiv(num_tokens, lanes * block_tokens), num_layers, threads=num_threads) as (pid, layer):
            mix = T.alloc_var(T.int64)
            found = T.alloc_var(T.int32)
            factors = T.alloc_local((ngram,), T.int64)
            ids = T.alloc_local((block_tokens, ngram), T.int32)
            thread = T.get_thread_binding()
            for r in T.unroll(rounds):
                column = r * num_threads + thread % columns if rounds > 1 else thread % columns
                lane = 0 if rounds > 1 else thread // columns
                if column < columns and lane < lanes:
                    divisor = vocab_sizes[layer, column]
                    offset = offsets[layer, column]
                    inverse = T.float64(1.0) / T.cast(divisor, T.float64)
                    for n in T.unroll(ngram):
                        factors[n] = multipliers[layer, n]
                    for i in T.unroll(block_tokens):
                        token = (pid * block_tokens + i) * lanes + lane
                        if token < num_tokens:
                            for n in T.unroll(ngram):
                                ids[i, n] = ngram_token_ids[token, n]
                    for i in T.unroll(block_tokens):
                        token = (pid * block_tokens + i) * lanes + lane
                        if token < num_tokens:
                            mix = T.int64(0)
                            for n in T.unroll(ngram):
                                if n <= column // num_heads + 1:
                                    mix = mix ^ (T.cast(ids[i, n], T.int64) * factors[n])
                            found = floor_mod(mix, divisor, inverse) + offset
                            if masked and image_token_mask[token] != 0:
                                found = -1
                            out[layer, token, column] = found

    return hash


@op(outputs='out', name='hash')
def engram_hash(
    ngram_token_ids: Tensor,
    multipliers: Tensor,
    vocab_sizes: Tensor,
    offsets: Tensor,
    image_token_mask: Tensor | None = None,
) -> Tensor:
    """Rows of the embedding tables for the n-grams that end at each token.

    Args:
        ngram_token_ids: (num_tokens, ngram) int32, contiguous: the token and its predecessors.
        multipliers: (num_layers, ngram) int64, contiguous.
        vocab_sizes: (num_layers, ngram - 1, num_heads) int32, contiguous, all positive.
        offsets: (num_layers, (ngram - 1) * num_heads) int32, contiguous: the first row of each table.
        image_token_mask: (num_tokens,) bool, tokens without a lookup.

    Returns:
        (num_layers, num_tokens, (ngram - 1) * num_heads) int32; -1 for image tokens.
    """
    num_tokens, ngram = check.shape(ngram_token_ids, 'ngram_token_ids', 'num_tokens ngram', dtype=torch.int32)
    num_layers, _ = check.shape(multipliers, 'multipliers', 'num_layers ngram', dtype=torch.int64, ngram=ngram)
    check.at_least(ngram, 2, 'ngram')
    _, _, num_heads = check.shape(
        vocab_sizes,
        'vocab_sizes',
        'num_layers orders num_heads',
        dtype=torch.int32,
        num_layers=num_layers,
        orders=ngram - 1,
    )
    columns = (ngram - 1) * num_heads
    known = {'num_layers': num_layers, 'columns': columns}
    check.shape(offsets, 'offsets', 'num_layers columns', dtype=torch.int32, **known)
    inputs = dict(ngram_token_ids=ngram_token_ids, multipliers=multipliers, vocab_sizes=vocab_sizes, offsets=offsets)
    for name, tensor in inputs.items():
        check.contiguous(tensor, name)
    if image_token_mask is not None:
        check.shape(image_token_mask, 'image_token_mask', 'num_tokens', dtype=torch.bool, num_tokens=num_tokens)
        check.contiguous(image_token_mask, 'image_token_mask')
    check.same_device(**inputs, image_token_mask=image_token_mask)
    out = ngram_token_ids.new_empty(num_layers, num_tokens, columns)
    mask = None if image_token_mask is None else image_token_mask.view(torch.uint8)
    static = (ngram, num_heads, image_token_mask is not None)
    sizes = vocab_sizes.view(num_layers, columns)
    size = 0 if num_layers * columns == 0 else num_tokens
    launch(hash_kernel, static, ngram_token_ids, multipliers, sizes, offsets, mask, out, size=size)
    return out


def _make(
    num_tokens: int,
    ngram: int = 3,
    num_layers: int = 2,
    num_heads: int = 8,
    images: float = 0.0,
    extreme: bool = False,
) -> dict:
    """`extreme` uses 63-bit multipliers of any sign and vocabularies of any size."""
    span = 2**62 if extreme else 2**40
    sizes = torch.randint(1, 2**31 - 1 if extreme else 100_000, (num_layers, ngram - 1, num_heads), dtype=torch.int32)
    return dict(
        ngram_token_ids=torch.randint(0, 2**31 - 1 if extreme else 129280, (num_tokens, ngram), dtype=torch.int32),
        multipliers=torch.randint(-span if extreme else 1, span, (num_layers, ngram)),
        vocab_sizes=sizes // 1000 + 1 if extreme and num_heads == 5 else sizes,
        offsets=torch.randint(0, 1000, (num_layers, (ngram - 1) * num_heads), dtype=torch.int32),
        image_token_mask=torch.rand(num_tokens) < images if images else None,
    )


engram_hash.cases(
    make=_make,
    match='bitwise',
    smoke=grid(num_tokens=[0, 1, 37])
    + grid(num_tokens=[40], ngram=[2, 5], num_heads=[1, 5], images=[0.3], extreme=[True])
    + grid(num_tokens=[3], ngram=[3], num_layers=[1], num_heads=[100])
    + grid(num_tokens=[2051], num_layers=[1], num_heads=[1]),
    full=grid(num_tokens=[4001, 100003], ngram=[3, 4], num_heads=[8, 12], images=[0.0, 0.1], extreme=[False, True]),
    bench=grid(num_tokens=[64, 4096, 8001, 8192]),
)
