"""Dtypes are given as PyTorch's objects or as words."""

import pytest
import torch

from tile_kernels import ArgumentError, activation, attention, gemm, modeling, moe, quant, rand

BF16, F16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
X = torch.ones(4, 256, dtype=BF16)

CALLS = {
    'cast': (lambda dtype: quant.cast(X, dtype).dtype, F16, ('fp16', 'float16')),
    'per_token_cast_fp8': (lambda dtype: quant.per_token_cast_fp8(X, dtype=dtype)[0].dtype, E4M3, ('e4m3',)),
    'per_block_cast_fp8': (lambda dtype: quant.per_block_cast_fp8(X, dtype=dtype)[0].dtype, E4M3, ('float8_e4m3fn',)),
    'per_channel_cast_fp8': (lambda dtype: quant.per_channel_cast_fp8(X, dtype=dtype)[0].dtype, E4M3, ('e4m3',)),
    'fused_swiglu_quant_fp8': (lambda dtype: quant.fused_swiglu_quant_fp8(X, X, dtype=dtype)[0].dtype, E4M3, ('e4m3',)),
    'cast_back': (lambda dtype: quant.cast_back(quant.per_token_cast(X, 'e4m3', 128), dtype).dtype, BF16, ('bf16',)),
    'swiglu': (lambda dtype: activation.swiglu_forward(X, dtype).dtype, F16, ('fp16', 'float16')),
    'topk_gating': (
        lambda dtype: moe.topk_gating(X.float(), 2, index_dtype=dtype)[1].dtype,
        torch.int32,
        ('int32',),
    ),
    'randn': (lambda dtype: rand.randn(4, dtype=dtype, device='cpu').dtype, BF16, ('bf16', 'bfloat16')),
    'dequantize': (lambda dtype: gemm.quantize_weight(X, 'u4_1x128').dequantize(dtype).dtype, BF16, ('bf16',)),
    'KVCache': (
        lambda dtype: attention.KVCache(1, 2, 8, 2, 32, dtype=dtype, device='cpu').pages.dtype,
        E4M3,
        ('e4m3',),
    ),
    'MoELayer': (lambda dtype: modeling.MoELayer(4, 2, 64, dtype=dtype).gate.weight.dtype, F16, ('fp16',)),
    'Attention': (lambda dtype: next(modeling.Attention(64, 2, dtype=dtype).parameters()).dtype, F16, ('fp16',)),
    'QuantLinear': (lambda dtype: modeling.QuantLinear(256, 64, dtype=dtype).bias.dtype, F16, ('fp16',)),
}


@pytest.mark.parametrize('name', CALLS)
def test_a_word_is_as_good_as_a_dtype(name):
    call, dtype, words = CALLS[name]
    assert [call(given) for given in (dtype, *words)] == [dtype] * (1 + len(words))


@pytest.mark.parametrize('name', ['cast', 'per_token_cast_fp8', 'randn', 'MoELayer'])
def test_a_wrong_word_names_the_right_one(name):
    with pytest.raises(ArgumentError, match=r"dtype must be a dtype or one of bf16, .* 'bf61'; did you mean bf16\?"):
        CALLS[name][0]('bf61')


def test_a_compiled_call_takes_words():
    compiled = torch.compile(lambda x: quant.cast(x, 'fp16') + 1, fullgraph=True, backend='aot_eager')
    assert compiled(X).dtype is F16
