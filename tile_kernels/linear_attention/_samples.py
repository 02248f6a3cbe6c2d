"""Inputs of the cases of linear attention, and bounds that its results keep."""

import math
from typing import Any

import torch
from torch import Tensor

#: Decayed scores and states are rounded to half precision before they are multiplied.
DECAY_SUMS: dict = dict(rtol=1.5e-2, atol=1e-3, rms=2e-2)
DECAY_BWD: dict = dict(rtol=2e-2, atol=2e-3, rms=4e-2)


def starts(lengths: tuple) -> Tensor:
    """Where packed sequences start, and the end of the last."""
    return torch.tensor([0, *lengths]).cumsum(0).int()


def random_delta(
    tokens: Any,
    heads: tuple[int, int] = (1, 1),
    dims: tuple[int, int] = (32, 32),
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    chunk: int = 16,
    gate: str = 'mixed',
    betas: str = 'mixed',
    keys: str = 'unit',
    form: int = 0,
    channels: bool = False,
    state: torch.dtype | None = None,
    v_first: bool = False,
    behind: int = 0,
    fused: bool = False,
) -> dict:
    """Arguments of `delta_rule`; `tokens` are the lengths of packed sequences if a tuple.

    `gate` is 'mixed', 'none' (all 0), 'drop' (single -1e4) or 'weak'. `betas` is 'mixed', 'zero' or 'one'. `keys` is
    'unit', 'equal' (one key for all tokens) or 'long' (norm 8, beta divided by 40). `behind` tokens follow the last
    sequence and hold NaN. With `fused`, q, k and v are slices of one tensor.
    """
    packed = isinstance(tokens, tuple)
    total = sum(tokens) + behind if packed else tokens
    number = len(tokens) if packed else batch
    (h, hv), (dim, value_dim) = heads, dims
    widths = (h * dim, h * dim, hv * value_dim)
    if fused:
        parts = torch.randn(batch, total, sum(widths)).split(widths, dim=-1)
    else:
        parts = tuple(torch.randn(batch, total, width) for width in widths)
    q, k, v = (x.unflatten(-1, (n, -1)) for x, n in zip(parts, (h, h, hv), strict=True))
    if keys == 'equal':
        k.copy_(torch.randn(1, 1, h, dim).expand_as(k))
    k.div_(k.norm(dim=-1, keepdim=True))
    if keys == 'long':
        k.mul_(8.0)
    if fused:
        whole = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1).to(dtype)
        q, k, v = (x.unflatten(-1, (n, -1)) for x, n in zip(whole.split(widths, dim=-1), (h, h, hv), strict=True))
    else:
        q, k, v = (x.to(dtype) for x in (q, k, v))
    shape = (batch, total, hv, dim) if channels else (batch, total, hv)
    g = torch.nn.functional.logsigmoid(torch.randn(shape)) * (0.01 if gate == 'weak' else 1.0)
    if gate == 'none':
        g = torch.zeros(shape)
    elif gate == 'drop':
        g[torch.rand(shape) < 0.2] = -1e4
    beta = torch.randn(batch, total, hv) if form else torch.rand(batch, total, hv)
    if betas in ('zero', 'one'):
        beta = torch.full((batch, total, hv), 0.0 if betas == 'zero' else 1.0)
    if keys == 'long':
        beta = beta / 40
    if behind:
        for x in (q, k, v, g, beta):
            x[:, -behind:] = math.nan
    made = dict(q=q, k=k, v=v, g=g, beta=beta, scale=dim**-0.5, chunk_size=chunk, form=form, v_first=v_first)
    if state is not None:
        extents = (number, hv, value_dim, dim) if v_first else (number, hv, dim, value_dim)
        made['initial_state'] = (torch.randn(extents) * 0.3).to(state)
    if packed:
        made['cu_seqlens'] = starts(tokens)
    return made


def delta_products(q: Tensor, v: Tensor, chunk_size: int = 64, **others: object) -> int:
    """Operations of the products of a chunk."""
    rows, dim, value_dim = q.shape[0] * q.shape[1] * v.shape[2], q.shape[3], v.shape[3]
    return 2 * rows * (3 * dim * value_dim + chunk_size * (2 * dim + 2 * value_dim))


def random_decay(
    tokens: Any,
    heads: tuple[int, int],
    dims: tuple[int, int],
    gate: str = '',
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    weighted: bool = False,
    state: torch.dtype | None = None,
    final: bool = False,
    v_first: bool = False,
    behind: int = 0,
    segment: int = 0,
    fused: bool = False,
    scale: float | None = None,
) -> dict:
    """Arguments of `chunk_simple_gla.call`; `tokens` are the lengths of packed sequences if they are a tuple.

    `behind` tokens follow the last sequence and hold NaN. Gates are random, equal for all tokens ('gamma'), or 0 with
    -10000 at single positions ('steep'). With `fused`, q, k and v are slices of one tensor.
    """
    packed = isinstance(tokens, tuple)
    length = sum(tokens) + behind if packed else tokens
    widths = (heads[0] * dims[0], heads[0] * dims[0], heads[1] * dims[1])
    if fused:
        parts = torch.randn(batch, length, sum(widths)).to(dtype).split(widths, dim=-1)
    else:
        parts = tuple(torch.randn(batch, length, width).to(dtype) for width in widths)
    q, k, v = (x.unflatten(-1, (h, -1)) for x, h in zip(parts, (heads[0], heads[0], heads[1]), strict=True))
    g: Tensor | None = None
    if gate == 'gamma':
        g = (-torch.rand(heads[1]) * 0.1).expand(batch, length, heads[1])
    elif gate == 'random':
        g = -torch.rand(batch, length, heads[1]) * 0.3
    elif gate == 'steep':
        g = torch.where(torch.rand(batch, length, heads[1]) < 0.05, -1e4, 0.0)
    weight = torch.rand(batch, length, heads[1]) if weighted else None
    if behind:
        for x in (q, k, v, *(y for y in (g, weight) if y is not None)):
            x[:, -behind:] = math.nan
    number = len(tokens) if packed else batch
    rows = (dims[1], dims[0]) if v_first else dims
    initial = None if state is None else torch.randn(number, heads[1], *rows).to(state)
    return dict(
        q=q,
        k=k,
        v=v,
        g=g,
        weight=weight,
        initial_state=initial,
        cu_seqlens=starts(tokens) if packed else None,
        scale=dims[0] ** -0.5 if scale is None else scale,
        output_final_state=final,
        state_v_first=v_first,
        segment=segment,
    )


def decay_flops(q: Tensor, k: Tensor, v: Tensor, **others: object) -> int:
    """Operations of the four products of a chunk of 64 tokens."""
    rows, dim = math.prod(v.shape[:-1]), q.shape[-1]
    return 2 * rows * (64 * (dim + v.shape[-1]) + 2 * dim * v.shape[-1])


def random_recurrent(
    tokens: Any,
    heads: tuple[int, int],
    dims: tuple[int, int],
    gate: str,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    weighted: bool = False,
    state: torch.dtype | None = None,
    pool: torch.dtype | None = None,
    final: bool = False,
    v_first: bool = False,
    behind: int = 0,
    indexed: bool = True,
    after: torch.dtype | None = None,
) -> dict:
    """Arguments of `fused_recurrent_gla.call`; every second sequence is not in the pool, and slots are shuffled."""
    made = random_decay(
        tokens,
        heads,
        dims,
        'random' if gate == 'head' else '',
        dtype,
        batch,
        weighted,
        state,
        final,
        v_first,
        behind,
    )
    del made['segment']
    if gate == 'channel':
        made['g'] = -torch.rand(*made['v'].shape[:3], dims[0])
    number = len(tokens) if isinstance(tokens, tuple) else batch
    rows = (dims[1], dims[0]) if v_first else dims
    made |= dict(pool=None, state_indices=None)
    if after is not None:
        made['intermediate_states'] = torch.randn(*made['v'].shape[:3], *rows).to(after)
    if pool is not None:
        made['pool'] = torch.randn(number + 2, heads[1], *rows).to(pool)
        indices = torch.arange(number).flip(0) + 1
    if pool is not None and indexed:
        made['state_indices'] = torch.where(torch.arange(number) % 3 == 2, -1, indices).int()
    return made
