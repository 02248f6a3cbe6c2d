"""How much every block of keys matters to a token: the scores by which NSA selects blocks.

    score[t, h, c] = sum_g exp(scale * sum_d q[t, h, g, d] * k[c, h, d] - lse[t, h, g])         c < own block of t

k are the means of the keys of complete blocks, lse that of attention to them. The first block, the own block of t and
the one before it have the score inf, so they are always selected. Blocks behind t have the score -inf.
A thread block owns some tokens of a kv head, all query heads of them, and goes over tiles of 64 blocks. Products are
by mma with blocks as rows, so the sum over heads is one over registers and four lanes, as in `fp8_mqa_logits_kernels`.
"""

import math
from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import HALVES, check_dim, check_heads, check_vectors
from tile_kernels.attention._macros import find_block, padded
from tile_kernels.attention.nsa_attend import MAX_GROUP, SIZES
from tile_kernels.attention.nsa_attend_kernels import LOG2E
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.jit import PLAIN_PRODUCTS, kernel
from tile_kernels.core.lang import T
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

TILE = 64
PAIRS = 128

# Kernel -------------------------------------------------------------------------------------


def padded_heads(group: int) -> int:
    """Columns of the query heads of a token: a multiple of 8."""
    return -(-group // 8) * 8


def tile_tokens(group: int) -> int:
    """Tokens of a thread block, a power of two."""
    return 1 << (PAIRS // padded_heads(group)).bit_length() - 1


@kernel(pass_configs=PLAIN_PRODUCTS)
def nsa_scores_kernel(head_dim: int, dtype: torch.dtype, group: int, size: int, packed: bool):
    """`group` query heads of a kv head, `size` keys of a block."""
    batch, num_tokens, q_heads, kv_heads = (T.dynamic(n) for n in ('batch', 'num_tokens', 'q_heads', 'kv_heads'))
    num_means, num_columns, num_cuts = T.dynamic('num_means'), T.dynamic('num_columns'), T.dynamic('num_cuts')
    elem = T.dtype(dtype)
    wide, heads, tokens = padded(head_dim), padded_heads(group), tile_tokens(group)
    pairs = heads * tokens
    q_strides = [T.dynamic(f'q_stride{dim}') for dim in range(3)]

    @T.prim_func
    def nsa_scores(
        q: T.StridedTensor((batch, num_tokens, q_heads, head_dim), (*q_strides, 1), elem),
        k: T.Tensor((batch, num_means, kv_heads, head_dim), elem),
        lse: T.Tensor((batch, num_tokens, q_heads), T.float32),
        cu_seqlens: T.Tensor((num_cuts,), T.int32),
        cu_blocks: T.Tensor((num_cuts,), T.int32),
        scores: T.Tensor((batch, num_tokens, kv_heads, num_columns), T.float32),
        num_blocks: T.int32,
        num_sequences: T.int32,
        bits: T.int32,
        scale: T.float32,
    ):
        with T.Kernel(num_blocks, kv_heads, threads=128) as (index, head):
            for stride in q_strides:
                T.assume(stride % 8 == 0)
            q_shared = T.alloc_shared((pairs, wide), elem)
            k_shared = T.alloc_shared((TILE, wide), elem)
            lse_shared = T.alloc_shared((pairs,), T.float32)
            out_shared = T.alloc_shared((tokens, TILE), T.float32)
            acc = T.alloc_fragment((TILE, pairs), T.float32)
            sums = T.alloc_fragment((TILE, tokens), T.float32)
            first = T.alloc_var(T.int32, init=0)
            means = T.alloc_var(T.int32)
            own = find_block(cu_seqlens, index, num_sequences, bits, num_tokens, 1, tokens, packed)
            means = T.truncdiv(num_tokens, size)
            if packed:
                first = cu_blocks[T.min(own.sequence, num_sequences)]
                means = cu_blocks[T.min(own.sequence + 1, num_sequences)] - first
            if own.row < own.length:
                exists = T.Or(not packed, own.sequence < num_sequences)
                for j, d in T.Parallel(pairs, wide):
                    q_shared[j, d] = T.if_then_else(
                        T.And(
                            own.row + T.truncdiv(j, heads) < own.length,
                            T.And(T.truncmod(j, heads) < group, T.truncdiv(d, 8) * 8 < head_dim),
                        ),
                        q[
                            own.batch,
                            T.min(own.start + own.row + T.truncdiv(j, heads), num_tokens - 1),
                            head * group + T.min(T.truncmod(j, heads), group - 1),
                            T.min(d, head_dim - 1),
                        ],
                        T.cast(0.0, elem),
                    )
                for j in T.Parallel(pairs):
                    lse_shared[j] = T.if_then_else(
                        T.And(own.row + T.truncdiv(j, heads) < own.length, T.truncmod(j, heads) < group),
                        lse[
                            own.batch,
                            T.min(own.start + own.row + T.truncdiv(j, heads), num_tokens - 1),
                            head * group + T.min(T.truncmod(j, heads), group - 1),
                        ]
                        * LOG2E,
                        T.float32(math.inf),
                    )
                last = T.truncdiv(T.min(own.row + tokens, own.length) - 1, size)
                for tile in T.serial(T.truncdiv(num_columns + TILE - 1, TILE)):
                    if T.And(exists, tile * TILE <= last):
                        for i, d in T.Parallel(TILE, wide):
                            k_shared[i, d] = T.if_then_else(
                                T.And(tile * TILE + i < means, T.truncdiv(d, 8) * 8 < head_dim),
                                k[
                                    own.batch,
                                    T.min(first + tile * TILE + i, num_means - 1),
                                    head,
                                    T.min(d, head_dim - 1),
                                ],
                                T.cast(0.0, elem),
                            )
                        T.clear(acc)
                        T.gemm(k_shared, q_shared, acc, transpose_B=True, policy=T.GemmWarpPolicy.FullRow)
                        for i, j in T.Parallel(TILE, pairs):
                            acc[i, j] = T.exp2(acc[i, j] * scale - lse_shared[j])
                        T.reduce_sum(T.reshape(acc, (TILE, tokens, heads)), sums, dim=2)
                        for i, b in T.Parallel(TILE, tokens):
                            out_shared[b, i] = sums[i, b]
                        T.sync_threads()
                    for b, i in T.Parallel(tokens, TILE):
                        block, mine = tile * TILE + i, T.truncdiv(own.row + b, size)
                        if T.And(own.row + b < own.length, block < num_columns):
                            if T.And(exists, block <= mine):
                                scores[own.batch, own.start + own.row + b, head, block] = T.if_then_else(
                                    T.Or(block == 0, block >= mine - 1), T.float32(math.inf), out_shared[b, i]
                                )
                            else:
                                scores[own.batch, own.start + own.row + b, head, block] = -math.inf
                    T.sync_threads()

    return nsa_scores


# Op -----------------------------------------------------------------------------------------


@op(outputs='scores')
def nsa_scores(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_blocks: Tensor | None = None,
    block_size: int = 64,
    scale: float = 1.0,
) -> Tensor:
    """Scores of the blocks of keys up to a token's own; see `parallel_nsa`.

    Args:
        q: (batch, tokens, heads, dim), as in `nsa_attend`.
        k: (batch, blocks, kv_heads, dim), contiguous: means of the keys of every complete block.
        lse: (batch, tokens, heads) float32, contiguous: that of attention to the complete blocks.
        cu_seqlens: (sequences + 1,) int32, where packed sequences start, and the end of the last; batch is then 1.
        cu_blocks: the same of blocks.
        block_size: keys of a block.
        scale: factor of the scores.

    Returns:
        (batch, tokens, kv_heads, ceil(tokens / block_size)) float32, -inf behind the own block.
    """
    batch, tokens, heads, dim = check.shape(q, 'q', 'batch tokens heads dim', dtype=HALVES)
    means, kv_heads = check.shape(k, 'k', 'batch blocks heads dim', dtype=q.dtype, batch=batch, dim=dim)[1:3]
    check_dim(dim, 'the last extent of q')
    check_heads(heads, kv_heads)
    check.at_most(heads // kv_heads, MAX_GROUP, 'query heads of a kv head')
    check_vectors(q=q, k=k)
    check.contiguous(k, 'k')
    check.packed(lse, 'lse', 'batch tokens heads', torch.float32, batch=batch, tokens=tokens, heads=heads)
    check.one_of(block_size, SIZES, 'block_size')
    check.together(cu_seqlens=cu_seqlens, cu_blocks=cu_blocks)
    number = batch
    if cu_seqlens is not None:
        check.packed(cu_seqlens, 'cu_seqlens', 'sequences+1', torch.int32)
        number = cu_seqlens.shape[0] - 1
        check.packed(cu_blocks, 'cu_blocks', 'sequences+1', torch.int32, **{'sequences+1': number + 1})
        check.equal(batch, 1, 'the batch of packed sequences')
    elif means < tokens // block_size:
        check.fail('k', f'must have {tokens // block_size} blocks or more', check.describe(k))
    check.same_device(q=q, k=k, lse=lse, cu_seqlens=cu_seqlens, cu_blocks=cu_blocks)
    scores = torch.empty((batch, tokens, kv_heads, -(-tokens // block_size)), dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    if means == 0:  # all keys that a token sees are in its own block, the first one
        return scores.fill_(math.inf)
    rows = tile_tokens(group)
    blocks = tokens // rows + number + 1 if cu_seqlens is not None else -(-tokens // rows) * number
    launch(
        nsa_scores_kernel,
        (dim, q.dtype, group, block_size, cu_seqlens is not None),
        q,
        k,
        lse,
        cu_seqlens,
        cu_blocks,
        scores,
        blocks,
        number,
        number.bit_length() if isinstance(number, int) else 0,
        scale * LOG2E,
        size=blocks if q.numel() else 0,
    )
    return scores


# Cases --------------------------------------------------------------------------------------


def _make(
    tokens: Any,
    heads: tuple[int, int],
    dim: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    block_size: int = 16,
    behind: int = 0,
) -> dict:
    """`tokens` are the lengths of packed sequences if it is a tuple; `behind` tokens follow them, which hold NaN."""
    packed = isinstance(tokens, tuple)
    number = sum(tokens) + behind if packed else tokens
    q = torch.randn(batch, number, heads[0], dim).to(dtype)
    k = torch.randn(batch, number // block_size, heads[1], dim).to(dtype)
    lse = torch.randn(batch, number, heads[0]) + 2
    made: dict[str, Any] = dict(q=q, k=k, lse=lse, block_size=block_size, scale=dim**-0.5)
    if packed:
        if behind:
            q[:, -behind:] = math.nan
        made['cu_seqlens'] = torch.tensor([0, *tokens]).cumsum(0).int()
        made['cu_blocks'] = torch.tensor([0, *(n // block_size for n in tokens)]).cumsum(0).int()
    return made


nsa_scores.cases(
    make=_make,
    match=dict(rtol=1e-2, atol=1e-3),
    smoke=grid(tokens=[0, 1, 67], heads=[(4, 2)])
    + grid(tokens=[90], heads=[(17, 1)], dim=[72], dtype=[torch.float16], batch=[2])
    + grid(tokens=[(0, 20, 0, 83, 1)], heads=[(6, 2)], behind=[2]),
    full=grid(tokens=[1, 5000], heads=[(3, 3), (64, 1)], batch=[2], block_size=[16, 64, 128], dim=[128, 256]),
    bench=grid(tokens=[32768], heads=[(64, 4)], dim=[128], block_size=[64]),
)
