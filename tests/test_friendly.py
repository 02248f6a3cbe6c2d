"""The calls a user reads about first, as written, on the device at hand."""

import re

import pytest
import torch

import tile_kernels.reference as reference
from tile_kernels.core.errors import ArgumentError
from tile_kernels.moe import fused_expand_reduce, token_to_expert_map, topk_gating, weight_normalize
from tile_kernels.quant import fused_swiglu_quant_fp8, per_block_cast_fp8, per_channel_cast_fp8, per_token_cast_fp8
from tile_kernels.testing import benchmark_kernel
from tile_kernels.transpose import batched_transpose, transpose

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


def random(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def moe_dispatch(hidden_states, gate_weight, top_k=8):
    logits = torch.mm(hidden_states, gate_weight.T)
    topk_weights, topk_indices = topk_gating(logits, top_k=top_k)
    routing_map = token_to_expert_map(topk_indices, num_experts=gate_weight.shape[0])
    hidden_fp8, scale = per_token_cast_fp8(hidden_states)
    return hidden_fp8, scale, topk_weights, routing_map


def test_moe_dispatch():
    hidden, gate_weight = random(33, 256), random(64, 256)
    hidden_fp8, scale, weights, routing = moe_dispatch(hidden, gate_weight)
    assert hidden_fp8.dtype == torch.float8_e4m3fn and scale.shape == (33, 1)
    torch.testing.assert_close(hidden_fp8.float() * scale, hidden.float(), rtol=0.07, atol=0.05)
    torch.testing.assert_close(weights.sum(-1), torch.ones(33, device=DEVICE))
    assert int(routing.num_tokens_per_expert.sum()) == 33 * 8
    places = routing.token_topk_to_pos.flatten().long()
    assert places.sort().values.tolist() == list(range(33 * 8))
    assert torch.equal(routing.pos_to_token[places], torch.arange(33, device=DEVICE).repeat_interleave(8).int())


def test_expand_and_reduce_around_experts():
    hidden, logits = random(16, 128), random(16, 8, dtype=torch.float32)
    weights, indices = topk_gating(logits, top_k=2)
    routing = token_to_expert_map(indices, num_experts=8)
    out = fused_expand_reduce(hidden, routing, lambda rows, routing_map: rows * 2, topk_weights=weights)
    torch.testing.assert_close(out.float(), hidden.float() * 2, rtol=2e-2, atol=2e-2)


def test_zero_rows_of_weights_stay_zero():
    weights = torch.tensor([[1.0, 3.0], [0.0, 0.0]], device=DEVICE)
    assert weight_normalize(weights).tolist() == [[0.25, 0.75], [0.0, 0.0]]


@pytest.mark.parametrize(
    ('call', 'shape'),
    [
        (per_token_cast_fp8, (7, 1)),
        (lambda x: per_token_cast_fp8(x, group_size=128), (7, 3)),
        (lambda x: per_token_cast_fp8(x, dtype=torch.float8_e5m2), (7, 1)),
        (lambda x: per_block_cast_fp8(x, block_size=128), (1, 3)),
        (per_channel_cast_fp8, (1, 300)),
        (lambda x: per_channel_cast_fp8(x, group_size=128), (1, 300)),
        (lambda x: fused_swiglu_quant_fp8(x, x), (7, 1)),
    ],
)
def test_casts_give_codes_and_scales(call, shape):
    codes, scale = call(random(7, 300))
    assert codes.shape == (7, 300) and codes.element_size() == 1
    assert scale.shape == shape and scale.dtype == torch.float32


def test_references_have_the_same_names():
    x = random(7, 300)
    for name in ('per_token_cast_fp8', 'per_block_cast_fp8', 'per_channel_cast_fp8'):
        ours = getattr(__import__('tile_kernels').quant, name)(x)
        theirs = getattr(reference, name)(x)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_transposes():
    x = random(3, 37, 65)
    assert torch.equal(batched_transpose(x), x.mT) and batched_transpose(x).is_contiguous()
    assert torch.equal(transpose(x[0]), x[0].T)


def test_benchmark_prints_well():
    result = benchmark_kernel(fn=batched_transpose, args=(random(2, 64, 64),), warmup=1, rep=5)
    assert 0 < result.p20 <= result.median <= result.p80 and result.mean > 0 and result.gbps > 0
    assert result.tflops is None and result.pct_of_copy > 0
    assert 'of copy' in str(result)


def test_router_and_layer():
    from tile_kernels.moe import MoELayer, MoETopKRouting, moe_topk_routing

    hidden = torch.randn(7, 64, device=DEVICE, dtype=torch.bfloat16)
    gate_weight = torch.randn(16, 64, device=DEVICE, dtype=torch.bfloat16)
    scores, indices = moe_topk_routing(hidden, gate_weight, topk=8)
    assert scores.shape == indices.shape == (7, 8) and scores.dtype == torch.float32
    torch.testing.assert_close(scores.sum(1), torch.ones(7, device=DEVICE))
    hidden.requires_grad_()
    MoETopKRouting.apply(hidden, gate_weight.requires_grad_(), 4)[0].square().sum().backward()
    assert hidden.grad.abs().sum() > 0 and gate_weight.grad.abs().sum() > 0
    layer = MoELayer(16, 4, 64, device=DEVICE)
    x = torch.randn(2, 3, 64, device=DEVICE, dtype=torch.bfloat16)
    assert layer(x).shape == x.shape and layer(x.flatten(0, 1), gate_weight).shape == (6, 64)


def test_engram_gate():
    from tile_kernels.engram import engram_gate_backward, engram_gate_forward, engram_weight_grad
    from tile_kernels.modeling import EngramGateLayer

    hidden, weight = torch.randn(5, 64, device=DEVICE), torch.randn(8, 64, device=DEVICE)
    output, norm_hidden = engram_gate_forward(hidden, weight)
    assert output.shape == (5, 8) and norm_hidden.shape == hidden.shape
    gated, _ = engram_gate_forward(hidden, weight, weight)
    torch.testing.assert_close(gated, output.square(), rtol=1e-4, atol=1e-4)
    dy, plain = torch.randn_like(output), hidden.double().requires_grad_()
    eps = torch.finfo(torch.float32).eps
    ((plain * torch.rsqrt(plain.square().mean(1, keepdim=True) + eps)) @ weight.double().T).backward(dy.double())
    torch.testing.assert_close(engram_gate_backward(dy, hidden, weight).double(), plain.grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(engram_weight_grad(dy, norm_hidden), dy.T @ norm_hidden, rtol=1e-4, atol=1e-4)
    layer = EngramGateLayer(hidden_size=2048, num_experts=256).to(DEVICE)
    assert layer.load_state_dict(layer.state_dict())


def test_hyper_connections():
    from tile_kernels.mhc import sinkhorn_normalize
    from tile_kernels.modeling import MHCPipeline

    one = sinkhorn_normalize(torch.randn(8, 64, device=DEVICE), num_iters=20)
    torch.testing.assert_close(one.sum(0), torch.full((64,), 8 / 64, device=DEVICE), rtol=1e-2, atol=1e-3)
    batch = sinkhorn_normalize(torch.randn(3, 4, 4, device=DEVICE), num_iters=20)
    for dim in (1, 2):
        torch.testing.assert_close(batch.sum(dim), torch.ones(3, 4, device=DEVICE), rtol=1e-2, atol=1e-2)
    pipeline = MHCPipeline(num_connections=8, hidden_size=64).to(DEVICE)
    residual = pipeline.expand(torch.randn(2, 64, device=DEVICE, dtype=torch.bfloat16))
    residual = pipeline(residual, lambda x: x * 0.5)
    assert pipeline.head(residual).shape == (2, 64)


def test_errors_name_the_arguments_of_the_friendly_call():
    from tile_kernels.mhc import sinkhorn_normalize

    calls = {
        'conn_weights must be (..., num_rows, num_columns)': lambda: sinkhorn_normalize(random(8, dtype=torch.float32)),
        'num_iters must be at least 1': lambda: sinkhorn_normalize(random(4, 4, dtype=torch.float32), num_iters=0),
        'topk_indices must be int64 or int32': lambda: token_to_expert_map(random(3, 2), num_experts=4),
        'routing_map must be a RoutingMap': lambda: fused_expand_reduce(random(3, 64), None, lambda rows, _: rows),
    }
    for sentence, call in calls.items():
        with pytest.raises(ArgumentError, match=re.escape(sentence)):
            call()
