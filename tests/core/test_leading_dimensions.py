"""(batch, tokens, hidden) where rows are independent, and dtypes by name or as torch dtypes."""

import pytest
import torch

from tile_kernels import ArgumentError, activation, gemm, moe, quant

BF16 = torch.bfloat16


def test_casts():
    x = torch.randn(2, 3, 256, dtype=BF16)
    for fmt in ('e4m3_1x128_f32', 'e2m1_1x32_ue8m0x4'):
        q, flat = quant.per_token_cast(x, fmt), quant.per_token_cast(x.view(6, 256), fmt)
        assert q.data.shape[:2] == (2, 3) and torch.equal(
            q.data.view(torch.uint8).flatten(0, 1), flat.data.view(torch.uint8)
        )
        assert torch.equal(q.sf.flatten(0, 1), flat.sf)
    with pytest.raises(ArgumentError, match=r'x must be \(num_tokens, hidden\) for column-major factors or out'):
        quant.per_token_cast(x, 'e4m3_1x128_f32_col')


def test_swiglu_and_its_gradient():
    x = torch.randn(2, 3, 64, dtype=BF16, requires_grad=True)
    y = activation.swiglu_forward(x, torch.float32, topk_weights=torch.rand(2, 3))
    assert y.shape == (2, 3, 32) and torch.autograd.grad(y.sum(), x)[0].shape == x.shape
    same = [activation.swiglu_forward(x, fmt) for fmt in ('bf16', 'bfloat16', BF16)]
    assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])
    with pytest.raises(ArgumentError, match='fmt must be one of bf16, fp16, fp32'):
        activation.swiglu_forward(x, torch.int8)


def test_gates():
    logits = torch.randn(2, 3, 16, requires_grad=True)
    weights, indices = moe.topk_gating(logits, 4)
    flat = moe.topk_gating(logits.view(6, 16), 4)
    assert torch.equal(weights.flatten(0, 1), flat[0]) and torch.equal(indices.flatten(0, 1), flat[1])
    assert torch.autograd.grad(weights.square().sum(), logits)[0].shape == logits.shape


def test_products_autocast_and_quantized_operands():
    a, b = torch.randn(2, 3, 128), torch.randn(136, 128)
    with pytest.raises(ArgumentError, match='a must be bfloat16 or float16'):
        gemm.gemm(a, b)
    with torch.autocast('cpu', dtype=BF16):
        d = gemm.gemm(a, b)
    assert d.shape == (2, 3, 136) and torch.equal(d.flatten(0, 1), gemm.gemm(a.to(BF16).flatten(0, 1), b.to(BF16)))
    qa, qb = quant.per_token_cast(a, 'e4m3_1x128_f32'), quant.per_block_cast(b, 'e4m3_128x128_f32')
    d = gemm.gemm_fp8(qa, qb)
    assert torch.equal(d.flatten(0, 1), gemm.gemm_fp8(*(x.flatten(0, 1) for x in qa), *qb))
    with pytest.raises(ArgumentError, match='a must have the format e4m3_1x128_f32, got e4m3_1x32_f32'):
        gemm.gemm_fp8(quant.per_token_cast(a, 'e4m3_1x32_f32'), qb)
    with pytest.raises(ArgumentError, match='a_sf must be the other quantized tensor'):
        gemm.gemm_fp8(qa, qa.sf)
