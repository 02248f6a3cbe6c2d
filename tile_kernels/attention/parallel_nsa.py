"""Native sparse attention: a gated sum of three branches, with the arguments of flash-linear-attention.

    o = g_cmp * attention to means of complete blocks + g_slc * attention to selected blocks + g_swa * window

Means of blocks and the gated sum are PyTorch; the three branches are kernels: `attend` for the first and the last,
`nsa_attend` for the second. Blocks are selected by `nsa_scores` and `topk_indices`.
"""

from typing import Any, cast

import torch
from torch import Tensor

from tile_kernels.attention._checks import lengths_int32
from tile_kernels.attention.attend import flash_attn_func, flash_attn_varlen_func
from tile_kernels.attention.nsa_attend import check_tokens, nsa_attend
from tile_kernels.attention.nsa_scores import nsa_scores
from tile_kernels.attention.topk_indices import MAX_K, topk_indices
from tile_kernels.core import check
from tile_kernels.core.autograd import autocast


def _sequence_of(cuts: Tensor, index: Tensor) -> Tensor:
    """The sequence of a token, the last one for tokens behind it."""
    found = torch.searchsorted(cuts, index.to(cuts.dtype), right=True) - 1
    return found.clamp(max=max(cuts.shape[0] - 2, 0))


def _starts(numbers: Tensor) -> Tensor:
    return torch.nn.functional.pad(numbers.cumsum(0), (1, 0)).int()


def mean_blocks(x: Tensor, size: int, cu_seqlens: Tensor | None) -> Tensor:
    """Means of the complete blocks, (batch, blocks, heads, dim); of packed sequences one behind the other."""
    number = x.shape[1] // size
    if cu_seqlens is None:
        return x[:, : number * size].unflatten(1, (number, size)).float().mean(2).to(x.dtype)
    index = torch.arange(number, device=x.device)
    cu_blocks = _starts(cu_seqlens.diff() // size)
    sequence = _sequence_of(cu_blocks, index)
    first = cu_seqlens[sequence] + (index - cu_blocks[sequence]) * size
    token = (first[:, None] + torch.arange(size, device=x.device)).clamp(0, max(x.shape[1] - 1, 0))
    return x[0, token].float().mean(1).to(x.dtype)[None]


def attend_means(
    q: Tensor, k: Tensor, v: Tensor, size: int, scale: float, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attention to the means of complete blocks, o and lse (batch, tokens, heads): token t sees (t + 1) // size.

    Tokens that see equally many are `size` neighbors, of which the first is one later than a block. As heads of one
    query they make this causal attention of blocks + 1 queries to `blocks` keys.
    """
    tokens, heads = q.shape[1:3]
    kv_heads, group = k.shape[2], heads // k.shape[2]
    options: dict[str, Any] = dict(causal=True, softmax_scale=scale, return_lse=True)
    if cu_seqlens is None:
        rows = tokens // size + 1
        padded = torch.nn.functional.pad(q, (0, 0, 0, 0, 1, rows * size - tokens - 1))
    else:
        number = cu_seqlens.shape[0] - 1
        rows = tokens // size + number
        index = torch.arange(tokens, device=q.device)
        sequence = _sequence_of(cu_seqlens, index)
        cu_rows = _starts(cu_seqlens.diff() // size + 1)
        place = cu_rows[sequence] * size + index - cu_seqlens[sequence] + 1
        place = torch.where(index < cu_seqlens[-1], place, rows * size)  # of nobody: behind the last row
        padded = q.new_zeros(rows * size + 1, *q.shape[2:]).index_copy(0, place, q[0])[None, :-1]
    queries = padded.unflatten(1, (rows, size)).unflatten(3, (kv_heads, group)).transpose(2, 3).flatten(2, 4)
    if cu_seqlens is None:
        o, lse = flash_attn_func(queries, k, v, **options)
        lse = lse.transpose(1, 2)
    else:
        cu_blocks = _starts(cu_seqlens.diff() // size)
        o, lse = flash_attn_varlen_func(queries[0], k[0], v[0], cu_rows, cu_blocks, **options)
        o, lse = o[None], lse.transpose(0, 1)[None]
    o = o.unflatten(2, (kv_heads, size, group)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    lse = lse.unflatten(2, (kv_heads, size, group)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    if cu_seqlens is None:
        return o[:, 1 : tokens + 1], lse[:, 1 : tokens + 1]
    own = index < cu_seqlens[-1]
    place = place.clamp(max=max(rows * size - 1, 0))
    return torch.where(own[:, None, None], o[:, place], 0.0), lse[:, place]


def select_blocks(
    q: Tensor, k: Tensor, lse: Tensor, number: int, size: int, scale: float, cu_seqlens: Tensor | None
) -> Tensor:
    """The `number` blocks of largest score of every token and kv head, in rising order, -1 behind them."""
    cu_blocks = None if cu_seqlens is None else _starts(cu_seqlens.diff() // size)
    scores = nsa_scores(q, k, lse.contiguous(), cu_seqlens, cu_blocks, size, scale)
    batch, tokens, heads, columns = scores.shape
    position = torch.arange(tokens, device=q.device)
    if cu_seqlens is not None:
        start = cu_seqlens[_sequence_of(cu_seqlens, position)]
        position = torch.where(position < cu_seqlens[-1], position - start, -size)
    end = (position // size + 1).int()[None, :, None].expand(batch, tokens, heads).reshape(-1).contiguous()
    indices = cast('Tensor', topk_indices(scores.view(-1, columns), number, end=end))
    return indices.view(batch, tokens, heads, number)


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
    """Native sparse attention, causal, differentiable in q, k, v and the gates; takes the calls of fla.

    Args:
        q: (batch, tokens, heads, dim) bfloat16 or float16; dim is a multiple of 8 up to 256.
        k: (batch, tokens, kv_heads, dim); heads is a multiple of kv_heads, up to 64 times as many.
        v: (batch, tokens, kv_heads, value_dim).
        g_cmp: (batch, tokens, heads), gate of attention to the means of blocks that are complete; None leaves it out.
        g_slc: the same of attention to the selected blocks; None is 1.
        g_swa: the same of the window; None is 1.
        block_indices: (batch, tokens, kv_heads, listed) int32 or int64, blocks of the own sequence; -1 is none. Unless
            given, the blocks of largest score: the sum over heads of the weights of their means. The first block, the
            own one and the one before it are always among them.
        block_counts: how many blocks are selected, up to 4096. With `block_indices` an integer is ignored. A tensor
            (batch, tokens, kv_heads) then says how many entries of a list count.
        block_size: keys of a block: 16, 32, 64 or 128.
        window_size: keys that a token sees in the window, itself included; 0 leaves it out.
        scale: factor of the scores of all branches, 1 / sqrt(dim) unless given.
        cu_seqlens: (sequences + 1,) int32 or int64: 0, and where every packed sequence ends; batch is then 1.

    Returns:
        (batch, tokens, heads, value_dim) of the dtype of q. Tokens behind the last sequence are 0.
    """
    check.tensor(q, 'q')
    q, k, v = autocast(q, k, v)
    cuts = lengths_int32(cu_seqlens, 'cu_seqlens')
    check_tokens(q, k, v, block_size, cuts)
    batch, tokens, heads = q.shape[:3]
    for name, gate in (('g_cmp', g_cmp), ('g_slc', g_slc), ('g_swa', g_swa)):
        if gate is not None:
            check.shape(gate, name, 'batch tokens heads', batch=batch, tokens=tokens, heads=heads)
    check.integer(window_size, 'window_size', least=0)
    if scale is None:
        scale = max(q.shape[3], 1) ** -0.5
    check.number(scale, 'scale')
    counts = None
    if isinstance(block_counts, Tensor):
        if block_indices is None:
            check.fail('block_counts', 'must be an integer unless block_indices is given', check.describe(block_counts))
        counts = lengths_int32(block_counts, 'block_counts')
    else:
        check.integer(block_counts, 'block_counts', least=1)
        check.at_most(block_counts, MAX_K, 'block_counts')

    compressed = None
    if g_cmp is not None or block_indices is None:
        means = mean_blocks(k, block_size, cuts)
        value_means = mean_blocks(v, block_size, cuts)
        compressed, lse = attend_means(q, means, value_means, block_size, scale, cuts)
    if block_indices is None:
        number = cast('int', block_counts)
        lists = select_blocks(q.detach(), means.detach(), lse.detach(), number, block_size, scale, cuts)
    else:
        check.dtype(block_indices, 'block_indices', (torch.int32, torch.int64))
        lists = block_indices.clamp(max=(1 << 31) - 1).int().contiguous()
    o = nsa_attend(q, k, v, lists, counts, cuts, block_size, scale)[0]
    if g_slc is not None:
        o = o * g_slc.unsqueeze(-1)
    if g_cmp is not None:
        o = o + cast('Tensor', compressed) * g_cmp.unsqueeze(-1)
    if window_size > 0:
        options: dict[str, Any] = dict(causal=True, window_size=(window_size - 1, 0), softmax_scale=scale)
        if cuts is None:
            window = cast('Tensor', flash_attn_func(q, k, v, **options))
        else:
            window = cast('Tensor', flash_attn_varlen_func(q[0], k[0], v[0], cuts, cuts, **options))[None]
        o = o + (window if g_swa is None else window * g_swa.unsqueeze(-1))
    return o.to(q.dtype)
