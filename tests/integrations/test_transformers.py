"""Real `transformers` classes with small random weights: the patched model computes what the original computes."""

import copy
import runpy
import sys
from pathlib import Path

import pytest
import torch

from tile_kernels import ArgumentError, UnsupportedError

transformers = pytest.importorskip('transformers')

from tile_kernels.integrations.transformers import attention_forward, patch, unpatch

SMALL = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    attn_implementation='eager',
)
MOE = dict(num_experts_per_tok=2)
MODELS = {
    'Llama': {},
    'Qwen2': {},
    'Qwen3': dict(head_dim=16),
    'Qwen3Moe': dict(head_dim=16, num_experts=8, moe_intermediate_size=32, norm_topk_prob=False, **MOE),
    'Mixtral': dict(num_local_experts=4, **MOE),
    'DeepseekV3': dict(
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        **MOE,
    ),
    'Gemma': dict(head_dim=16),
}
#: Modules that `patch` replaces: norms, MLPs, routers, experts.
REPLACED = {
    'Llama': (5, 2, 0, 0),
    'Qwen2': (5, 2, 0, 0),
    'Qwen3': (9, 2, 0, 0),
    'Qwen3Moe': (9, 0, 2, 2),
    'Mixtral': (5, 0, 2, 2),
    'DeepseekV3': (9, 2, 1, 1),
    'Gemma': (5, 0, 0, 0),
}


def build(name, dtype=torch.bfloat16, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f'{name}Config')(**(SMALL | MODELS[name] | more))
    model = getattr(transformers, f'{name}ForCausalLM')(config).to(dtype).eval()
    return model


def tokens(*shape):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(5))


def results(model, ids, **inputs):
    """Logits, and the gradient of every parameter."""
    model.zero_grad()
    out = model(ids, labels=ids, **inputs)
    out.loss.backward()
    return out.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def near(a, b, bound):
    return (a - b).float().norm() <= bound * b.float().norm() + 1e-6


@pytest.mark.parametrize('name', MODELS)
def test_logits_and_gradients_agree(name):
    model, ids = build(name), tokens(2, 9)
    names = list(model.state_dict())
    expected, gradients = results(model, ids)
    report = patch(model)
    counts = tuple(report.replaced[kind] for kind in ('norm', 'mlp', 'router', 'experts'))
    assert counts == REPLACED[name] and report.replaced['attention'] == 2 and report.replaced['rope'] >= 1
    assert list(model.state_dict()) == names
    logits, found = results(model, ids)
    assert found.keys() == gradients.keys()
    if report.replaced['router']:  # rounding may change the choice of an expert
        rows = [near(a, b, 0.02) for a, b in zip(logits.flatten(0, 1), expected.flatten(0, 1), strict=True)]
        assert sum(rows) >= 16
    else:
        assert near(logits, expected, 0.02)
        assert not [key for key, grad in found.items() if not near(grad, gradients[key], 0.04)]
    unpatch(model)
    assert torch.equal(results(model, ids)[0], expected)


@pytest.mark.parametrize('name', ['Qwen3Moe', 'Mixtral', 'DeepseekV3'])
def test_a_block_of_experts_agrees_on_equal_inputs(name):
    model = build(name)
    block, x = model.model.layers[1].mlp, torch.randn(2, 9, 64, dtype=torch.bfloat16, requires_grad=True)
    names = [name for name, _ in block.named_parameters()]

    def output():
        y = block(x)
        y = y[0] if isinstance(y, tuple) else y
        return y.detach(), torch.autograd.grad(y.float().square().sum(), (x, *block.parameters()))

    expected, gradients = output()
    patch(model)
    y, found = output()
    unpatch(model)
    assert near(y, expected, 0.01)
    wrong = [n for n, a, b in zip(['x', *names], found, gradients, strict=True) if not near(a, b, 0.02)]
    assert not wrong


@pytest.mark.parametrize('name', ['Llama', 'Qwen3'])
def test_padded_and_packed_sequences_agree(name):
    model, ids = build(name), tokens(2, 9)
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    left[0, :4] = right[1, 6:] = 0
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    inputs = [
        (ids, dict(attention_mask=left)),
        (ids, dict(attention_mask=right)),
        (ids[:1], dict(position_ids=packed, use_cache=False)),
    ]
    with torch.no_grad():
        expected = [model(row, **given).logits for row, given in inputs]
        patch(model)
        found = [model(row, **given).logits for row, given in inputs]
    unpatch(model)
    for index, valid in enumerate((left.bool(), right.bool(), torch.ones(1, 9, dtype=torch.bool))):
        assert near(found[index][valid], expected[index][valid], 0.02)


@pytest.mark.parametrize('name', ['Llama', 'Qwen3', 'Gemma'])
def test_generation_with_a_cache_agrees_token_by_token(name):
    model, ids = build(name, torch.float32), tokens(2, 5)
    options = dict(max_new_tokens=8, do_sample=False, pad_token_id=0)
    expected = model.generate(ids, **options)
    report = patch(model)
    assert report.skipped['attention'] == 'attention needs bfloat16 or float16, the model is torch.float32'
    assert torch.equal(model.generate(ids, **options), expected)
    unpatch(model)


@pytest.mark.parametrize('static', [False, True])
@pytest.mark.parametrize('padded', [False, True])
def test_half_precision_decode_equals_prefill(static, padded):
    model, ids = build('Llama'), tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0 if padded else 1
    cache = transformers.StaticCache(config=model.config, max_cache_len=12) if static else None
    patch(model)
    with torch.no_grad():
        whole = model(ids, attention_mask=mask).logits
        first = model(ids[:, :4], attention_mask=mask[:, :4], past_key_values=cache, use_cache=True)
        options = dict(past_key_values=first.past_key_values, attention_mask=mask)
        rest = model(ids[:, 4:], **options).logits
    unpatch(model)
    valid = mask.bool()
    assert near(torch.cat((first.logits, rest), 1)[valid], whole[valid], 0.02)


@pytest.mark.parametrize('name', ['Llama', 'DeepseekV3'])
def test_a_cache_filled_before_patch_serves_after_it(name):
    model, ids = build(name), tokens(1, 9)
    with torch.no_grad():
        expected = model(ids).logits[:, 6:]
        caches = [model(ids[:, :6], use_cache=True).past_key_values]
        patch(model)
        caches.append(model(ids[:, :6], use_cache=True).past_key_values)
        found = [model(ids[:, 6:], past_key_values=caches[0]).logits]
        unpatch(model)
        found.append(model(ids[:, 6:], past_key_values=caches[1]).logits)
    for logits in found:
        assert near(logits, expected, 0.02)


def test_the_ends_of_packed_sequences_follow_their_positions():
    model = build('Llama')
    patch(model)
    row, packed = tokens(1, 9), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    with torch.no_grad():
        first = model(row, position_ids=packed, use_cache=False).logits
        packed.copy_(torch.arange(9)[None])  # the same tensor, now one sequence
        second = model(row, position_ids=packed, use_cache=False).logits
        unpatch(model)
        expected = model(row).logits
    assert near(second, expected, 0.02) and not near(first[:, 4:], expected[:, 4:], 0.1)


def test_weights_load_before_and_after(tmp_path):
    model, ids = build('Mixtral'), tokens(1, 6)
    weights = copy.deepcopy(model.state_dict())
    patch(model)
    expected = model(ids).logits
    model.save_pretrained(tmp_path)
    other = transformers.MixtralForCausalLM.from_pretrained(tmp_path, attn_implementation='eager').to(torch.bfloat16)
    assert all(torch.equal(value, weights[key]) for key, value in other.state_dict().items())
    patch(other)
    assert torch.equal(other(ids).logits, expected)
    other.load_state_dict(weights)
    for patched in (model, other):
        unpatch(patched)


@pytest.mark.parametrize('name', ['Llama', 'Qwen3Moe'])
def test_a_patched_decoder_layer_compiles_in_one_graph(name):
    model = build(name)
    patch(model)
    layer, x = model.model.layers[0], torch.randn(2, 9, 64, dtype=torch.bfloat16)
    positions = model.model.rotary_emb(x, torch.arange(9)[None])
    compiled = torch.compile(layer, fullgraph=True, backend='aot_eager')
    with torch.no_grad():
        expected = layer(x, position_embeddings=positions, attention_mask=None)
        found = compiled(x, position_embeddings=positions, attention_mask=None)
    unpatch(model)
    assert near(*(y[0] if isinstance(y, tuple) else y for y in (found, expected)), 0.01)


def test_an_optimizer_step_agrees():
    model, ids = build('Qwen3Moe').train(), tokens(2, 9)
    other = copy.deepcopy(model)
    patch(other)
    losses = []
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        losses.append([])
        for _ in range(3):
            loss = each(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    unpatch(other)
    assert losses[0][2] < losses[0][0] and torch.allclose(*map(torch.tensor, losses), rtol=5e-3)


def test_steps_of_the_trainer_agree(tmp_path):
    pytest.importorskip('accelerate', reason='transformers.Trainer needs the package accelerate')
    rows = [dict(input_ids=row, labels=row) for row in tokens(6, 9)]
    options = dict(per_device_train_batch_size=2, max_steps=3, optim='sgd', learning_rate=0.05, logging_steps=1)
    options |= dict(use_cpu=True, save_strategy='no', report_to='none', disable_tqdm=True, seed=3)
    losses = []
    for patched in (False, True):
        model = build('Llama')
        if patched:
            patch(model)
        arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **options)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        losses.append([entry['loss'] for entry in trainer.state.log_history if 'loss' in entry])
        unpatch(model)
    assert len(losses[0]) == 3 and torch.allclose(*map(torch.tensor, losses), rtol=5e-3)


def test_only_some_modules_and_the_reasons_for_others():
    model = build('Gemma')
    report = patch(model, only=['norm', 'mlp'])
    assert report.replaced == {'norm': 5}
    assert set(report.skipped.values()) == {'its MLP is not down(silu(gate(x)) * up(x))'}
    assert str(report).splitlines() == [
        'norm       5 replaced',
        'left       2 modules: its MLP is not down(silu(gate(x)) * up(x))',
    ]
    assert patch(model, only='norm').replaced == {}  # patched already
    unpatch(model)
    with torch.device('meta'):
        report = patch(build('Llama'), only='norm')
    assert report.replaced == {} and 'meta device' in next(iter(report.skipped.values()))


def test_a_class_patches_its_instances_at_their_first_call():
    expected = build('Llama')(torch.tensor([[1, 2, 3]])).logits
    patch(transformers.LlamaForCausalLM)
    try:
        model = build('Llama')
        logits = model(torch.tensor([[1, 2, 3]])).logits
        assert near(logits, expected, 0.02) and 'forward' in model.model.norm.__dict__
        unpatch(model)
    finally:
        unpatch(transformers.LlamaForCausalLM)
    assert 'forward' not in build('Llama').model.norm.__dict__


def test_bad_input_gets_one_sentence():
    with pytest.raises(ArgumentError, match='model must be a module or a model class of transformers'):
        patch('Llama')
    with pytest.raises(ArgumentError, match='only must be one of'):
        patch(build('Llama'), only='norms')
    q = torch.zeros(1, 2, 3, 64, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match='attention has no dropout'):
        attention_forward(torch.nn.Module(), q, q, q, None, dropout=0.1)
    with pytest.raises(UnsupportedError, match=r'a mask must be \(batch, tokens\), got'):
        attention_forward(torch.nn.Module(), q, q, q, torch.zeros(1, 1, 3, 3))


def test_the_example_trains_and_serves(monkeypatch, capsys):
    example = runpy.run_path(str(Path(__file__).parents[2] / 'examples' / 'training' / 'patched_mixtral.py'))
    monkeypatch.setattr(sys, 'argv', ['patched_mixtral.py', '--steps', '40'])
    example['main']()
    assert "'the quick brown ' continues with 'fox jumps over" in capsys.readouterr().out
