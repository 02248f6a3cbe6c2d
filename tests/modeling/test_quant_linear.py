"""`QuantLinear` against plain PyTorch, its checkpoints, `torch.compile`, and whole models."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from tile_kernels import ArgumentError
from tile_kernels.gemm import pack_weight
from tile_kernels.gemm.packed_weight import FORMATS
from tile_kernels.modeling import MoELayer, QuantLinear, quantize_model

BF16 = torch.bfloat16


def plain(layer, x):
    """The layer in float32 with the dequantized matrix."""
    y = x.float() @ layer.weight.dequantize().T
    return y if layer.bias is None else y + layer.bias.float()


@pytest.mark.parametrize('fmt', FORMATS)
def test_equals_the_dequantized_matrix(fmt):
    torch.manual_seed(0)
    linear = nn.Linear(256, 40, dtype=BF16)
    layer = QuantLinear.from_linear(linear, fmt)
    for lead in ((3,), (2, 0), (2, 9)):
        x = torch.randn(*lead, 256, dtype=BF16, requires_grad=True)
        y = layer(x)
        assert y.shape == (*lead, 40) and y.dtype is BF16
        torch.testing.assert_close(y.float(), plain(layer, x), rtol=1e-2, atol=1e-2)
        y.sum().backward()
        expected = layer.weight.dequantize().sum(0).expand(*lead, 256)
        torch.testing.assert_close(x.grad.float(), expected, rtol=1e-2, atol=2e-2)
    assert (layer(x.detach()) - linear(x)).float().norm() < 0.2 * linear(x).float().norm()


def test_state_dict_round_trip():
    layer = QuantLinear.from_linear(nn.Linear(128, 24, dtype=BF16), 'u4_1x32')
    empty = QuantLinear(128, 24, fmt='u4_1x32')
    empty.load_state_dict(copy.deepcopy(layer.state_dict()))
    x = torch.randn(5, 128, dtype=BF16)
    assert torch.equal(empty(x), layer(x)) and not next(layer.parameters()).requires_grad
    codes, zero = torch.randint(16, (24, 128)), torch.randint(16, (24, 4))
    given = pack_weight(codes, torch.rand(24, 4), zero, fmt='u4_1x32', perm=torch.randperm(128))
    layer = QuantLinear.from_packed(given)
    empty = QuantLinear(128, 24, bias=False, fmt='u4_1x32')
    empty.load_state_dict(layer.state_dict())
    assert torch.equal(empty(x), layer(x)) and empty.zero is not None and empty.scale.dtype is torch.float32
    torch.testing.assert_close(empty(x).float(), plain(layer, x), rtol=1e-2, atol=5e-2)


def test_a_cast_keeps_the_packed_tensors():
    layer = QuantLinear.from_linear(nn.Linear(128, 24, dtype=BF16), 'e4m3_1xk_f32')
    scale = layer.scale
    layer = layer.half()
    assert layer.scale is scale and layer.bias.dtype is torch.float16
    x = torch.randn(3, 128, dtype=torch.float16)
    torch.testing.assert_close(layer(x).float(), plain(layer, x), rtol=1e-2, atol=1e-2)
    assert layer(x.float()).dtype is torch.float32
    with torch.autocast('cpu', dtype=BF16):
        assert layer(x.float()).dtype is BF16


def test_checkpoints():
    codes, scales = torch.randint(16, (128, 16)), torch.rand(2, 16).half()
    words = sum(codes.unflatten(0, (-1, 8))[:, i] << 4 * i for i in range(8))
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    tensors = {'m.qweight': words, 'm.scales': scales, 'm.bias': torch.ones(16).half(), 'other.qweight': words}
    layer = QuantLinear.from_checkpoint(tensors, 'm.', dtype=torch.float16)
    expected = ((codes - 8) * scales.double().repeat_interleave(64, 0)).T
    torch.testing.assert_close(layer.weight.dequantize(torch.float64), expected, rtol=1e-6, atol=0)
    assert layer.fmt == 'u4_1x64' and torch.equal(layer.bias, torch.ones(16).half())
    columns = (0, 2, 4, 6, 1, 3, 5, 7)
    awq = sum(codes.unflatten(1, (-1, 8))[..., column] << 4 * i for i, column in enumerate(columns))
    awq = torch.where(awq >= 1 << 31, awq - (1 << 32), awq).int()
    layer = QuantLinear.from_checkpoint({'qweight': awq, 'scales': scales})
    torch.testing.assert_close(layer.weight.dequantize(torch.float64), expected, rtol=1e-6, atol=0)
    packed = dict(weight_packed=words.T.contiguous(), weight_scale=scales.T.contiguous())
    layer = QuantLinear.from_checkpoint(packed)
    torch.testing.assert_close(layer.weight.dequantize(torch.float64), expected, rtol=1e-6, atol=0)
    with pytest.raises(ArgumentError, match='tensors must have qweight and scales, or weight_packed'):
        QuantLinear.from_checkpoint({'weight': scales})


def test_compiles():
    layer = QuantLinear.from_linear(nn.Linear(64, 24, dtype=BF16), 'u4_1x64')
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend='aot_eager')
    for rows in (3, 20, 33):
        x = torch.randn(rows, 64, dtype=BF16, requires_grad=True)
        y = compiled(x)
        assert torch.equal(y, layer(x))
        y.sum().backward()
        assert x.grad is not None


class Tied(nn.Module):
    """A layer used under two names, one that no format fits, one that is skipped, and a subclass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(128, 64, dtype=BF16)
        self.again = self.first
        self.odd = nn.Linear(100, 8)
        self.lm_head = nn.Linear(64, 10)
        self.attention = nn.MultiheadAttention(32, 2)


def test_a_model_is_quantized_with_a_report():
    model = Tied()
    report = quantize_model(model, 'u4_1x128')
    assert isinstance(model.first, QuantLinear) and model.again is model.first
    (layer,) = report.layers
    assert layer.name == 'first' and layer.shape == (64, 128) and layer.bytes_before == 2 * 64 * 128
    assert report.bytes_saved == 2 * 64 * 128 - (64 * 128 // 2 + 64 * 2) and 0 < report.largest_error < 0.2
    assert report.skipped == {'odd': '100 channels are no multiple of 128', 'lm_head': 'as asked'}
    assert 'first: (64, 128) error 0.' in str(report) and '1 layers' in str(report)
    assert type(model.attention.out_proj) is not QuantLinear
    model = Tied()
    assert not quantize_model(model, 's8_1xk', skip=lambda name, layer: True).layers


@pytest.mark.parametrize(
    ('call', 'sentence'),
    [
        (lambda: quantize_model(nn.Linear(8, 8)), 'quantize_model: model must contain linear layers'),
        (lambda: quantize_model(Tied(), 'u4'), 'quantize_model: fmt must be one of u4_1x128'),
        (lambda: quantize_model(7), 'quantize_model: model must be a module'),
        (lambda: QuantLinear(100, 8, fmt='u4_1x128'), 'in_features must be a multiple of 128, got 100'),
        (lambda: QuantLinear.from_linear(nn.Linear(100, 8), 'u4_1x128'), 'must be a multiple of 128 for u4_1x128'),
        (lambda: QuantLinear(128, 8)(torch.zeros(2, 64)), r'x must be \(..., 128\)'),
    ],
)
def test_bad_input_is_told(call, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        call()


@pytest.mark.skipif(importlib.util.find_spec('transformers') is None, reason='needs transformers')
def test_a_language_model_keeps_its_logits():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(BF16).eval()
    ids = torch.randint(64, (2, 7))
    with torch.no_grad():
        before = model(ids).logits.float()
        for fmt, bound in (('s8_1x128', 0.03), ('u4_1x128', 0.3)):
            quantized = copy.deepcopy(model)
            report = quantize_model(quantized, fmt)
            assert len(report.layers) == 14 and list(report.skipped) == ['lm_head']
            after = quantized(ids).logits.float()
            assert 0 < (after - before).norm() / before.norm() < bound


@pytest.mark.parametrize('fmt', ['u4_1x64', 'e2m1_1x16_e4m3'])
def test_experts_of_four_bits(fmt):
    torch.manual_seed(0)
    layer = MoELayer(4, 2, 64, num_shared_experts=1).eval()
    x = torch.randn(9, 64, dtype=BF16, requires_grad=True)
    before = layer(x).float()
    layer.quantize_experts(fmt)
    after = layer(x)
    assert 0 < (after.float() - before).norm() / before.norm() < 0.3
    after.sum().backward()
    assert x.grad.abs().sum() > 0 and layer.gate.weight.grad is not None
    again = MoELayer(4, 2, 64, num_shared_experts=1, weight_format=fmt).eval()
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), after) and 'experts.down_proj.codes' in layer.state_dict()
    whole = {name: getattr(layer.experts, name).weight.dequantize(BF16) for name in ('gate_up_proj', 'down_proj')}
    plain = MoELayer(4, 2, 64, num_shared_experts=1).eval()
    kept = {name: value for name, value in layer.state_dict().items() if not name.startswith('experts.')}
    plain.load_state_dict(kept | {f'experts.{name}': value for name, value in whole.items()})
    torch.testing.assert_close(plain(x), after, rtol=2e-2, atol=2e-2)


def test_bad_formats_of_experts_are_told():
    for options, sentence in (
        (dict(weight_format='u4'), 'weight_format must be one of'),
        (dict(weight_format='u4_1x128'), 'hidden_dim must be a multiple of 128, got 64'),
        (dict(weight_format='u4_1x64', compute='fp8'), 'compute of a layer with weight_format must be bf16'),
    ):
        with pytest.raises(ArgumentError, match=sentence):
            MoELayer(4, 2, 64, **options)
    with pytest.raises(ArgumentError, match='the experts must not be packed yet'):
        MoELayer(4, 2, 64, weight_format='u4_1x64').quantize_experts('u4_1x64')
