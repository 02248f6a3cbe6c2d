"""Scores of the lightning indexer of sparse attention: one key for all heads of a query, fp8 codes.

    logits[i, j] = sf[j] * sum_h relu(sum_d q[i, h, d] * kv[j, d]) * weights[i, h]       start[i] <= j < end[i]

Elsewhere logits are -inf, or not written. `fp8_mqa_logits_kernels` describes the kernels. Compute bound: the floor is
the time of the products on fp8 tensor cores.
"""

from typing import Any

import torch
from torch import Tensor

from tile_kernels.attention._checks import check_vectors, dense, lengths_int32
from tile_kernels.attention.fp8_mqa_logits_kernels import FP8, MQA_LOGITS, TILE, num_queries
from tile_kernels.core import check
from tile_kernels.core.cases import grid
from tile_kernels.core.launch import launch
from tile_kernels.core.op import op

DIMS = (32, 64, 128)
MAX_HEADS = 64
#: Thread blocks that give every SM work. Results do not depend on it.
BLOCKS = 264


def check_heads_and_dim(heads: int, dim: int) -> None:
    """Heads and dimension of the indexer."""
    if heads == 0 or heads % 8 or heads > MAX_HEADS:
        check.fail('the heads of q', f'must be a multiple of 8 up to {MAX_HEADS}', str(heads))
    check.one_of(dim, DIMS, 'the last extent of q')


def padded_rows(rows: int, columns: int, device: torch.device) -> Tensor:
    """A float32 matrix whose rows are a multiple of 16 bytes apart."""
    return torch.empty((rows, -(-columns // 4) * 4), dtype=torch.float32, device=device)[:, :columns]


def num_parts(blocks: Any, columns: Any) -> int:
    """Parts of the keys that give every SM work, each of four tiles or more."""
    if not isinstance(blocks, int) or not isinstance(columns, int):
        return 1  # fake tensors: nothing is launched
    return max(1, min(BLOCKS // max(blocks, 1), columns // (4 * TILE)))


def check_operands(q: Tensor, kv: Tensor, sf: Tensor, weights: Tensor, start: Tensor, end: Tensor) -> tuple[int, int]:
    """Check the operands of the indexer; the numbers of queries and keys."""
    rows, heads, dim = check.shape(q, 'q', 'tokens heads dim', dtype=FP8)
    check_heads_and_dim(heads, dim)
    columns, _ = check.shape(kv, 'kv[0]', 'keys dim', dtype=FP8, dim=dim)
    check.packed(sf, 'kv[1]', 'keys', torch.float32, keys=columns)
    check.packed(weights, 'weights', 'tokens heads', torch.float32, tokens=rows, heads=heads)
    check.packed(start, 'start', 'tokens', torch.int32, tokens=rows)
    check.packed(end, 'end', 'tokens', torch.int32, tokens=rows)
    check.contiguous(q, 'q')
    check.contiguous(kv, 'kv[0]')
    check_vectors(**{'q': q, 'kv[0]': kv, 'kv[1]': sf})
    check.same_device(q=q, kv=kv, sf=sf, weights=weights, start=start, end=end)
    return rows, columns


def score(q: Tensor, kv: Tensor, sf: Tensor, weights: Tensor, start: Tensor, end: Tensor, clean_logits: bool) -> Tensor:
    """Scores of operands that are checked."""
    (rows, heads, dim), columns = q.shape, kv.shape[0]
    logits = padded_rows(rows, columns, q.device)
    blocks = -(-rows // num_queries(heads, 0))
    launch(
        MQA_LOGITS,
        (heads, dim, 0, False, clean_logits),
        q.view(rows * heads, dim),
        kv[None],
        sf[None].as_strided((1, columns), (-(-columns // 4) * 4, 1)),
        weights.view(rows * heads),
        start,
        end[:, None],
        None,
        logits,
        blocks,
        num_parts(blocks, columns),
        size=blocks if columns else 0,
    )
    return logits


# Op -----------------------------------------------------------------------------------------


@op(outputs='logits')
def _fp8_mqa_logits(
    q: Tensor, kv: Tensor, sf: Tensor, weights: Tensor, start: Tensor, end: Tensor, clean_logits: bool = True
) -> Tensor:
    """See `fp8_mqa_logits`; `sf` are the factors of the keys."""
    check_operands(q, kv, sf, weights, start, end)
    return score(q, kv, sf, weights, start, end, clean_logits)


@_fp8_mqa_logits.public
@check.names(start='cu_seq_len_k_start', end='cu_seq_len_k_end')
def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    cu_seq_len_k_start: Tensor,
    cu_seq_len_k_end: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """Scores of all keys for every query, summed over heads; takes the calls of DeepGEMM. There is no gradient.

    Args:
        q: (tokens, heads, dim) float8_e4m3fn; heads is a multiple of 8 up to 64, dim is 32, 64 or 128. Slices with gaps
            are copied, also of keys and weights.
        kv: keys (keys, dim) float8_e4m3fn and their factors (keys,) float32.
        weights: (tokens, heads) float32, with the factors of q.
        cu_seq_len_k_start: (tokens,) int32 or int64, the first key that a query sees.
        cu_seq_len_k_end: the same, the key behind the last one; both are clamped to [0, keys].
        clean_logits: whether -inf is written outside the bounds; otherwise nothing is written there.

    Returns:
        (tokens, keys) float32; its rows are a multiple of 16 bytes apart.
    """
    keys, sf = check.pair(kv, 'kv', 'codes, factors')
    start = lengths_int32(cu_seq_len_k_start, 'cu_seq_len_k_start')
    end = lengths_int32(cu_seq_len_k_end, 'cu_seq_len_k_end')
    rows = dense(q, 'q'), dense(keys, 'kv[0]'), sf, dense(weights, 'weights')
    return fp8_mqa_logits.call(*rows, start, end, clean_logits)


# Cases --------------------------------------------------------------------------------------

#: Errors of sums relative to logits of a size of about 10; tensor cores keep 14 bits of a product.
LOGITS = dict(rtol=2e-3, atol=2e-2)


def _make(
    tokens: int, keys: int, heads: int = 64, dim: int = 128, clean_logits: bool = True, causal: bool = False
) -> dict:
    """Random bounds, some of them empty or beyond the keys; keys that nobody sees hold NaN codes and factors."""
    q, kv = torch.randn(tokens, heads, dim).to(FP8), torch.randn(keys, dim).to(FP8)
    sf = torch.rand(keys) + 0.5
    if causal:
        start = torch.zeros(tokens, dtype=torch.int32)
        end = torch.arange(tokens, dtype=torch.int32) + (keys - tokens + 1)
    else:
        start = torch.randint(-3, max(keys - 2, 1), (tokens,), dtype=torch.int32)
        end = start + torch.randint(-2, keys + 3, (tokens,), dtype=torch.int32)
        start, end = start.clamp(min=min(keys, 2)), end.clamp(max=max(keys - 2, 0))
        if tokens > 2:
            start[0], end[0] = -7, -1
            end[1] = start[1]
    if type(sf) is Tensor and keys > 4 and not causal:  # a dry run has no data
        kv[:2], kv[-2:] = torch.tensor(float('nan')).to(FP8), torch.tensor(float('nan')).to(FP8)
        sf[:2], sf[-2:] = float('nan'), float('nan')
    weights = torch.randn(tokens, heads) / (heads * dim) ** 0.5 * 8
    return dict(q=q, kv=kv, sf=sf, weights=weights, start=start, end=end, clean_logits=clean_logits)


fp8_mqa_logits.cases(
    make=_make,
    match=LOGITS,
    smoke=grid(tokens=[0, 5], keys=[0, 1, 70], heads=[64], dim=[128])
    + grid(tokens=[9], keys=[200], heads=[24], dim=[64])
    + grid(tokens=[33], keys=[65], heads=[8], dim=[32, 64]),
    full=grid(tokens=[1, 127, 1001], keys=[1, 63, 4097], heads=[8, 24, 56, 64], dim=[32, 64, 128])
    + grid(tokens=[70_000], keys=[33_000], heads=[8], dim=[32]),  # past 2^31 logits
    bench=grid(tokens=[4096], keys=[8192], heads=[64], dim=[128], causal=[True])
    + grid(tokens=[4096], keys=[65536], heads=[64], dim=[128], causal=[True])
    + grid(tokens=[64], keys=[65536], heads=[32], dim=[128], causal=[True]),
    flops=lambda q, kv, **_: 2 * q.shape[0] * q.shape[1] * q.shape[2] * kv.shape[0],
)
