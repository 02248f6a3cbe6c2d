"""Calls of public functions as a decoder layer makes them, for `decode_round` and `host_path`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tile_kernels import activation, engram, mhc, moe, norm, quant, transform
from tile_kernels.modeling import MoELayer
from tile_kernels.modeling.moe import Experts

BF16 = torch.bfloat16
STREAMS = 4

#: A function without arguments.
Call = Callable[[], Any]


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape).to(BF16)


def _norm(tokens: int, hidden: int) -> Call:
    x, weight = _rows(tokens, hidden), _rows(hidden)
    return lambda: norm.norm_forward(x, weight, 1e-6)


def _add_norm(tokens: int, hidden: int) -> Call:
    x, residual, weight = _rows(tokens, hidden), _rows(tokens, hidden), _rows(hidden)
    return lambda: norm.norm_forward(x, weight, 1e-6, residual)


def _norm_cast(tokens: int, hidden: int) -> Call:
    x, weight = _rows(tokens, hidden), _rows(hidden)
    return lambda: norm.norm_forward_and_per_token_cast(x, weight, 1e-6, 'e4m3', 128)


def _cast(tokens: int, hidden: int) -> Call:
    x = _rows(tokens, hidden)
    return lambda: quant.per_token_cast(x, 'e4m3', 128)


def _cast_columns(tokens: int, hidden: int) -> Call:
    x = _rows(tokens, hidden)
    options: dict[str, Any] = dict(use_tma_aligned_col_major_sf=True, round_sf=True, use_packed_ue8m0=True)
    return lambda: quant.per_token_cast(x, 'e4m3', 32, **options)


def _cast_back(tokens: int, hidden: int) -> Call:
    data, sf = torch.randn(tokens, hidden).to(torch.float8_e4m3fn), torch.rand(tokens, -(-hidden // 128))
    return lambda: quant.cast_back((data, sf), 'bf16', (1, 128))


def _swiglu(tokens: int, hidden: int) -> Call:
    x = _rows(tokens, hidden)
    return lambda: activation.swiglu_forward(x, 'bf16')


def _swiglu_cast(tokens: int, hidden: int) -> Call:
    x = _rows(tokens, hidden)
    return lambda: activation.swiglu_forward_and_per_token_cast(x, 'e4m3', 128)


def _rope(tokens: int, hidden: int) -> Call:
    query, key, table = _rows(tokens, hidden // 128, 128), _rows(tokens, 8, 128), torch.rand(4096, 128)
    positions = torch.randint(0, 4096, (tokens,))
    return lambda: transform.apply_rotary(query, table, key, positions)


def _streams(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual, post and comb of `mhc_post_fwd`."""
    mixes = torch.rand(tokens, STREAMS, 1), torch.rand(tokens, STREAMS, STREAMS)
    return _rows(tokens, hidden), _rows(tokens, STREAMS, hidden), *mixes


def _post(tokens: int, hidden: int) -> Call:
    given = _streams(tokens, hidden)
    return lambda: mhc.mhc_post_fwd(*given)


def _post_bwd(tokens: int, hidden: int) -> Call:
    given, dy = _streams(tokens, hidden), _rows(tokens, STREAMS, hidden)
    return lambda: mhc.mhc_post_bwd(*given, dy)


def _expand_streams(tokens: int, hidden: int) -> Call:
    x = _rows(tokens, hidden)
    return lambda: mhc.expand(x, STREAMS)


def _expand_rows(tokens: int, hidden: int) -> Call:
    x, places = _rows(tokens, hidden), torch.randperm(tokens * 8).view(tokens, 8).int()
    experts = torch.zeros(tokens * 8, dtype=torch.int32)
    return lambda: moe.expand_to_fused(x, places, experts)


def _normalize(tokens: int, hidden: int) -> Call:
    weights = torch.rand(tokens, 8)
    return lambda: moe.normalize_weight(weights)


def _gate(tokens: int, hidden: int) -> Call:
    logits = torch.randn(tokens, 256)
    return lambda: moe.moe_topk_gate_forward(logits, 8, False, 0, 2.5, 0)


def _topk(tokens: int, hidden: int) -> Call:
    scores = torch.rand(tokens, 256)
    return lambda: moe.topk_gate(scores, 8)


def _gate_inputs(tokens: int, hidden: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """hidden_states, k, v and the fused weight of `engram_gate_fwd`."""
    x, k = _rows(tokens, STREAMS, hidden), _rows(tokens, STREAMS, hidden)
    return x, k, _rows(tokens, hidden), torch.randn(STREAMS, hidden)


def _engram(tokens: int, hidden: int) -> Call:
    given = _gate_inputs(tokens, hidden)
    return lambda: engram.engram_gate_fwd(*given, 1e-6, 1e-6)


def _engram_packed(tokens: int, hidden: int) -> Call:
    x, k, v, weight = _gate_inputs(tokens, hidden)
    kv = torch.cat((k, v.unsqueeze(1)), 1)
    return lambda: engram.engram_gate_fwd(x, kv, weight, 1e-6, 1e-6)


def _engram_bwd(tokens: int, hidden: int) -> Call:
    given, dy = _gate_inputs(tokens, hidden), _rows(tokens, STREAMS, hidden)
    saved = torch.rand(4, tokens, STREAMS).unbind()
    return lambda: engram.engram_gate_bwd(dy, *given, *saved, 1e-6)


def _moe_layer(compute: str) -> Callable[[int, int], Call]:
    """The forward pass of a layer with 64 experts, for inference."""

    def make(tokens: int, hidden: int) -> Call:
        layer = MoELayer(64, 6, hidden, max(hidden * 11 // 2048, 1) * 128, compute=compute).eval()
        if isinstance(layer.experts, Experts) and compute == 'fp8':
            layer.experts.prepare_fp8()
        x = _rows(tokens, hidden)

        def infer() -> Any:
            with torch.no_grad():
                return layer(x)

        return infer

    return make


def _step(make: Callable[[], tuple[Call, list[Tensor]]]) -> Call:
    """Forward and backward through autograd."""
    call, leaves = make()
    dy = torch.ones_like(call())

    def step() -> None:
        call().backward(dy)
        for leaf in leaves:
            leaf.grad = None

    return step


def _post_step(tokens: int, hidden: int) -> Call:
    def make() -> tuple[Call, list[Tensor]]:
        given = _streams(tokens, hidden)
        leaves = [x.requires_grad_() for x in given]
        return lambda: mhc.mhc_post_fwd(*given), leaves

    return _step(make)


def _norm_step(tokens: int, hidden: int) -> Call:
    def make() -> tuple[Call, list[Tensor]]:
        x, weight = _rows(tokens, hidden).requires_grad_(), _rows(hidden).requires_grad_()
        return lambda: norm.norm_forward(x, weight, 1e-6)[0], [x, weight]

    return _step(make)


#: Calls that are measured in a graph and on the host.
FORWARD: dict[str, Callable[[int, int], Call]] = {
    'norm': _norm,
    'add + norm': _add_norm,
    'norm + cast': _norm_cast,
    'cast 1x128': _cast,
    'cast 1x32 columns': _cast_columns,
    'cast back': _cast_back,
    'swiglu': _swiglu,
    'swiglu + cast': _swiglu_cast,
    'rope': _rope,
    'mhc post': _post,
    'mhc expand': _expand_streams,
    'expand rows': _expand_rows,
    'normalize weights': _normalize,
    'gate': _gate,
    'top-k': _topk,
}

#: Calls that are measured on the host only.
HOST: dict[str, Callable[[int, int], Call]] = {
    'mhc post gradient': _post_bwd,
    'engram gate': _engram,
    'engram gate, packed': _engram_packed,
    'engram gate gradient': _engram_bwd,
    'mhc post, training step': _post_step,
    'norm, training step': _norm_step,
    'MoE layer': _moe_layer('bf16'),
    'MoE layer, fp8': _moe_layer('fp8'),
}
