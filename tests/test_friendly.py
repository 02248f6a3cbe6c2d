"""The calls a user reads about first, as written, on the device at hand."""

import pytest
import torch

import tile_kernels.torch as reference
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
