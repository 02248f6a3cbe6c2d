"""`collecting`: the kernels of a model, for every token count, found without a GPU and without memory."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

import tile_kernels
from tile_kernels import ArgumentError, quant
from tile_kernels.cli.main import main
from tile_kernels.core.collect import TOKEN_COUNTS, collect_function, collecting
from tile_kernels.core.gpus import DEFAULT_GPU
from tile_kernels.core.launch import variant_for
from tile_kernels.core.precompile import Variant
from tile_kernels.modeling import MoELayer

MODELS = {
    'Mixtral-8x7B': dict(hidden_dim=4096, num_experts=8, topk=2, intermediate_dim=14336),
    'Qwen3-30B': dict(hidden_dim=2048, num_experts=128, topk=8, intermediate_dim=768),
    'DeepSeek-V3': dict(hidden_dim=7168, num_experts=256, topk=8, intermediate_dim=2048),
}


def step(num_tokens, training, **sizes):
    layer = MoELayer(**sizes)
    x = torch.randn(num_tokens, sizes['hidden_dim'], dtype=torch.bfloat16, requires_grad=training)
    with torch.set_grad_enabled(training):
        y = layer(x)
    if training:
        y.sum().backward()


@pytest.mark.parametrize('model', MODELS)
def test_kernels_of_a_model_serve_every_token_count(model):
    with FakeTensorMode():
        with collecting() as kernels:
            for num_tokens in TOKEN_COUNTS:
                step(num_tokens, num_tokens in (1, 4096), **MODELS[model])
        known = set(kernels.variants('sm_90a'))
        for num_tokens in (1, 5, 65, 129, 700, 1000, 2000, 4095, 5000, 12345, 60000):
            with collecting() as needed:
                step(num_tokens, False, **MODELS[model])
            for (variants, static), sizes in needed.sizes.items():
                kernel = variant_for(variants, static, DEFAULT_GPU)
                wanted = [tuple(kernel.config(static, size, DEFAULT_GPU).items()) for size in sizes]
                assert {Variant(kernel, static, config, 'sm_90a') for config in wanted} <= known, num_tokens
    assert any('bwd' in kernel.name or 'backward' in kernel.name for kernel in {v.kernel for v in known})


def test_real_tensors_run_and_are_collected():
    x = torch.randn(4, 128)
    with collecting() as kernels:
        q = quant.per_token_cast(x, 'e4m3', 128)
    assert torch.equal(q.data.view(torch.uint8), quant.per_token_cast(x, 'e4m3', 128).data.view(torch.uint8))
    assert len(kernels) == 1 and str(kernels) == '1 kernels: per_token_cast_kernel'
    with collecting() as nothing:
        quant.per_token_cast(x[:0], 'e4m3', 128)
    with pytest.raises(ArgumentError, match='the block must call ops of tile_kernels, got none'):
        nothing.precompile()


FUNCTION = """
import torch
from tile_kernels import quant

def few():
    quant.per_token_cast(torch.empty(4, 7168), 'e4m3', 128)

def any_count(num_tokens):
    quant.per_token_cast(torch.empty(num_tokens, 7168), 'e4m3', 128)
"""


def test_functions_of_a_file_are_called_on_fake_tensors(tmp_path):
    path = tmp_path / 'model.py'
    path.write_text(FUNCTION)
    ((_, few),) = collect_function(f'{path}:few').sizes.items()
    ((_, many),) = collect_function(f'{path}:any_count').sizes.items()
    assert few == {4} and many == set(TOKEN_COUNTS)


@pytest.mark.parametrize(
    ('words', 'sentence'),
    [
        (['--model', 'model.py'], "model must be FILE.py:FUNCTION, got 'model.py'"),
        (['--model', 'none.py:f'], "model must name a file, got 'none.py', which does not exist"),
        (['--model', f'{__file__}:nothing'], 'must define the function nothing'),
        (['quant', '--model', 'model.py:f'], 'give ops, --model or --op, not several of them'),
        (['--op', 'quant.cost'], 'did you mean quant.cast'),
    ],
)
def test_wrong_words_get_one_sentence(capsys, words, sentence):
    assert main(['precompile', *words]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.skipif(not tile_kernels.knobs.full_test, reason='compiles kernels: TK_FULL_TEST=1')
def test_collected_kernels_are_all_that_is_needed(tmp_path):
    with FakeTensorMode(), collecting() as kernels:
        quant.cast(torch.empty(64), torch.bfloat16)
    done = kernels.precompile('sm_90a', out=tmp_path, progress=False)
    assert done.num_compiled == 2 and not done.failures
    assert kernels.precompile('sm_90a', out=tmp_path, progress=False).num_found == 2
