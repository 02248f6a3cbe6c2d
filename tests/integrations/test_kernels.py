"""The layers for the `kernels` mapping of `transformers`, against the classes they replace."""

import importlib.util
import inspect
import json
import types

import pytest
import torch
from torch import nn

pytest.importorskip('transformers')

from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from tile_kernels.integrations.transformers import KERNELS


def load():
    """The folder as `kernels` loads it: by its path, under the id of its metadata."""
    about = json.loads((KERNELS / 'metadata.json').read_text())
    spec = importlib.util.spec_from_file_location(about['id'], KERNELS / '__init__.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.layers


REPLACED = {
    'RMSNorm': llama.LlamaRMSNorm.forward,
    'RMSNormZeroCentered': qwen.Qwen3_5RMSNorm.forward,
    'rotary_pos_emb': llama.apply_rotary_pos_emb,
}


def test_every_layer_keeps_the_contract_of_kernels():
    layers = load()
    assert vars(layers).keys() == REPLACED.keys()
    plain = {name for name, _ in inspect.getmembers(nn.Module)}
    for name, original in REPLACED.items():
        layer = getattr(layers, name)
        assert layer.__init__ is nn.Module.__init__  # it has no state
        assert {found for found, _ in inspect.getmembers(layer)} - plain == {'has_backward', 'can_torch_compile'}
        ours = list(inspect.signature(layer.forward).parameters.values())
        theirs = list(inspect.signature(original).parameters.values())
        ours = ours if theirs[0].name == 'self' else ours[1:]
        assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs]


@pytest.mark.parametrize(
    ('name', 'cls'), [('RMSNorm', llama.LlamaRMSNorm), ('RMSNormZeroCentered', qwen.Qwen3_5RMSNorm)]
)
def test_norms_agree_with_gradients_and_compile(name, cls):
    module = cls(64, eps=1e-5)
    nn.init.normal_(module.weight)
    x = torch.randn(2, 3, 64, requires_grad=True)

    def results(call):
        y = call(x)
        return y.detach(), *torch.autograd.grad(y.square().sum(), (x, module.weight))

    expected = results(module)
    module.forward = types.MethodType(getattr(load(), name).forward, module)
    for call in (module, torch.compile(module, fullgraph=True, backend='aot_eager')):
        for ours, theirs in zip(results(call), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('heads', [1, 2])
def test_rotary_embedding_agrees(heads):
    shapes = [(2, 5, n, 32) if heads == 2 else (2, n, 5, 32) for n in (4, 2)]
    q, k = (torch.randn(shape) for shape in shapes)
    angle = torch.rand(2, 5, 16).repeat(1, 1, 2)
    found = load().rotary_pos_emb()(q, k, angle.cos(), angle.sin(), unsqueeze_dim=heads)
    expected = llama.apply_rotary_pos_emb(q, k, angle.cos(), angle.sin(), unsqueeze_dim=heads)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_kernels_puts_the_layers_on_a_model():
    kernels = pytest.importorskip('kernels', reason='needs the package kernels')
    norm = llama.LlamaRMSNorm(64)
    mapped = type('Mapped', (llama.LlamaRMSNorm,), {})
    kernels.replace_kernel_forward_from_hub(mapped, 'RMSNorm')
    model = nn.Sequential(mapped(64))
    layer = kernels.LocalLayerRepository(repo_path=KERNELS, layer_name='RMSNorm')
    with kernels.use_kernel_mapping({'RMSNorm': {'cpu': layer}}, inherit_mapping=False):
        kernels.kernelize(model, mode=kernels.Mode.TRAINING, device='cpu', use_fallback=False)
    assert model[0].forward.__func__ is not llama.LlamaRMSNorm.forward
    x = torch.randn(3, 64)
    torch.testing.assert_close(model(x), norm(x), rtol=1e-5, atol=1e-5)
