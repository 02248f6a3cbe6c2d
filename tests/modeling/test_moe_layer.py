"""The layer against a plain PyTorch mixture of experts: forward, every gradient, compile, export, checkpointing."""

import copy

import pytest
import torch
from torch.nn import functional as F

from tile_kernels import ArgumentError
from tile_kernels.modeling import MoELayer

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'


def plain(layer, x, gate_weight=None):
    """What the layer means, one expert after the other in float32 sums of half-precision operands."""
    rows = x.reshape(-1, x.shape[-1]).to(torch.bfloat16)
    weight = layer.gate.weight if gate_weight is None else gate_weight
    scores = (rows.float() @ weight.float().T).softmax(-1)
    weights, chosen = scores.topk(layer.gate.topk)
    weights = weights / weights.sum(-1, keepdim=True)
    y = torch.zeros(rows.shape, device=x.device)
    for expert in range(layer.num_experts):
        token, k = (chosen == expert).nonzero(as_tuple=True)
        y = y.index_add(0, token, weights[token, k, None] * swiglu_mlp(layer, rows[token], expert).float())
    if layer.shared_experts is not None:
        shared = layer.shared_experts
        gate, up = (rows @ shared.gate_up_proj.weight.to(rows.dtype).T).chunk(2, -1)
        y = y + ((F.silu(gate.float()) * up.float()).to(rows.dtype) @ shared.down_proj.weight.to(rows.dtype).T)
    return y.to(torch.bfloat16).to(x.dtype).reshape(x.shape)


def swiglu_mlp(layer, rows, expert):
    gate, up = (rows @ layer.experts.gate_up_proj[expert].to(rows.dtype).T).chunk(2, -1)
    hidden = (F.silu(gate.float()) * up.float()).to(rows.dtype)
    return hidden @ layer.experts.down_proj[expert].to(rows.dtype).T


def make(num_tokens=37, **options):
    torch.manual_seed(0)
    layer = MoELayer(6, 2, 64, intermediate_dim=48, device=DEVICE, **options)
    return layer, torch.randn(num_tokens, 64, device=DEVICE, dtype=torch.bfloat16)


def gradients(run, layer, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = run(x)
    torch.manual_seed(1)
    y.backward(torch.randn(y.shape, device=y.device).to(y.dtype))
    return y, x.grad, {name: p.grad.clone() for name, p in layer.named_parameters()}


def assert_near(actual, expected):
    """Half-precision results of sums in different orders: small against the largest element."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    bound = 2e-2 * expected.float().abs().max() + 1e-6
    assert (actual.float() - expected.float()).abs().max() <= bound


@pytest.mark.parametrize('options', [{}, {'num_shared_experts': 2}, {'dtype': torch.float32}], ids=str)
def test_forward_and_every_gradient_equal_plain_pytorch(options):
    layer, x = make(**options)
    y, dx, dw = gradients(layer, layer, x)
    y_plain, dx_plain, dw_plain = gradients(lambda t: plain(layer, t), layer, x)
    assert_near(y, y_plain)
    assert_near(dx, dx_plain)
    assert dw.keys() == dw_plain.keys()
    for name in dw:
        assert_near(dw[name], dw_plain[name])


def test_without_gradients_it_computes_the_same():
    layer, x = make()
    with torch.no_grad():
        assert_near(layer(x), plain(layer, x))


def test_fp8_stays_near_and_its_gradients_are_those_of_bf16():
    torch.manual_seed(0)
    layer = MoELayer(4, 2, 128, intermediate_dim=128, compute='fp8', device=DEVICE)
    x = torch.randn(20, 128, device=DEVICE, dtype=torch.bfloat16)
    y, dx, dw = gradients(layer, layer, x)
    layer.compute = 'bf16'
    y_wide, dx_wide, dw_wide = gradients(layer, layer, x)
    assert (y.float() - y_wide.float()).norm() < 0.08 * y_wide.float().norm()
    assert (dw['gate.weight'] - dw_wide['gate.weight']).norm() < 0.1 * dw_wide['gate.weight'].norm()
    for name in ('experts.gate_up_proj', 'experts.down_proj'):
        assert torch.equal(dw[name], dw_wide[name])
    assert (dx - dx_wide).norm() < 0.1 * dx_wide.norm()
    layer.compute = 'fp8'
    layer.eval()
    before = layer(x)
    layer.experts.prepare_fp8()
    with torch.no_grad():
        assert torch.equal(layer(x), before)
    assert layer(x).requires_grad  # with gradients the weights are quantised anew, and reached
    layer.load_state_dict(layer.state_dict())
    assert layer.experts.prepared is None


def test_prepared_weights_are_those_of_the_layer_also_after_training():
    torch.manual_seed(0)
    layer = MoELayer(4, 2, 128, compute='fp8', dtype=torch.float32, device=DEVICE).eval()
    x = torch.randn(20, 128, device=DEVICE)
    for _ in range(2):
        with torch.no_grad():
            before = layer(x)
            layer.experts.prepare_fp8()
            assert torch.equal(layer(x), before)
            layer.train()
            layer.experts.down_proj.mul_(2)
            layer.eval()
            assert not torch.equal(layer(x), before)


def test_leading_shapes_empty_batches_and_a_given_gate_weight():
    layer, x = make(num_tokens=12)
    assert_near(layer(x.view(3, 4, 64)), layer(x).view(3, 4, 64))
    assert layer(x[:0]).shape == (0, 64)
    other = torch.randn(6, 64, device=DEVICE, dtype=torch.bfloat16)
    assert_near(layer(x, other), plain(layer, x, other))


def test_state_dict_round_trip():
    layer, x = make(num_shared_experts=1, balance_rate=0.1)
    state = layer.state_dict()
    assert set(state) == {
        'gate.weight',
        'gate.e_score_correction_bias',
        'experts.gate_up_proj',
        'experts.down_proj',
        'shared_experts.gate_up_proj.weight',
        'shared_experts.down_proj.weight',
    }
    other, _ = make(num_shared_experts=1, balance_rate=0.1)
    other.reset_parameters()
    other.load_state_dict(copy.deepcopy(state))
    assert torch.equal(other(x), layer(x))


def test_the_bias_moves_against_the_load_and_not_the_weights():
    layer, x = make(balance_rate=0.5)
    layer(x)
    load = layer.tokens_per_expert.clone()
    assert load.sum() == x.shape[0] * 2
    layer.update_bias()
    bias = layer.gate.e_score_correction_bias
    assert torch.equal(bias, 0.5 * torch.sign(load.float().mean() - load)) and not layer.tokens_per_expert.any()
    layer.eval()
    layer(x)
    assert not layer.tokens_per_expert.any()


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_layer_keeps_its_bias_in_float32(dtype):
    layer, x = make(balance_rate=0.001)
    layer.gate.e_score_correction_bias.copy_(torch.linspace(0.1, 0.9, 6))
    bias = layer.gate.e_score_correction_bias.clone()
    layer.to(dtype)
    assert torch.equal(layer.gate.e_score_correction_bias, bias)
    layer(x).float().sum().backward()
    layer.update_bias()
    assert layer.gate.weight.grad.dtype is dtype and not torch.equal(layer.gate.e_score_correction_bias, bias)


def test_a_bias_of_a_checkpoint_in_bfloat16_is_read():
    layer, x = make(balance_rate=0.5)
    layer.load_state_dict({name: value.bfloat16() for name, value in layer.state_dict().items()}, assign=True)
    assert layer(x).shape == x.shape


def test_compiles_without_graph_breaks_for_any_number_of_tokens():
    layer, x = make()
    layer.eval()
    torch._dynamo.reset()
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for num_tokens in (37, 20, 5):
        tokens = x[:num_tokens].clone()
        with torch.no_grad():
            assert torch.equal(compiled(tokens), layer(tokens))
    assert len(graphs) == 1


@pytest.mark.parametrize('part', ['gate', 'experts'])
def test_hooks_of_parts_see_every_call(part):
    layer, x = make(5)
    seen = []
    handle = getattr(layer.eval(), part).register_forward_hook(lambda *given: seen.append(given))
    with torch.no_grad():
        watched = layer(x)
        assert len(seen) == 1
        handle.remove()
        assert torch.equal(layer(x), watched) and len(seen) == 1


def test_checkpointing_export_and_autocast():
    layer, x = make()
    _, dx, dw = gradients(layer, layer, x)
    checkpointed = lambda t: torch.utils.checkpoint.checkpoint(layer, t, use_reentrant=False)
    _, dx_again, dw_again = gradients(checkpointed, layer, x)
    assert torch.equal(dx, dx_again) and all(torch.equal(dw[name], dw_again[name]) for name in dw)
    assert layer.tokens_per_expert.sum() == 2 * 37 * 2  # of two forward passes: recomputing does not count
    compiled = torch.compile(checkpointed, fullgraph=True, backend='aot_eager')
    _, dx_again, dw_again = gradients(compiled, layer, x)
    assert torch.equal(dx, dx_again) and all(torch.equal(dw[name], dw_again[name]) for name in dw)
    assert layer.tokens_per_expert.sum() == 3 * 37 * 2
    layer.eval()
    with torch.no_grad():
        tokens = torch.export.Dim('tokens', min=2, max=4096)
        exported = torch.export.export(layer, (x,), dynamic_shapes=({0: tokens},))
        assert torch.equal(exported.module()(x[:9]), layer(x[:9]))
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert torch.equal(layer(x), layer(x.float()).to(torch.bfloat16))


@pytest.mark.parametrize('compute', ['bf16', 'fp8'])
def test_trains_under_autocast(compute):
    torch.manual_seed(0)
    layer = MoELayer(4, 2, 128, num_shared_experts=1, compute=compute, dtype=torch.float32, device=DEVICE)
    x = torch.randn(9, 128, device=DEVICE)

    def autocast(tokens):
        with torch.autocast(DEVICE, dtype=torch.float16):
            return layer(tokens)

    y, dx, dw = gradients(layer, layer, x)
    y_cast, dx_cast, dw_cast = gradients(autocast, layer, x)
    assert torch.equal(y, y_cast) and torch.equal(dx, dx_cast)
    assert all(torch.equal(dw[name], dw_cast[name]) for name in dw)


@pytest.mark.parametrize(
    ('arguments', 'sentence'),
    [
        (dict(topk=5), 'topk must be at most 4, got 5'),
        (dict(topk=0), 'topk must be at least 1, got 0'),
        (dict(num_experts=100, topk=65), 'topk must be at most 64, got 65'),
        (dict(num_experts=4097), 'num_experts must be at most 4096, got 4097'),
        (dict(hidden_dim=63), 'hidden_dim must be a multiple of 8, got 63'),
        (dict(intermediate_dim=0), 'intermediate_dim must be at least 1, got 0'),
        (dict(num_shared_experts=-1), 'num_shared_experts must be at least 0, got -1'),
        (dict(num_experts=4.5), 'num_experts must be an integer, got float 4.5'),
        (dict(topk=2.0), 'topk must be an integer, got float 2.0'),
        (dict(hidden_dim=64.0), 'hidden_dim must be an integer, got float 64.0'),
        (dict(dtype='int32'), 'dtype must be a dtype of floating point, got torch.int32'),
        (dict(balance_rate='a'), "balance_rate must be a number, got str 'a'"),
        (dict(num_groups=2.0, num_topk_groups=1), 'num_groups must be an integer, got float 2.0'),
        (dict(num_groups=3, num_topk_groups=1), 'num_experts % num_groups must be 0, got 1'),
        (dict(compute='fp4'), "compute must be one of bf16, fp8, got 'fp4'"),
        (dict(fp8_payload=True), 'fp8_payload must come with group, got no group'),
    ],
)
def test_bad_arguments_are_told(arguments, sentence):
    with pytest.raises(ArgumentError, match=f'MoELayer: {sentence}'):
        MoELayer(**dict(num_experts=4, topk=1, hidden_dim=64) | arguments)


def test_wrong_tokens_are_told():
    layer, x = make()
    with pytest.raises(ArgumentError, match=r'x must be \(\.\.\., 64\)'):
        layer(x[:, :32])
    with pytest.raises(ArgumentError, match='x must be of floating point, got int64'):
        layer(x.long())


def test_tokens_may_have_any_strides():
    layer, x = make()
    assert torch.equal(layer(x.T.contiguous().T), layer(x))


def test_weights_prepared_while_training_are_not_used():
    torch.manual_seed(0)
    layer = MoELayer(4, 2, 128, compute='fp8', dtype=torch.float32, device=DEVICE)
    x = torch.randn(20, 128, device=DEVICE)
    layer.experts.prepare_fp8()
    layer(x).square().sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with torch.no_grad():
        after = layer(x)
        layer.experts.prepared = None
        assert torch.equal(after, layer(x))


def test_weights_start_with_the_variance_of_their_inputs():
    torch.manual_seed(0)
    layer = MoELayer(8, 2, 256, intermediate_dim=64, num_shared_experts=1, dtype=torch.float32)
    for name, weight in layer.named_parameters():
        inputs = 64 if 'down_proj' in name else 256
        assert abs(weight.std() * inputs**0.5 - 1) < 0.1 and abs(weight.mean()) < 0.02, name
