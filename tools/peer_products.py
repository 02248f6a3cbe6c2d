"""Works of `tools/peers.py` that multiply matrices: products, attention, linear attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tile_kernels import attention, gemm, linear_attention
from tile_kernels.reference.gemm import grouped_gemm
from tools.peer_rows import fp8_blocks, fp8_rows, widen, widen_blocks
from tools.peer_work import (
    BF16,
    F32,
    Adapter,
    Call,
    Draw,
    Given,
    Work,
    compiled,
    direct,
    first,
    peer,
    rows,
    tileops,
    use,
)

# Matrix products ----------------------------------------------------------------------------


def _operands(draw: Draw, m: int, n: int, k: int) -> Given:
    return dict(a=draw(m, k), b=draw(n, k))


def _fp8_operands(draw: Draw, m: int, n: int, k: int) -> Given:
    (a, a_sf), (b, b_sf) = fp8_rows(draw(m, k)), fp8_blocks(draw(n, k))
    return dict(a=a, a_sf=a_sf, b=b, b_sf=b_sf)


def _scaled_mm(a: Tensor, a_sf: Tensor, b: Tensor, b_sf: Tensor) -> Call:
    one, two = a_sf.t().contiguous().t(), b_sf.t()  # tokens are contiguous
    return Call(lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=two, out_dtype=BF16))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b.t()


def _truth(a: Tensor, b: Tensor) -> Tensor:
    return a[:64].float() @ b.float().t()


def _first_rows(found: Tensor) -> Tensor:
    return found[:64]


def _groups(draw: Draw, groups: int, m: int, n: int, k: int) -> Given:
    ends = torch.cat([draw.ints(m + 1, groups - 1).sort().values, torch.tensor([m], device=draw.device)]).int()
    return dict(a=draw(m, k), b=draw(groups, n, k), group_end=ends)


def _sizes(a: Tensor, b: Tensor, group_end: Tensor) -> tuple:
    starts = F.pad(group_end[:-1], (1, 0))
    return a, b, group_end - starts, starts


def _int4(draw: Draw, m: int, n: int, k: int) -> Given:
    """Rows, codes from 0 to 15 with 8 as zero, and a factor for 128 channels."""
    sf = (0.5 + draw.uniform(n, k // 128)) / 64
    return dict(a=draw(m, k), codes=draw.ints(16, n, k), sf=sf.bfloat16())


def _int4_weight(codes: Tensor, sf: Tensor) -> Tensor:
    return ((codes - 8) * sf.float().repeat_interleave(128, -1)).bfloat16()


def _int8(draw: Draw, m: int, n: int, k: int) -> Given:
    codes = (draw.ints(255, n, k) - 127).to(torch.int8)
    return dict(a=draw(m, k), codes=codes, sf=((0.5 + draw.uniform(n)) / 512).bfloat16())


def _int8_weight(codes: Tensor, sf: Tensor) -> Tensor:
    return (codes.float() * sf.float().unsqueeze(-1)).bfloat16()


def _our_packed(a: Tensor, codes: Tensor, sf: Tensor, fmt: str) -> Call:
    weight = gemm.pack_weight(codes, sf, fmt=fmt)
    return Call(lambda: gemm.gemm_dequant(a, weight))


def _dense(make: Callable[..., Tensor]) -> Adapter:
    """The matrix in half precision, in cuBLAS."""

    def adapter(a: Tensor, codes: Tensor, sf: Tensor) -> Call:
        weight = make(codes, sf).t()
        return Call(lambda: a @ weight)

    return adapter


def _torch_int4(a: Tensor, codes: Tensor, sf: Tensor) -> Call:
    pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8)  # torchao's tile-packed layout uses this kernel
    packed = torch._convert_weight_to_int4pack(pairs, 8)
    factors = torch.stack((sf, torch.zeros_like(sf)), -1).transpose(0, 1).contiguous()
    return Call(lambda: torch._weight_int4pack_mm(a, packed, 128, factors))


def _tileops_int4(a: Tensor, codes: Tensor, sf: Tensor) -> Call:
    op = use('tileops.gemm:GEMMW4A16FwdOp')(128)
    packed = op.repack((codes[:, 1::2] << 4 | codes[:, ::2]).to(torch.uint8))
    half, factors, zero = a.half(), sf.half(), torch.full_like(sf, 8, dtype=torch.uint8)
    return Call(lambda: op(half, packed, factors, zero))


def _two_of_four(draw: Draw, m: int, n: int, k: int) -> Given:
    fours = draw(n, k).unflatten(-1, (-1, 4))
    kept = torch.zeros_like(fours).scatter(-1, fours.abs().topk(2).indices, 1)
    return dict(a=draw(m, k), b=(fours * kept).flatten(-2))


def _our_sparse(a: Tensor, b: Tensor) -> Call:
    weight = gemm.compress24(b)
    return Call(lambda: gemm.gemm_sparse24(a, weight))


def _torch_sparse(a: Tensor, b: Tensor) -> Call:
    weight = torch.sparse.to_sparse_semi_structured(b)
    return Call(lambda: F.linear(a, weight))


def _images(draw: Draw, batch: int, size: int, channels: int, n: int, kernel: int, stride: int) -> Given:
    weight = draw(n, kernel, kernel, channels, scale=(kernel * kernel * channels) ** -0.5)
    return dict(x=draw(batch, size, size, channels), weight=weight, stride=stride)


def _convolve(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Channels last, with half the filter as padding."""
    flat = F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), stride=stride, padding=weight.shape[1] // 2)
    return flat.permute(0, 2, 3, 1)


PRODUCT = dict(m=5, n=128, k=256)
WEIGHTS = rows('m n k', '1 8192 8192', '4096 8192 8192', '16 8192 8192', '64 8192 8192', '1 7168 20480', '33 3072 5120')
DENSE = ('8192 8192 8192', '64 7168 2048', '4096 4096 7168', '1 7168 7168', '24001 2048 1408', '16 7168 7168')
IMAGES = ('128 56 64 64 3 1', '8 64 320 320 3 1', '128 28 256 512 1 2', '33 14 256 256 3 1')
PRODUCTS = [
    Work(
        'gemm.gemm',
        _operands,
        direct(gemm.gemm),
        _truth,
        {'cuBLAS': direct(_matmul), 'TileOPs': tileops('gemm:GEMMFwdOp')},
        rows('m n k', *DENSE, '1003 2880 3072'),
        PRODUCT,
        part=_first_rows,
    ),
    Work(
        'gemm.gemm_fp8',
        _fp8_operands,
        direct(gemm.gemm_fp8),
        lambda a, a_sf, b, b_sf: _truth(widen((a[:64], a_sf[:64])), widen_blocks((b, b_sf))),
        {
            'cuBLAS scaled_mm': _scaled_mm,
            'TileOPs': tileops('gemm:GEMMFP8FwdOp', args=lambda a, a_sf, b, b_sf: (a, b, a_sf, b_sf)),
        },
        rows('m n k', *DENSE[:3], '1003 3072 2048'),
        PRODUCT,
        part=_first_rows,
    ),
    Work(
        'gemm.grouped_gemm',
        _groups,
        direct(gemm.grouped_gemm),
        grouped_gemm,
        {
            'torch grouped_mm': lambda a, b, group_end: Call(partial(torch._grouped_mm, a, b.mT, offs=group_end)),
            'TileOPs': tileops('gemm:GroupedGEMMFwdOp', args=_sizes),
        },
        rows('groups m n k', '32 8192 4096 7168', '64 512 3072 2560', '16 12001 2048 1408'),
        dict(groups=3, m=37, n=64, k=64),
    ),
    Work(
        'gemm.gemm_dequant',
        _int4,
        partial(_our_packed, fmt='u4_1x128'),
        lambda a, codes, sf: _truth(a, _int4_weight(codes, sf)),
        {'torch int4pack_mm': _torch_int4, 'TileOPs, float16': _tileops_int4, 'cuBLAS bf16': _dense(_int4_weight)},
        WEIGHTS,
        PRODUCT,
        part=_first_rows,
        name='int4',
    ),
    Work(
        'gemm.gemm_dequant',
        _int8,
        partial(_our_packed, fmt='s8_1xk'),
        lambda a, codes, sf: _truth(a, _int8_weight(codes, sf)),
        {
            'torch int8pack_mm': direct(lambda a, codes, sf: torch._weight_int8pack_mm(a, codes, sf)),
            'cuBLAS bf16': _dense(_int8_weight),
        },
        WEIGHTS[:3],
        PRODUCT,
        part=_first_rows,
        name='int8',
    ),
    Work(
        'gemm.gemm_sparse24',
        _two_of_four,
        _our_sparse,
        _truth,
        {'torch semi-structured': _torch_sparse, 'cuBLAS dense': direct(_matmul)},
        rows('m n k', '8192 8192 8192', '4096 4096 7168', '1003 3072 2048'),
        PRODUCT,
        part=_first_rows,
    ),
    Work(
        'gemm.conv2d',
        _images,
        direct(lambda x, weight, stride: gemm.conv2d(x, weight, stride=stride, padding=weight.shape[1] // 2)),
        lambda x, weight, stride: _convolve(x[:1].float(), weight.float(), stride),
        {'cuDNN': direct(_convolve)},
        rows('batch size channels n kernel stride', *IMAGES),
        dict(batch=1, size=9, channels=16, n=16, kernel=3, stride=1),
        part=lambda y: y[:1],
    ),
]

# Attention ----------------------------------------------------------------------------------


def _sequences(
    draw: Draw, shape: tuple[int, int], heads: tuple[int, int], dims: tuple[int, int], causal: bool, bwd: bool = False
) -> Given:
    q, k, v = (draw(*shape, n, dim) for n, dim in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])))
    given = dict(q=q, k=k, v=v, causal=causal)
    return {'do': draw(*shape, heads[0], dims[1]), **given} if bwd else given


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """One head, (queries, dim) and (keys, dim), in float32; the last query stands at the last key."""
    scores = q.float() @ k.float().t() / math.sqrt(q.shape[-1])
    if causal:
        seen = torch.ones_like(scores, dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v.float()


def _two_heads(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The first and the last head of the first sequence."""
    return torch.stack([_attend(q[0, :, h], k[0, :, h], v[0, :, h], causal) for h in (0, -1)], 1)


def _first_gradients(do: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Gradients of the first keys and values of the first sequence, and of the first head that sees them."""
    key, value = (x[0, :, 0].float().requires_grad_() for x in (k, v))
    found = []
    for h in range(q.shape[2] // k.shape[2]):
        query = q[0, :, h].float().requires_grad_()
        with torch.enable_grad():
            o = _attend(query, key, value, causal)
        found.append(torch.autograd.grad(o, (query, key, value), do[0, :, h].float()))
    dq, dk, dv = zip(*found, strict=True)
    return dq[0], torch.stack(dk).sum(0), torch.stack(dv).sum(0)


def _sdpa(backend: str) -> Adapter:
    def adapter(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        chosen, grouped = getattr(SDPBackend, backend), q.shape[2] != k.shape[2]

        def call() -> Tensor:
            with sdpa_kernel(chosen):
                own, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
                return F.scaled_dot_product_attention(own, key, value, is_causal=causal, enable_gqa=grouped)

        return Call(call, lambda o: o.transpose(1, 2))

    return adapter


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    run, sizes, where = torch.compile(flex_attention, dynamic=False), (q.shape[1], k.shape[1]), str(q.device)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, *sizes, device=where) if causal else None
    own, key, value = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    named: Given = dict(block_mask=mask, enable_gqa=q.shape[2] != k.shape[2])
    return Call(partial(run, own, key, value, **named), lambda o: o.transpose(1, 2))


def _our_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    return Call(lambda: attention.flash_attn_func(q, k, v, causal=causal))


def _gradients(adapter: Adapter, names: str) -> Adapter:
    """Gradients of a forward call, through autograd; `do` is the gradient of its first result."""

    def wrapped(do: Tensor, **given: Any) -> Call:
        leaves = {name: given[name].detach().clone().requires_grad_() for name in names.split()}
        with torch.enable_grad():
            made = adapter(**given | leaves)
            o = made.read(made.run())
        return Call(lambda: torch.autograd.grad(o, tuple(leaves.values()), do, retain_graph=True))

    return wrapped


def _tileops_bwd(do: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    found = use('tileops.attention:GQADenseWithLSEFwdOp')(is_causal=causal)(q, k, v)
    return Call(partial(use('tileops.attention:GQADenseBwdOp')(is_causal=causal), do, q, k, v, found[0], found[1]))


def _packed(draw: Draw, lengths: int, most: int, heads: tuple[int, int], dim: int) -> Given:
    """Sequences of 1 to `most` tokens."""
    sizes = draw.ints(most, lengths) + 1
    cu = F.pad(sizes.cumsum(0), (1, 0)).int()
    q, k, v = (draw(int(cu[-1]), n, dim) for n in (heads[0], heads[1], heads[1]))
    return dict(q=q, k=k, v=v, cu=cu, most=int(sizes.max()))


def _first_sequence(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, most: int) -> Tensor:
    return F.pad(_attend(q[: cu[1], 0], k[: cu[1], 0], v[: cu[1], 0], True), (0, 0, 0, 64))[:64]


def _first_of(found: Tensor, cu: Tensor) -> Tensor:
    """The first tokens of the first sequence, as `_first_sequence` returns them."""
    return F.pad(found[: cu[1], 0], (0, 0, 0, 64))[:64]


def _our_varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, most: int) -> Call:
    run = attention.flash_attn_varlen_func
    return Call(lambda: run(q, k, v, cu, cu, most, most, causal=True), lambda o: _first_of(o, cu))


def _tileops_varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, most: int) -> Call:
    run = use('tileops.attention:GQAVarlenFwdOp')(is_causal=True)
    return Call(partial(run, q, k, v, cu, cu), lambda o: _first_of(o, cu))


def _nested(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, most: int) -> Call:
    make, ends = torch.nested.nested_tensor_from_jagged, cu.long()
    own, key, value = (make(x, ends, max_seqlen=most, min_seqlen=1).transpose(1, 2) for x in (q, k, v))
    run = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return Call(lambda: run(own, key, value), lambda o: _first_of(o.transpose(1, 2).values(), cu))


def _table(draw: Draw, batch: int, keys: int) -> tuple[int, Given]:
    """Pages of 64 keys in random order; all sequences are equally long."""
    pages = batch * -(-keys // 64)
    order = draw.uniform(pages).argsort().view(batch, -1).int()
    return pages, dict(table=order, lens=torch.full((batch,), keys, dtype=torch.int32, device=draw.device))


def _paged(draw: Draw, batch: int, keys: int, heads: tuple[int, int], dim: int) -> Given:
    pages, given = _table(draw, batch, keys)
    k, v = (draw(pages, 64, heads[1], dim) for _ in range(2))
    return dict(q=draw(batch, 1, heads[0], dim), k=k, v=v, **given)


def _contiguous(x: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """The cache without pages, (batch, keys, kv_heads, dim)."""
    return x[table.long()].flatten(1, 2)[:, : int(lens[0])]


def _decode(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    """The first sequence."""
    key, value = (_contiguous(x, table[:1], lens)[0] for x in (k, v))
    group = q.shape[2] // k.shape[2]
    heads = [_attend(q[0, :, h], key[:, h // group], value[:, h // group], True) for h in range(q.shape[2])]
    return torch.stack(heads, 1)


def _our_decode(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Call:
    run = attention.flash_attn_with_kvcache
    return Call(lambda: run(q, k, v, cache_seqlens=lens, block_table=table, causal=True))


def _tileops_decode(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Call:
    run = use('tileops.attention:GQAPagedFwdOp')(is_causal=True)
    cu = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return Call(partial(run, q.squeeze(1), k, v, table, lens, cu), lambda o: o.unsqueeze(1))


def _sdpa_decode(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: Tensor) -> Call:
    key, value = (_contiguous(x, table, lens).transpose(1, 2).contiguous() for x in (k, v))
    run = partial(F.scaled_dot_product_attention, q.transpose(1, 2), key, value, enable_gqa=True)
    return Call(run, lambda o: o.transpose(1, 2))


def _latent(draw: Draw, batch: int, keys: int, heads: int) -> Given:
    pages, given = _table(draw, batch, keys)
    return dict(q=draw(batch, 1, heads, 576), cache=draw(pages, 64, 1, 576), **given)


def _latent_truth(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    keys = _contiguous(cache, table[:1], lens)[0, :, 0]
    return _attend(q[0, 0], keys, keys[:, :512], False).unsqueeze(0)


def _our_latent(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor) -> Call:
    return Call(lambda: attention.flash_mla_with_kvcache(q, cache, table, lens, 512, causal=True), first)


def _scores(draw: Draw, queries: int, keys: int, topk: int) -> Given:
    return dict(logits=draw(queries, keys, dtype=F32), k=topk)


def _tileops_topk(logits: Tensor, k: int) -> tuple:
    starts = torch.zeros(1, logits.shape[0], dtype=torch.int32, device=logits.device)
    return logits[None, :, :, None], starts, torch.full_like(starts, logits.shape[1])


def _in_order(found: Tensor) -> Tensor:
    return found.long().sort(-1).values


LENGTHS = (
    '4x8192 32x32 128x128 yes',
    '2x8192 16x4 128x128 yes',
    '1x4096 128x128 192x128 yes',
    '8x1024 16x16 64x64 yes',
    '2x8192 16x16 128x128 no',
    '4x512 32x8 128x128 yes',
    '2x8001 24x8 128x128 yes',
    '2x8192 16x16 256x256 yes',
)
LONG, SHORT = rows('shape heads dims causal', *LENGTHS), dict(shape=(1, 40), heads=(4, 2), dims=(32, 32), causal=True)
CUDNN, FA2 = _sdpa('CUDNN_ATTENTION'), _sdpa('FLASH_ATTENTION')
ATTENTION = [
    Work(
        'attention.attend',
        _sequences,
        _our_attention,
        _two_heads,
        {
            'cuDNN': CUDNN,
            'torch FA2': FA2,
            'FlexAttention': _flex,
            'TileOPs': tileops(
                'attention:GQADenseFwdOp', lambda causal, **_: dict(is_causal=causal), lambda q, k, v, causal: (q, k, v)
            ),
        },
        LONG,
        SHORT,
        0.02,
        lambda o: o[0, :, [0, -1]],
    ),
    Work(
        'attention.attend_bwd',
        partial(_sequences, bwd=True),
        _gradients(_our_attention, 'q k v'),
        _first_gradients,
        {'cuDNN': _gradients(CUDNN, 'q k v'), 'torch FA2': _gradients(FA2, 'q k v'), 'TileOPs': _tileops_bwd},
        LONG,
        SHORT,
        0.02,
        lambda found: tuple(x[0, :, 0] for x in found),
        gradient=True,
    ),
    Work(
        'attention.attend',
        _packed,
        _our_varlen,
        _first_sequence,
        {'TileOPs': _tileops_varlen, 'torch nested SDPA': _nested},
        rows('lengths most heads dim', '33 8192 16x4 128', '64 1000 32x8 128'),
        dict(lengths=3, most=20, heads=(2, 1), dim=32),
        0.02,
        name='varlen',
    ),
    Work(
        'attention.decode',
        _paged,
        _our_decode,
        _decode,
        {'TileOPs': _tileops_decode, 'torch SDPA, dense cache': _sdpa_decode},
        rows('batch keys heads dim', '32 4096 32x8 128', '1 1024 32x4 128', '1 131072 32x4 128', '17 4001 24x8 128'),
        dict(batch=2, keys=70, heads=(4, 2), dim=32),
        0.02,
        first,
    ),
    Work(
        'attention.mla_decode',
        _latent,
        _our_latent,
        _latent_truth,
        {
            'TileOPs': tileops(
                'attention:MLAPagedFwdOp',
                lambda **_: dict(kv_lora_rank=512, is_causal=True),
                lambda q, cache, table, lens: (q, cache.squeeze(2), table, lens),
                first,
            )
        },
        rows('batch keys heads', '128 4096 128', '128 1151 128', '128 4096 16', '1 32768 16'),
        dict(batch=2, keys=70, heads=4),
        0.02,
        first,
    ),
    Work(
        'attention.topk_indices',
        _scores,
        direct(lambda logits, k: attention.topk_indices(logits, k), _in_order),
        lambda logits, k: _in_order(logits.topk(k).indices),
        {
            'torch.topk': direct(lambda logits, k: logits.topk(k).indices, _in_order),
            'TileOPs': tileops(
                'attention:TopKSelectFwdOp',
                lambda k, **_: dict(top_k=k),
                _tileops_topk,
                lambda found: _in_order(found[0, :, :, 0] if found.shape[-1] == 1 else found[0, :, 0]),
            ),
        },
        rows('queries keys topk', '64 8192 2048', '64 65536 2048', '4096 65536 2048'),
        dict(queries=3, keys=100, topk=16),
        1e-3,
    ),
]

# Linear attention ---------------------------------------------------------------------------

#: Tokens at the start that are compared with the recurrence; a gradient is 0 behind them.
CHECKED = 256


def _linear(
    draw: Draw, shape: tuple[int, int], heads: tuple[int, int], delta: bool = False, form: str = '', bwd: bool = False
) -> Given:
    """Unit queries and keys, values, log decays of heads or channels in float32, and step sizes."""
    q, k = (F.normalize(draw(*shape, heads[0], 128, dtype=F32), dim=-1).bfloat16() for _ in range(2))
    decay = (128,) if form == 'channel' else ()
    given = dict(q=q, k=k, v=draw(*shape, heads[1], 128))
    given['g'] = F.logsigmoid(draw(*shape, heads[1], *decay, dtype=F32) + 3)
    if delta:
        given['beta'] = draw(*shape, heads[1], dtype=F32).sigmoid().bfloat16()
    if bwd:
        given['do'] = draw(*given['v'].shape)
        given['do'][:, CHECKED:] = 0
    return given


def _recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None = None, state: Tensor | None = None
) -> Tensor:
    """The first tokens of the first sequence, one after the other in float32."""
    group = v.shape[2] // q.shape[2]
    own, key = (x[0, :CHECKED].float().repeat_interleave(group, 1) for x in (q, k))
    now = torch.zeros(v.shape[2], q.shape[3], v.shape[3], device=v.device) if state is None else state[0].float()
    found = []
    for t in range(own.shape[0]):
        decay = g[0, t].float().exp()
        now = now * (decay[:, None, None] if decay.dim() == 1 else decay[:, :, None])
        value = v[0, t].float()
        if beta is not None:
            value = (value - (key[t].unsqueeze(-1) * now).sum(1)) * beta[0, t].float().unsqueeze(-1)
        now = now + key[t].unsqueeze(-1) * value.unsqueeze(1)
        found.append((own[t].unsqueeze(-1) * now).sum(1) * q.shape[3] ** -0.5)
    return torch.stack(found)


def _recurrence_bwd(do: Tensor, **given: Tensor) -> tuple[Tensor, ...]:
    short = {name: x[:1, :CHECKED].detach().float().requires_grad_() for name, x in given.items()}
    with torch.enable_grad():
        o = _recurrence(**short)
    return tuple(x[0] for x in torch.autograd.grad(o, tuple(short.values()), do[0, :CHECKED].float()))


def _checked(found: Any) -> Any:
    """The tokens that are compared, of one or several tensors."""
    return found[0, :CHECKED] if isinstance(found, Tensor) else tuple(map(_checked, found))


def _fla(path: str) -> Adapter:
    return lambda **given: Call(partial(use(f'fla.{path}'), **given), first)


def _tileops_linear(name: str) -> Adapter:
    """Decays and step sizes in half precision."""

    def adapter(state: Tensor | None = None, **given: Tensor) -> Call:
        half = {key: x.bfloat16() for key, x in given.items()}
        return Call(partial(use(f'tileops.linear_attention:{name}')(), **half, initial_state=state), first)

    return adapter


def _states(draw: Draw, batch: int, heads: tuple[int, int]) -> Given:
    given = _linear(draw, (batch, 1), heads, delta=True)
    return given | {'state': draw(batch, heads[1], 128, 128, dtype=F32)}


def _step(state: Tensor, run: Callable[..., Any] | str, **given: Tensor) -> Call:
    called = use(run) if isinstance(run, str) else run
    return Call(partial(called, **given, initial_state=state, output_final_state=True), first)


def _scan(draw: Draw, shape: tuple[int, int], heads: int, dim: int, groups: int, states: int) -> Given:
    dt = F.softplus(draw(*shape, heads, dtype=F32) - 2)
    b, c = (draw(*shape, groups, states, scale=states**-0.25) for _ in range(2))
    return dict(x=draw(*shape, heads, dim), dt=dt, A=-torch.exp(draw(heads, dtype=F32, scale=0.5)), B=b, C=c)


def _scan_truth(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The recurrence, in which C is the query and B the key."""
    return _recurrence(C, B, x * dt.unsqueeze(-1), dt * A) * C.shape[-1] ** 0.5


def _taps(x: Tensor, weight: Tensor) -> Tensor:
    """The causal convolution with SiLU."""
    padded = F.pad(x.float(), (0, 0, 3, 0))
    parts = [weight[:, j].float() * padded[:, j : j + x.shape[1]] for j in range(4)]
    return F.silu(parts[0] + parts[1] + parts[2] + parts[3]).to(x.dtype)


def _tileops_conv(x: Tensor, weight: Tensor) -> Call:
    run, (batch, length, channels) = use('tileops.mamba:CausalConv1dFwdOp')('silu'), x.shape
    state = x.new_zeros(batch, channels, weight.shape[1] - 1)  # written in place
    cu = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=x.device)
    return Call(partial(run, x.flatten(0, 1), weight, state, cu), lambda y: y.view_as(x))


def _recurrent(
    op: str, name: str, ours: Any, path: str, lists: tuple, tiny: Any, also: Any = None, **make: Any
) -> list:
    """Forward and, with a second list of cases, gradients of a recurrence, beside fla."""
    works = []
    for cases, bwd in zip(lists, (False, True), strict=False):
        leaves = 'q k v g beta' if make.get('delta') else 'q k v g'
        mine, theirs = direct(ours, first), _fla(path)
        peers = {'fla': _gradients(theirs, leaves) if bwd else theirs, **({} if bwd else also or {})}
        adapter, truth = (_gradients(mine, leaves), _recurrence_bwd) if bwd else (mine, _recurrence)
        full, bound, draw = (
            f'linear_attention.{op}{"_bwd" * bwd}',
            0.03 if bwd else 0.02,
            partial(_linear, bwd=bwd, **make),
        )
        works.append(Work(full, draw, adapter, truth, peers, cases, tiny, bound, _checked, bwd, name))
    return works


HEADS = rows('shape heads', '1x32768 16x64', '8x1024 16x64', '4x8192 16x16', '1x8192 2x8', '1x8001 16x32')
FEWER = rows('shape heads', '1x32768 16x32', '8x1024 16x32', '4x8192 16x16')
WIDE = rows('shape heads', '1x8192 96x96', '1x8192 64x64', '4x2001 16x16')
STEPS, SCANS = ('32 16x32', '1 16x32', '128 4x8', '33 16x32'), ('8x4096 80 64 1 128', '1x8192 128 64 8 128')
GROUPED, EQUAL = dict(shape=(1, 40), heads=(1, 2)), dict(shape=(1, 40), heads=(2, 2))
DELTA, KDA = linear_attention.chunk_gated_delta_rule, linear_attention.chunk_kda
GDN, KDA_OP, GLA_OP = ({'TileOPs': _tileops_linear(f'{name}FwdOp')} for name in ('GDN', 'KDA', 'GLA'))
FLA_DELTA, FLA_STEP = 'ops.gated_delta_rule.chunk:chunk_gated_delta_rule', 'ops.gated_delta_rule.fused_recurrent'
channel: Given = dict(delta=True, form='channel')
LINEAR = [
    *_recurrent('delta_rule', 'gated', DELTA, FLA_DELTA, (HEADS, FEWER), GROUPED, GDN, delta=True),
    *_recurrent('delta_rule', 'KDA', KDA, 'ops.kda.chunk:chunk_kda', (WIDE, WIDE), EQUAL, KDA_OP, **channel),
    *_recurrent(
        'chunk_simple_gla',
        '',
        linear_attention.chunk_simple_gla,
        'ops.simple_gla.chunk:chunk_simple_gla',
        (WIDE, WIDE),
        EQUAL,
    ),
    *_recurrent(
        'chunk_gla', '', linear_attention.chunk_gla, 'ops.gla.chunk:chunk_gla', (WIDE,), EQUAL, GLA_OP, form='channel'
    ),
    Work(
        'linear_attention.recurrent_delta',
        _states,
        partial(_step, run=linear_attention.fused_recurrent_gated_delta_rule),
        _recurrence,
        {'fla': partial(_step, run=f'fla.{FLA_STEP}:fused_recurrent_gated_delta_rule'), **GDN},
        rows('batch heads', *STEPS),
        dict(batch=2, heads=(1, 2)),
        0.02,
        _checked,
    ),
    Work(
        'linear_attention.mamba_chunk_scan_combined',
        _scan,
        direct(lambda **given: linear_attention.mamba_chunk_scan_combined(**given, chunk_size=256)),
        _scan_truth,
        {'TileOPs': tileops('mamba:Mamba2FwdOp', lambda **_: dict(chunk_size=256, dt_softplus=False), read=first)},
        rows('shape heads dim groups states', *SCANS, '2x2001 24 64 1 64'),
        dict(shape=(1, 40), heads=2, dim=32, groups=1, states=32),
        0.02,
        _checked,
    ),
    Work(
        'linear_attention.causal_conv1d',
        lambda draw, shape, channels: dict(x=draw(*shape, channels), weight=draw(channels, 4, scale=0.5)),
        direct(linear_attention.causal_conv1d, first),
        _taps,
        {
            'fla': peer('fla.modules.causal_conv1d.ops:causal_conv1d', None, first, activation='silu'),
            'TileOPs': _tileops_conv,
            'torch.compile': compiled(_taps),
        },
        rows('shape channels', '1x8192 8192', '8x1024 4096', '3x1001 2048'),
        dict(shape=(2, 9), channels=64),
    ),
]
