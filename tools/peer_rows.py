"""Works of `tools/peers.py` that move memory: norms, casts, SwiGLU, rope, transposes, MoE, mHC."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tile_kernels import activation, mhc, moe, norm, quant, transform, transpose
from tile_kernels.core.formats import QuantTensor
from tile_kernels.reference.mhc import big_fuse, sinkhorn
from tools.peer_work import F32, FP8, Call, Draw, Given, Work, compiled, direct, first, peer, rows, tileops, use

EPS = 1e-6
SGLANG, TE = 'sglang.kernels.ops', 'transformer_engine.pytorch.triton'

#: Tokens and hidden sizes of the ops that work on rows; nobody should tune to the last ones.
SIZES = ('64 7168', '4096 7168', '1 4096', '1000 2560', '256 7168', '12001 4096', '8 4096', '1003 2048', '257 2880')
ROWS, TINY = rows('tokens hidden', *SIZES), dict(tokens=5, hidden=256)
HALVES = rows('tokens hidden', '64 2048', '4096 2048', '1 2048', '1000 1536', '256 2048', '12001 2048', '8 7168')
STREAMS = rows('tokens hidden', '64 4096', '4096 4096', '1 4096', '1000 2560', '256 4096', '12001 2048', '8 7168')

# Norms --------------------------------------------------------------------------------------


def _rows(draw: Draw, tokens: int, hidden: int, names: str = 'x', weight: bool = False, wide: int = 1) -> Given:
    given = {name: draw(tokens, hidden * (wide if name == 'x' else 1)) for name in names.split()}
    return given | {'weight': 1 + draw(hidden, scale=0.1)} if weight else given


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.float()).to(x.dtype)


def _add_rms(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    z = x + residual
    return _rms(z, weight), z


def _norm_bwd_inputs(draw: Draw, **case: int) -> Given:
    given = _rows(draw, **case, names='dy x', weight=True)
    return given | {'rstd': torch.rsqrt(given['x'].float().square().mean(-1) + EPS)}


def _norm_bwd(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    normal, upstream = x.float() * rstd.unsqueeze(-1), dy.float()
    weighted = upstream * weight.float()
    dx = (weighted - normal * (normal * weighted).mean(-1, keepdim=True)) * rstd.unsqueeze(-1)
    return dx.to(x.dtype), (normal * upstream).sum(0).to(weight.dtype)


def _sglang_norm(x: Tensor, weight: Tensor) -> Call:
    run = use(f'{SGLANG}.layernorm.norm:rmsnorm')

    def call() -> Tensor:
        y = torch.empty_like(x)
        run(x, weight, y, EPS)
        return y

    return Call(call)


def _sglang_add_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Call:
    run, y, z = use(f'{SGLANG}.layernorm.norm:fused_add_rmsnorm'), x.clone(), residual.clone()
    return Call(lambda: run(y, z, weight, EPS), lambda _: (y.clone(), z.clone()))


def _liger_norm_bwd(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Call:
    run = use('liger_kernel.ops.rms_norm:rms_norm_backward')
    found = use('liger_kernel.ops.rms_norm:rms_norm_forward')(x, weight, EPS, 0.0, 'llama', None)
    saved, block, warps, mode = found[2], found[3], found[4], found[5]
    return Call(lambda: run(dy, x, weight, saved, 0.0, mode, block, warps, False, None, True))


def _aten_norm_bwd(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> Call:
    run = torch.ops.aten._fused_rms_norm_backward
    return Call(partial(run, dy, x, [x.shape[-1]], rstd.unsqueeze(-1), weight, [True, True]))


def _liger(x: Tensor, weight: Tensor) -> tuple:
    return x, weight, EPS, 0.0, 'llama', None


def _liger_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple:
    return x, residual, weight, EPS, 0.0, 'llama'


NORM = [
    Work(
        'norm.norm_forward',
        partial(_rows, weight=True),
        direct(lambda x, weight: norm.norm_forward(x, weight, EPS)[0]),
        _rms,
        {
            'SGLang CUDA': _sglang_norm,
            'Liger': peer('liger_kernel.ops.rms_norm:rms_norm_forward', _liger, first),
            'TileOPs': tileops('norm:RMSNormFwdOp', lambda x, **_: dict(normalized_shape=(x.shape[-1],), eps=EPS)),
            'torch.compile': compiled(_rms),
            'torch F.rms_norm': direct(lambda x, weight: F.rms_norm(x, (x.shape[-1],), weight, EPS)),
        },
        ROWS,
        TINY,
    ),
    Work(
        'norm.norm_forward',
        partial(_rows, names='x residual', weight=True),
        direct(lambda x, residual, weight: norm.norm_forward(x, weight, EPS, residual), lambda found: found[::2]),
        _add_rms,
        {
            'SGLang CUDA, in place': _sglang_add_norm,
            'Liger': peer(
                'liger_kernel.ops.fused_add_rms_norm:fused_add_rms_norm_forward', _liger_add, lambda y: (y[0], y[1])
            ),
            'TileOPs': tileops('norm:FusedAddRMSNormFwdOp', lambda **_: dict(eps=EPS)),
            'torch.compile': compiled(_add_rms),
        },
        ROWS,
        TINY,
        name='add',
    ),
    Work(
        'norm.norm_backward',
        _norm_bwd_inputs,
        direct(lambda dy, x, weight, rstd: norm.norm_backward(dy, x, weight, rstd)),
        _norm_bwd,
        {'Liger': _liger_norm_bwd, 'torch aten': _aten_norm_bwd, 'torch.compile': compiled(_norm_bwd)},
        ROWS[:6],
        TINY,
    ),
]

# Casts --------------------------------------------------------------------------------------


def fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and a factor for every token and 128 channels."""
    k = x.shape[-1]
    groups = F.pad(x, (0, -k % 128)).unflatten(-1, (-1, 128)).float()
    sf = groups.abs().amax(-1, keepdim=True).clamp(1e-4) / 448
    return (groups / sf).to(FP8).flatten(-2)[..., :k], sf.squeeze(-1)


def fp8_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes, and a factor for every block of 128 x 128."""
    m, k = x.shape
    blocks = F.pad(x, (0, -k % 128, 0, -m % 128)).float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    sf = blocks.abs().amax((1, 3), keepdim=True).clamp(1e-4) / 448
    return (blocks / sf).to(FP8).flatten(2).flatten(0, 1)[:m, :k], sf.squeeze((1, 3))


def widen(found: Any) -> Tensor:
    """The numbers that codes and factors of groups of 128 stand for."""
    codes, sf = found
    return codes.float() * sf.float().repeat_interleave(128, -1)[..., : codes.shape[-1]]


def widen_blocks(found: Any) -> Tensor:
    """The same of blocks."""
    codes, sf = found
    return widen((codes, sf.repeat_interleave(128, 0)[: codes.shape[0]]))


def _widen_packed(found: Any) -> Tensor:
    """The same, where four exponents share an int32."""
    codes, sf = found
    exponents = sf.clone(memory_format=torch.contiguous_format).view(torch.uint8)[:, : -(-codes.shape[-1] // 128)]
    return widen((codes, torch.exp2(exponents.float() - 127)))


def _codes(draw: Draw, tokens: int, hidden: int) -> Given:
    codes, sf = fp8_rows(draw(tokens, hidden))
    return dict(codes=codes, sf=sf)


def _cast_back(codes: Tensor, sf: Tensor) -> Tensor:
    return (codes.unflatten(-1, (-1, 128)).float() * sf.unsqueeze(-1)).flatten(-2).bfloat16()


def _our_cast_back(codes: Tensor, sf: Tensor) -> Call:
    return Call(partial(quant.cast_back, QuantTensor(codes, sf, 'e4m3_1x128_f32')))


PACKED: Given = dict(use_tma_aligned_col_major_sf=True, round_sf=True, use_packed_ue8m0=True)
GROUP_QUANT = f'{SGLANG}.quantization.per_token_group_quant:per_token_group_quant'
AO = 'torchao.kernel.blockwise_quantization'
CASTS = [
    Work(
        'quant.per_token_cast',
        _rows,
        direct(lambda x: quant.per_token_cast(x, 'e4m3', 128), widen),
        lambda x: x,
        {
            'SGLang CUDA': peer(GROUP_QUANT, read=widen, group_size=128),
            'SGLang Triton': peer(f'{SGLANG}.quantization.act_quant_triton:act_quant', read=widen, block_size=128),
            'torchao': peer(f'{AO}:fp8_blockwise_act_quant', read=widen, block_size=128),
            'torch.compile': compiled(fp8_rows, widen),
        },
        ROWS,
        TINY,
        0.04,
    ),
    Work(
        'quant.per_token_cast',
        _rows,
        direct(lambda x: quant.per_token_cast(x, 'e4m3', 128, **PACKED), _widen_packed),
        lambda x: x,
        {
            'SGLang CUDA': peer(
                GROUP_QUANT, read=_widen_packed, group_size=128, scale_ue8m0=True, column_major_scales=True
            )
        },
        ROWS[:7],
        TINY,
        0.04,
        name='packed',
    ),
    Work(
        'quant.per_block_cast',
        _rows,
        direct(lambda x: quant.per_block_cast(x, 'e4m3', (128, 128)), widen_blocks),
        lambda x: x,
        {
            'TileOPs': tileops('quantization:FP8QuantPerBlockFwdOp', read=widen_blocks),
            'torchao': peer(f'{AO}:fp8_blockwise_weight_quant', read=widen_blocks, block_size=128),
            'torch.compile': compiled(fp8_blocks, widen_blocks),
        },
        rows('tokens hidden', '4096 7168', '12001 4096', '1003 2048', '7168 2048'),
        TINY,
        0.04,
    ),
    Work(
        'quant.dequantize',
        _codes,
        _our_cast_back,
        _cast_back,
        {'torch.compile': compiled(_cast_back)},
        ROWS[:6],
        TINY,
    ),
]

# Activations, rope, transposes --------------------------------------------------------------


def _silu_mul(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    return (F.silu(gate) * up).bfloat16()


def _silu_mul_bwd(x: Tensor, dy: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, -1)
    s, upstream = torch.sigmoid(gate), dy.float()
    return torch.cat([upstream * up * s * (1 + gate * (1 - s)), upstream * gate * s], -1).to(x.dtype)


def _rope_inputs(draw: Draw, tokens: int, heads: int, kv_heads: int, dim: int) -> Given:
    angle = torch.arange(4096)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    cache = torch.cat((angle.cos(), angle.sin()), 1).to(draw.device)
    return dict(q=draw(tokens, heads, dim), k=draw(tokens, kv_heads, dim), cache=cache, at=draw.ints(4096, tokens))


def _rope(q: Tensor, k: Tensor, cache: Tensor, at: Tensor) -> tuple[Tensor, ...]:
    cos, sin = cache[at].unsqueeze(1).chunk(2, -1)
    parts = [x.float().chunk(2, -1) for x in (q, k)]
    return tuple(torch.cat((a * cos - b * sin, a * sin + b * cos), -1).bfloat16() for a, b in parts)


def _in_place(function: Callable[..., Any], q: Tensor, k: Tensor) -> Call:
    mine, other = q.clone(), k.clone()
    return Call(lambda: function(mine, other), lambda _: (mine.clone(), other.clone()))


def _our_rope(q: Tensor, k: Tensor, cache: Tensor, at: Tensor) -> Call:
    return _in_place(lambda a, b: transform.apply_rotary(a, cache, b, at), q, k)


def _sglang_rope(q: Tensor, k: Tensor, cache: Tensor, at: Tensor) -> Call:
    run = use(f'{SGLANG}.attention.rope:apply_rope_inplace')
    return _in_place(lambda a, b: run(a, b, cache, at, is_neox=True), q, k)


def _liger_rope(q: Tensor, k: Tensor, cache: Tensor, at: Tensor) -> Call:
    run = use('liger_kernel.ops.rope:rope_forward')  # it takes the angles of the tokens, not positions
    cos, sin = (torch.cat((x, x), -1).unsqueeze(0) for x in cache[at].chunk(2, -1))
    return _in_place(lambda a, b: run(a[None].transpose(1, 2), b[None].transpose(1, 2), cos, sin), q, k)


def _tileops_rope(q: Tensor, k: Tensor, cache: Tensor, at: Tensor) -> Call:
    op = use('tileops.rope:RoPENeoxPositionIdsFwdOp')  # out of place, one tensor each
    one, two = op(cache.shape[0]), op(cache.shape[0])
    return Call(lambda: (one(q, at), two(k, at)))


def _matrices(draw: Draw, shape: tuple[int, int, int]) -> Given:
    return dict(x=draw(*shape))


def _flip(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


LIGER_SWIGLU = 'liger_kernel.ops.swiglu:swiglu_fused_gate_up'
ROWWISE = [
    Work(
        'activation.swiglu_forward',
        partial(_rows, wide=2),
        direct(lambda x: activation.swiglu_forward(x, 'bf16')),
        _silu_mul,
        {
            'SGLang CUDA': peer(f'{SGLANG}.activation.activation:silu_and_mul'),
            'Liger': peer(f'{LIGER_SWIGLU}_forward', read=lambda found: found[1]),
            'torch.compile': compiled(_silu_mul),
        },
        HALVES,
        TINY,
    ),
    Work(
        'activation.swiglu_forward_and_per_token_cast',
        partial(_rows, wide=2),
        direct(lambda x: activation.swiglu_forward_and_per_token_cast(x, 'e4m3', 128), widen),
        _silu_mul,
        {
            'SGLang CUDA': peer(GROUP_QUANT, read=widen, group_size=128, fuse_silu_and_mul=True),
            'torch.compile': compiled(lambda x: fp8_rows(_silu_mul(x)), widen),
        },
        HALVES,
        TINY,
        0.04,
    ),
    Work(
        'activation.swiglu_backward',
        partial(_rows, names='x dy', wide=2),
        direct(lambda x, dy: activation.swiglu_backward(x, dy, 'bf16')[0]),
        _silu_mul_bwd,
        {'Liger': peer(f'{LIGER_SWIGLU}_backward'), 'torch.compile': compiled(_silu_mul_bwd)},
        HALVES[:4],
        TINY,
    ),
    Work(
        'transform.apply_rotary',
        _rope_inputs,
        _our_rope,
        _rope,
        {
            'SGLang CUDA, in place': _sglang_rope,
            'Liger, in place': _liger_rope,
            'TileOPs': _tileops_rope,
            'torch.compile': compiled(_rope),
        },
        rows('tokens heads kv_heads dim', '64 32 8 128', '4096 32 8 128', '1000 40 8 128', '12001 16 2 64'),
        dict(tokens=5, heads=4, kv_heads=2, dim=64),
    ),
    Work(
        'transpose.batched_transpose',
        _matrices,
        direct(transpose.batched_transpose),
        _flip,
        {'torch contiguous': direct(_flip), 'torch.compile': compiled(_flip)},
        rows('shape', '1x4096x7168', '64x1024x4096', '1x12001x2048', '8x1003x2880'),
        dict(shape=(2, 33, 48)),
    ),
]

# MoE ----------------------------------------------------------------------------------------


def _logits(draw: Draw, tokens: int, experts: int) -> Given:
    return dict(logits=draw(tokens, experts, dtype=F32))


def _by_expert(found: Any) -> tuple[Tensor, Tensor]:
    """Weights and experts in the order of the experts; equal scores may come in any order."""
    weights, chosen = found
    order = chosen.long().argsort(-1)
    return weights.float().gather(-1, order), chosen.long().gather(-1, order)


def _gate(logits: Tensor) -> tuple[Tensor, Tensor]:
    best, chosen = logits.topk(8)
    return best.softmax(-1), chosen


def _sglang_gate(logits: Tensor) -> Call:
    run = use(f'{SGLANG}.moe.moe_topk_softmax:topk_softmax')

    def call() -> tuple[Tensor, Tensor]:
        weights = logits.new_empty(logits.shape[0], 8)
        chosen = torch.empty_like(weights, dtype=torch.int32)
        run(weights, chosen, logits, True)
        return weights, chosen

    return Call(call, _by_expert)


def _routed(draw: Draw, tokens: int, hidden: int, experts: int, topk: int, expanded: bool = False) -> Given:
    """Tokens, or rows in expert order without padding, and the maps between them."""
    chosen = draw.uniform(tokens, experts).topk(topk).indices
    slots = chosen.flatten().argsort(stable=True)
    place = torch.empty_like(slots)
    place[slots] = torch.arange(slots.numel(), device=slots.device)
    given = dict(x=draw(slots.numel() if expanded else tokens, hidden), chosen=chosen, slots=slots)
    given |= dict(place=place.view_as(chosen).int(), of=chosen.flatten()[slots].int())
    return given | {'weights': draw(tokens, topk, dtype=F32).softmax(-1)} if expanded else given


def _expand(x: Tensor, chosen: Tensor, slots: Tensor, **_: Tensor) -> Tensor:
    return x[slots // chosen.shape[1]]


def _reduce(x: Tensor, place: Tensor, weights: Tensor, **_: Tensor) -> Tensor:
    return (x[place].float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _te_map(chosen: Tensor) -> tuple[Tensor, int, int]:
    experts = int(chosen.max()) + 1
    mask = torch.zeros(chosen.shape[0], experts, dtype=torch.int32, device=chosen.device).scatter(1, chosen, 1)
    return use(f'{TE}.permutation:make_row_id_map')(mask, chosen.shape[0], experts), chosen.shape[0], experts


def _te_expand(x: Tensor, chosen: Tensor, slots: Tensor, **_: Tensor) -> tuple:
    ids, tokens, experts = _te_map(chosen)
    return x, ids, None, None, None, tokens, experts, slots.numel(), x.shape[1], 0


def _te_reduce(x: Tensor, chosen: Tensor, weights: Tensor, **_: Tensor) -> tuple:
    ids, tokens, experts = _te_map(chosen)
    probs = weights.new_zeros(tokens, experts).scatter(1, chosen, weights)
    return x, ids, probs, None, None, tokens, experts, x.shape[1]


def _sglang_weighted_sum(x: Tensor, chosen: Tensor, place: Tensor, weights: Tensor, **_: Tensor) -> Call:
    run, flat = use(f'{SGLANG}.moe.shuffle_weighted_sum:shuffle_weighted_sum'), place.flatten()

    def call() -> Tensor:
        y = x.new_empty(chosen.shape[0], x.shape[1])
        run(x, y, flat, weights)
        return y

    return Call(call)


SIZE = ('64 7168 256 8', '4096 7168 256 8', '1 7168 256 8', '1000 2560 64 6', '256 7168 256 8', '12001 2048 64 6')
ROUTED, FEW = rows('tokens hidden experts topk', *SIZE), dict(tokens=6, hidden=64, experts=8, topk=2)
MOE = [
    Work(
        'moe.topk_gating',
        _logits,
        direct(lambda logits: moe.topk_gating(logits, 8), _by_expert),
        lambda logits: _by_expert(_gate(logits)),
        {
            'SGLang CUDA': _sglang_gate,
            'SGLang Triton': peer(
                f'{SGLANG}.moe.moe_fused_gate:moe_fused_gate', lambda logits: (logits, None, 8, 'softmax'), _by_expert
            ),
            'TileOPs': tileops(
                'moe:FusedTopKFwdOp',
                lambda **_: dict(top_k=8, scoring_func='softmax', renormalize=True),
                None,
                _by_expert,
            ),
            'torch.compile': compiled(_gate, _by_expert),
        },
        rows('tokens experts', '64 256', '4096 256', '1000 128', '12001 384', '1 256'),
        dict(tokens=5, experts=32),
        1e-3,
    ),
    Work(
        'moe.expand_to_fused',
        _routed,
        lambda x, place, of, **_: Call(lambda: moe.expand_to_fused(x, place, of)),
        _expand,
        {
            'SGLang Triton': peer(
                f'{SGLANG}.moe.ep_moe_kernels:_moe_permute_rows',
                lambda x, chosen, place, **_: (x, chosen.int(), place.flatten()),
            ),
            'TransformerEngine': peer(f'{TE}.permutation:permute_with_mask_map', _te_expand, first),
            'torch index_select': lambda x, chosen, slots, **_: Call(
                partial(torch.index_select, x, 0, slots // chosen.shape[1])
            ),
        },
        ROUTED,
        FEW,
    ),
    Work(
        'moe.reduce_fused',
        partial(_routed, expanded=True),
        lambda x, weights, place, **_: Call(lambda: moe.reduce_fused(x, weights, place)),
        _reduce,
        {
            'SGLang CUDA': _sglang_weighted_sum,
            'SGLang Triton': peer(
                f'{SGLANG}.moe.ep_moe_kernels:moe_unpermute',
                lambda x, chosen, place, weights, **_: (x, place.flatten(), chosen.int(), weights),
            ),
            'TransformerEngine': peer(f'{TE}.permutation:unpermute_with_mask_map', _te_reduce, first),
            'torch.compile': compiled(_reduce),
        },
        ROUTED,
        FEW,
    ),
]

# mHC ----------------------------------------------------------------------------------------


def _streams(draw: Draw, tokens: int, hidden: int) -> Given:
    post, comb = draw(tokens, 4, 1, dtype=F32).sigmoid(), draw(tokens, 4, 4, dtype=F32).softmax(-1)
    return dict(x=draw(tokens, hidden), residual=draw(tokens, 4, hidden), post=post, comb=comb)


def _post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = (comb.unsqueeze(-1) * residual.float().unsqueeze(2)).sum(1)
    return (mixed + post * x.float().unsqueeze(1)).to(x.dtype)


def _te_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> tuple:
    turned = residual.transpose(1, 2)[:, None].contiguous()  # its streams are the last dimension
    return x[:, None], None, post[:, None, :, 0].contiguous(), turned, comb[:, None], 4


def _mixing(draw: Draw, tokens: int, hidden: int) -> Given:
    fn = draw(24, 4 * hidden, dtype=F32, scale=hidden**-0.5)
    return dict(residual=draw(tokens, 4, hidden), fn=fn, scale=draw(3, dtype=F32), base=draw(24, dtype=F32))


def _mixes(found: Any) -> tuple[Tensor, ...]:
    post, comb, y = found
    return post.reshape(-1, 4), comb.reshape(-1, 16), y.flatten(0, -2)


def _sinkhorn(x: Tensor) -> Tensor:
    return sinkhorn(x, 20)


def _repeat(x: Tensor) -> Tensor:
    return x.unsqueeze(1).repeat(1, 4, 1)


MHC = [
    Work(
        'mhc.post',
        _streams,
        direct(lambda x, residual, post, comb: mhc.post(x, residual, post, comb)),
        _post,
        {
            'SGLang TileLang': peer(f'{SGLANG}.layernorm.mhc:mhc_post'),
            'SGLang Triton': peer(
                f'{SGLANG}.layernorm.mhc_post_split_h:mhc_post_split_h',
                lambda x, residual, post, comb: (x, residual, post.squeeze(-1).contiguous(), comb),
            ),
            'Liger, float32 out': peer(
                'liger_kernel.ops.mhc:mhc_post_res_fwd',
                lambda x, residual, post, comb: (residual, x, post.squeeze(-1).contiguous(), comb.mT.contiguous()),
            ),
            'TransformerEngine': peer(f'{TE}.mhc:mhc_fused_expand_combine', _te_post, lambda y: y.squeeze(1).mT),
            'torch.compile': compiled(_post),
        },
        STREAMS,
        TINY,
    ),
    Work(
        'mhc.big_fuse',
        _mixing,
        direct(mhc.big_fuse, _mixes),
        lambda **given: _mixes(big_fuse(**given)),
        {
            'SGLang TileLang': peer(
                f'{SGLANG}.layernorm.mhc:mhc_pre', lambda **given: (*given.values(), EPS, EPS, EPS, 1.0, 10), _mixes
            )
        },
        STREAMS,
        TINY,
    ),
    Work(
        'mhc.expand',
        _rows,
        direct(lambda x: mhc.expand(x, 4)),
        _repeat,
        {
            'SGLang Triton': peer(f'{SGLANG}.layernorm.mhc:hc_broadcast', lambda x: (x, 4)),
            'torch repeat': direct(_repeat),
        },
        STREAMS,
        TINY,
    ),
    Work(
        'mhc.sinkhorn',
        lambda draw, tokens: dict(x=draw(tokens, 4, 4, dtype=F32)),
        direct(lambda x: mhc.sinkhorn(x, 20)),
        _sinkhorn,
        {
            'TransformerEngine': peer(
                f'{TE}.mhc:mhc_fused_sinkhorn', lambda x: (x.unsqueeze(1), 4, True, 20), lambda y: y.squeeze(1)
            ),
            'torch.compile': compiled(_sinkhorn),
        },
        rows('tokens', '64', '4096', '12001'),
        dict(tokens=5),
    ),
]
