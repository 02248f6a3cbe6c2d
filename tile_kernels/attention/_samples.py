"""Inputs of the cases of attention, and the bounds its results keep."""

import itertools
import math
import random
from typing import Any

import torch
from torch import Tensor

#: Weights are rounded to half precision before they meet the values, whose size is about 1.
SUMS: dict = dict(o=dict(rtol=1e-2, atol=1e-2), lse=dict(rtol=1e-6, atol=1e-4), rtol=1e-2, atol=1e-2)


def random_attention(
    queries: Any,
    keys: Any,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    band: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: torch.dtype | None = None,
    behind: int = 0,
    used: tuple = (),
    used_q: tuple = (),
    fused: bool = False,
) -> dict:
    """Arguments of `attend`; `queries` and `keys` are the lengths of packed sequences if they are tuples.

    `behind` tokens follow the last sequence. They, and keys that are not used, hold NaN. With `fused`, q, k and v are
    slices of one tensor.
    """
    packed = isinstance(queries, tuple)
    rows = [sum(n) + behind if isinstance(n, tuple) else n for n in (queries, keys, keys)]
    lead = () if packed else (batch,)
    num_heads = (heads[0], heads[1], heads[1])
    widths = (dims[0], dims[0], dims[1])
    if fused:
        whole = torch.randn(*lead, rows[0], sum(h * d for h, d in zip(num_heads, widths, strict=True))).to(dtype)
        cut = whole.split([h * d for h, d in zip(num_heads, widths, strict=True)], dim=-1)
        q, k, v = (x.unflatten(-1, (h, -1)) for x, h in zip(cut, num_heads, strict=True))
    else:
        q, k, v = (torch.randn(*lead, n, h, d).to(dtype) for n, h, d in zip(rows, num_heads, widths, strict=True))
    made = dict(q=q, k=k, v=v, sink=None if sink is None else torch.randn(heads[0]).to(sink))
    if packed:
        made |= dict(cu_seqlens_q=starts(queries), cu_seqlens_k=starts(keys))
        if behind:
            for x in (q, k, v):
                x[-behind:] = math.nan
    if used:
        made['seqused_k'] = torch.tensor(used, dtype=torch.int32)
        first = [0, *itertools.accumulate(keys)] if packed else None
        for i, number in enumerate(used):
            for x in (k, v):
                own = x[first[i] : first[i + 1]] if first else x[i]
                own[number:] = math.nan
    if used_q:
        made['seqused_q'] = torch.tensor(used_q, dtype=torch.int32)
    return made | dict(scale=dims[0] ** -0.5, left=band[0], right=band[1], softcap=softcap)


def starts(lengths: tuple) -> Tensor:
    """Where packed sequences start, and the end of the last."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def products(q: Tensor, k: Tensor, v: Tensor, **others: object) -> int:
    """Operations of the two products; a mask or lengths on the device may spare some."""
    queries, keys = (math.prod(x.shape[:-2]) for x in (q, k))
    batch = q.shape[0] if q.dim() == 4 else 1
    return 2 * queries * keys // max(batch, 1) * q.shape[-2] * (q.shape[-1] + v.shape[-1])


def random_cache(
    queries: Any,
    lengths: tuple,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
    page: int = 0,
    fp8: bool = False,
    packed: bool = False,
    band: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    sink: torch.dtype | None = None,
    splits: int = 1,
    holes: bool = False,
    wrong: bool = False,
    padding: tuple = (),
) -> dict:
    """Arguments of `decode`. Whatever no sequence uses holds NaN: tails, spare pages, holes.

    Pages are shuffled. With `wrong`, the first sequence has a page that does not exist and the second is too long.
    With `padding`, sequences start behind as many tokens and own the rows of a larger cache in reverse order; the first
    has none.
    """
    number = len(lengths)
    together = isinstance(queries, tuple)
    q = torch.randn(*((sum(queries),) if together else (number, queries)), heads[0], dims[0]).to(dtype)
    made = dict(q=q, cu_seqlens_q=starts(queries) if together else None)
    if page:
        counts = [-(-length // page) for length in lengths]
        most, pages = max(counts) + 1, sum(counts) + 2
        order = random.Random(pages).sample(range(pages), pages)  # not of torch: a dry run has no numbers
        shape: tuple = (pages, page)
        table = torch.full((number, most), pages + 7, dtype=torch.int32, device='cpu')  # never read behind the length
        taken = 0
        slots = []
        for i, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            own = order[taken : taken + count]
            taken += count
            table[i, :count] = torch.tensor(own, dtype=torch.int32, device='cpu')
            slots += [(own[t // page], t % page) for t in range(length)] if length < 1 << 12 else []
            if holes and count:
                table[i, count // 2] = -1 - i
        used = torch.zeros(shape, dtype=torch.bool, device='cpu')
        if slots:
            used[tuple(torch.tensor(slots, device='cpu').T)] = True
        else:
            used[:] = True
        if wrong:
            table[0, 0] = pages
        made['block_table'] = table.to(q.device)
    elif packed:
        shape = (sum(lengths),)
        used = torch.ones(shape, dtype=torch.bool, device='cpu')
        made['cu_seqlens_k'] = starts(lengths)
    else:
        shape = (number, max(lengths) + 5)
        used = torch.arange(shape[1], device='cpu') < torch.tensor(lengths, device='cpu')[:, None]
        if padding:
            used &= torch.arange(shape[1], device='cpu') >= torch.tensor(padding, device='cpu')[:, None]
            used = torch.cat((used, used[:1])).flip(0)
            shape = (number + 1, shape[1])
            rows = torch.arange(number, 0, -1)
            rows[0] = shape[0]
            made |= dict(cache_batch_idx=rows.int(), cache_leftpad=torch.tensor(padding).int())
    if not packed:
        given = torch.tensor(lengths)
        if wrong:
            given[1] += 10_000
        made['cache_seqlens'] = given.int()
    caches = [torch.randn(*shape, heads[1], dim) for dim in dims]
    caches = [x.masked_fill(~used.to(x.device)[..., None, None], math.nan) for x in caches]
    stored = torch.float8_e4m3fn if fp8 else dtype
    made |= dict(k_cache=caches[0].to(stored), v_cache=caches[1].to(stored))
    if fp8:
        made |= dict(k_descale=torch.rand(number, heads[1]) + 0.5, v_descale=torch.rand(number, heads[1]) + 0.5)
    made['sink'] = None if sink is None else torch.randn(heads[0]).to(sink)
    return made | dict(scale=dims[0] ** -0.5, left=band[0], right=band[1], softcap=softcap, num_splits=splits)
