"""Norm and rotary embedding inside `torch.compile`: one graph for every number of tokens, gradients included."""

import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels.quant import norm_forward, norm_forward_and_per_token_cast
from tile_kernels.transform import apply_rotary, rotary_embedding


def step(x, residual, weight, cache):
    y, _, z = norm_forward(x, weight, 1e-6, residual=residual)
    (codes, sf), plain, rstd, _ = norm_forward_and_per_token_cast(
        z, weight, 1e-6, 'e4m3', 32, with_out_bf16=True, with_rstd=True
    )
    query = y.view(-1, 4, 32)
    turned = rotary_embedding(query, cache)
    in_place = query.clone()
    apply_rotary(in_place, cache)
    return y, z, codes, sf, plain, rstd, turned, in_place


def inputs(num_tokens):
    x, residual = (torch.randn(num_tokens, 128, dtype=torch.bfloat16) for _ in range(2))
    return x, residual, torch.randn(128), torch.randn(64, 32)


def test_public_functions_trace_into_one_graph():
    counter = CompileCounter()
    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend=counter)
    for num_tokens in (7, 16, 33):
        arguments = inputs(num_tokens)
        for actual, expected in zip(compiled(*arguments), step(*arguments), strict=True):
            assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
    assert counter.frame_count == 1


def test_gradients_survive_tracing():
    x, residual, weight, cache = inputs(9)

    def loss(x, residual, weight):
        y, _, z = norm_forward(x, weight, 1e-6, residual=residual)
        return (rotary_embedding(y.view(-1, 4, 32), cache).float().square().sum() + z.float().sum()) / 100

    leaves = [[t.clone().requires_grad_() for t in (x, residual, weight)] for _ in range(2)]
    loss(*leaves[0]).backward()
    torch.compile(loss, fullgraph=True, dynamic=True, backend='aot_eager')(*leaves[1]).backward()
    for eager, compiled in zip(*leaves, strict=True):
        torch.testing.assert_close(compiled.grad, eager.grad)
