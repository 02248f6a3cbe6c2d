"""The public functions inside `torch.compile`: one graph, whatever the number of tokens, formats named on the way."""

import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels.moe import topk_gate, topk_gating
from tile_kernels.quant import per_token_cast, per_token_cast_fp8
from tile_kernels.transpose import transpose


def step(x, logits):
    flagged = per_token_cast(x, 'e4m3', 64, round_sf=True)
    named = per_token_cast(x, 'e2m1_1x32_ue8m0x4_col')
    x_fp8, scale = per_token_cast_fp8(x)
    weights, experts = topk_gating(logits, top_k=6)
    return *flagged, *named, x_fp8, scale, weights, experts, topk_gate(logits, 3), transpose(x)


def inputs(num_tokens):
    return torch.randn(num_tokens, 192, dtype=torch.bfloat16), torch.randn(num_tokens, 64)


def test_public_functions_trace_into_one_graph():
    counter = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for num_tokens in (7, 16, 33):
        x, logits = inputs(num_tokens)
        for actual, expected in zip(compiled(x, logits), step(x, logits), strict=True):
            assert torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
            assert actual.stride() == expected.stride()
    assert counter.frame_count == 1


def test_gradients_survive_inductor():
    logits = torch.randn(9, 64)

    def loss(t):
        weights, _ = topk_gating(t, top_k=6)
        return (weights * torch.arange(6.0)).sum()

    eager, compiled = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss(eager).backward()
    torch.compile(loss, fullgraph=True, dynamic=True)(compiled).backward()
    torch.testing.assert_close(compiled.grad, eager.grad)
