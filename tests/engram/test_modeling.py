"""Engram layers: equal to plain PyTorch, gradients where Megatron wants them, and a model that learns alike."""

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional

from tile_kernels import ArgumentError, knobs, modeling
from tile_kernels.engram import engram_gate_backward, engram_gate_forward, engram_hash, engram_weight_grad
from tile_kernels.modeling.engram import EngramGateFn, engram_gate
from tile_kernels.reference import engram_gate_backward as backward_ref
from tile_kernels.reference import engram_gate_forward as forward_ref
from tile_kernels.reference import engram_weight_grad as weight_grad_ref
from tile_kernels.reference.engram import make_offsets
from tile_kernels.testing import assert_equal, calc_diff

CLAMP, EPS = 1e-6, 1e-6
DEVICES = ['cpu', pytest.param('cuda', marks=pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a GPU'))]


class PlainEngram(nn.Module):
    """The published module, written down with PyTorch alone; takes over the parameters of `modeling.Engram`."""

    def __init__(self, layer):
        super().__init__()
        self.num_streams, self.hidden = layer.weight_hidden.shape
        self.dilation = layer.dilation
        for name, parameter in layer.named_parameters():
            self.register_parameter(name.replace('.', '_'), nn.Parameter(parameter.detach().clone()))

    def norm(self, x, weight):
        return functional.rms_norm(x, (self.hidden,), eps=EPS) * weight

    def forward(self, hidden_states, embeddings):
        x = hidden_states.float()
        kv = functional.linear(embeddings.bfloat16(), self.kv_proj_weight.bfloat16()).float()
        kv = kv.unflatten(-1, (self.num_streams + 1, self.hidden))
        key, value = kv[..., :-1, :], kv[..., -1:, :]
        z = (self.norm(x, self.weight_hidden) * self.norm(key, self.weight_embed)).sum(-1, keepdim=True)
        z = z * self.hidden**-0.5
        value = (torch.sigmoid(z.abs().clamp_min(CLAMP).sqrt() * z.sign()) * value).bfloat16().float()
        normed = self.norm(value, self.norm_weight).bfloat16().float().flatten(2).mT
        channels, taps = self.conv_weight.shape
        padded = functional.pad(normed, ((taps - 1) * self.dilation, 0))
        seen = functional.conv1d(padded, self.conv_weight.unsqueeze(1), groups=channels, dilation=self.dilation)
        seen = functional.silu(seen).mT.unflatten(-1, value.shape[2:])
        return (x + value + seen).to(hidden_states.dtype)


@pytest.mark.parametrize('interpret', [False, True], ids=['twin', 'kernel'])
def test_engram_equals_plain_pytorch(interpret):
    torch.manual_seed(0)
    layer = modeling.Engram(hidden_size=64, embed_size=32, num_streams=2)
    nn.init.normal_(layer.conv_weight, std=0.5)
    plain = PlainEngram(layer)
    x = torch.randn(2, 11, 2, 64, dtype=torch.bfloat16)
    embeddings, dy = torch.randn(2, 11, 32), torch.randn(2, 11, 2, 64)
    sides = []
    for module in (layer, plain):
        leaves = [x.clone().requires_grad_(), embeddings.clone().requires_grad_()]
        with knobs(interpret=interpret):
            y = module(*leaves)
            (y.float() * dy).sum().backward()
        sides.append([y.detach(), *(leaf.grad for leaf in leaves), *(p.grad for p in module.parameters())])
    assert len(sides[0]) == len(sides[1]) == 8
    by_name = sorted(n.replace('.', '_') for n, _ in layer.named_parameters())
    assert by_name == sorted(n for n, _ in plain.named_parameters())
    for actual, expected in zip(*sides, strict=True):
        assert calc_diff(actual, expected) < 2e-4


def test_engram_is_causal_and_passes_image_tokens_by():
    torch.manual_seed(0)
    layer = modeling.Engram(hidden_size=64, embed_size=16, num_streams=1)
    nn.init.normal_(layer.conv_weight)
    x, embeddings = torch.randn(1, 20, 1, 64, dtype=torch.bfloat16), torch.randn(1, 20, 16)
    y = layer(x, embeddings)
    embeddings[:, 12:] = 7.0
    assert_equal(layer(x, embeddings)[:, :12], y[:, :12])
    everything = torch.ones(1, 20, dtype=torch.bool)
    assert_equal(layer(x, embeddings, everything), x)


def test_state_dict_round_trip():
    layer, other = (modeling.Engram(hidden_size=64, embed_size=16) for _ in range(2))
    other.load_state_dict(layer.state_dict())
    x, embeddings = torch.randn(1, 3, 4, 64, dtype=torch.bfloat16), torch.randn(1, 3, 16)
    assert_equal(other(x, embeddings), layer(x, embeddings))


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16, torch.float64])
def test_cast_layers_compute_what_their_parameters_hold(dtype):
    torch.manual_seed(0)
    x, embeddings = torch.randn(1, 3, 4, 64, dtype=torch.bfloat16), torch.randn(1, 3, 16)
    for make, given in (
        (lambda: modeling.Engram(64, 16), (x, embeddings)),
        (lambda: modeling.EngramGateLayer(64, 8, gated=True), (x,)),
    ):
        cast, plain = make().to(dtype), make()
        plain.load_state_dict(cast.state_dict())
        y = cast(*given)
        assert_equal(y, plain(*given))
        y.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype is dtype for p in cast.parameters())


def gate_inputs():
    torch.manual_seed(0)
    x, k = (torch.randn(2, 5, 4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    v = torch.randn(2, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(4, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    return x, k, v, *weights


def test_gate_function_takes_keys_and_values_apart_or_packed():
    x, k, v, wh, we = gate_inputs()
    dy = torch.randn_like(x)
    apart = engram_gate(x, k, v, wh, we, CLAMP, EPS)
    grads = torch.autograd.grad(apart, (x, k, v, wh, we), dy)
    kv = torch.cat([k, v.unsqueeze(2)], dim=2).flatten(2).detach().requires_grad_()
    packed = EngramGateFn.apply(x, kv, wh, we, CLAMP, EPS, None)
    assert_equal(packed.detach(), apart.detach())
    dx, dkv, dwh, dwe = torch.autograd.grad(packed, (x, kv, wh, we), dy)
    dkv = dkv.unflatten(-1, (5, 64))
    for actual, expected in zip((dx, dkv[:, :, :4], dkv[:, :, 4], dwh, dwe), grads, strict=True):
        assert_equal(actual.contiguous(), expected)


def test_weight_gradients_are_added_to_main_grad():
    x, k, v, wh, we = gate_inputs()
    engram_gate(x, k, v, wh, we, CLAMP, EPS).sum().backward()
    expected = [w.grad.float() for w in (wh, we)]
    for w in (wh, we):
        w.grad, w.main_grad = None, torch.ones(4, 64)
    for _ in range(2):
        engram_gate(x, k, v, wh, we, CLAMP, EPS).sum().backward()
    for w, grad in zip((wh, we), expected, strict=True):
        assert w.grad is None
        torch.testing.assert_close(w.main_grad, 1 + 2 * grad, rtol=2e-2, atol=2e-2)


def test_nothing_is_saved_without_a_gradient():
    x, k, v, wh, we = (t.detach() for t in gate_inputs())
    assert not engram_gate(x, k, v, wh, we, CLAMP, EPS).requires_grad


def test_autocast_leaves_the_projection_its_dtypes():
    hidden, weight = torch.randn(9, 48), torch.randn(16, 48)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        output, norm = engram_gate_forward(hidden, weight)
        found = output, norm, engram_gate_backward(output, hidden, weight), engram_weight_grad(output, norm)
    assert {x.dtype for x in found} == {torch.float32}
    torch.testing.assert_close(found[3], weight_grad_ref(output, norm))


@pytest.mark.parametrize('gated', [False, True])
def test_projection_and_its_gradients_equal_the_reference(gated):
    torch.manual_seed(0)
    hidden, weight, gate_weight = torch.randn(9, 48), torch.randn(16, 48), torch.randn(16, 48) if gated else None
    output, norm = engram_gate_forward(hidden, weight, gate_weight)
    expected = forward_ref(hidden, weight, gate_weight)
    torch.testing.assert_close((output, norm), expected)
    dy = torch.randn_like(output)
    torch.testing.assert_close(
        engram_gate_backward(dy, hidden, weight, gate_weight), backward_ref(dy, hidden, weight, gate_weight)
    )
    torch.testing.assert_close(engram_weight_grad(dy, norm), weight_grad_ref(dy, norm))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    dh, dw = torch.autograd.grad(engram_gate_forward(*leaves, gate_weight)[0], leaves, dy)
    torch.testing.assert_close(engram_gate_backward(dy, hidden.detach(), weight.detach(), gate_weight), dh)
    if not gated:
        torch.testing.assert_close(engram_weight_grad(dy, norm), dw)


def test_gate_layer_trains():
    torch.manual_seed(0)
    layer = modeling.EngramGateLayer(hidden_size=32, num_experts=8, gated=True)
    assert modeling.EngramGateLayer().weight.shape == (256, 2048)
    x, target = torch.randn(4, 16, 32), torch.randint(8, (64,))
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(30):
        loss = functional.cross_entropy(layer(x).flatten(0, 1), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


class SmallModel(nn.Module):
    """Predicts the next token from two streams and what Engram looks up by the last three tokens."""

    VOCAB, HIDDEN, EMBED, NGRAM, HEADS = 32, 64, 8, 3, 2

    def __init__(self, make_engram):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(self.VOCAB, self.HIDDEN)
        self.head = nn.Linear(self.HIDDEN, self.VOCAB)
        sizes = torch.tensor([[[211, 223], [227, 229]]], dtype=torch.int32)
        self.register_buffer('sizes', sizes)
        self.register_buffer('offsets', make_offsets(sizes))
        self.register_buffer('multipliers', torch.tensor([[7919, 104729, 1299709]]))
        self.table = nn.Embedding(int(sizes.sum()), self.EMBED)
        self.engram = make_engram(modeling.Engram(self.HIDDEN, self.EMBED * 4, num_streams=2))

    def forward(self, tokens):
        ngrams = torch.stack([functional.pad(tokens, (i, 0))[:, : tokens.shape[1]] for i in range(self.NGRAM)], dim=-1)
        rows = engram_hash(ngrams.flatten(0, 1).int().contiguous(), self.multipliers, self.sizes, self.offsets)[0]
        looked_up = self.table(rows.long()).flatten(1).view(*tokens.shape, -1)
        streams = self.embed(tokens).bfloat16().unsqueeze(2).expand(-1, -1, 2, -1).contiguous()
        return self.head(self.engram(streams, looked_up).float().mean(2))


def train(make_engram, device, steps=25):
    model = SmallModel(make_engram).to(device)
    generator = torch.Generator().manual_seed(2)
    text = torch.randint(SmallModel.VOCAB, (4, 33), generator=generator).to(device)  # only the last tokens predict it
    optimiser = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(steps):
        loss = functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize('device', DEVICES)
def test_a_small_language_model_learns_like_its_plain_twin(device):
    ours, plain = train(lambda layer: layer, device), train(PlainEngram, device)
    assert ours[-1] < 0.1 * ours[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(plain), rtol=0.05, atol=0.03)


def test_a_compiled_layer_is_one_graph_for_all_lengths():
    torch.manual_seed(0)
    layer = modeling.Engram(hidden_size=64, embed_size=16, num_streams=2)
    nn.init.normal_(layer.conv_weight)
    counter = CompileCounterWithBackend('aot_eager')
    compiled, frames = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter), None
    for num_tokens in (5, 9, 12):
        x, embeddings = torch.randn(2, num_tokens, 2, 64, dtype=torch.bfloat16), torch.randn(2, num_tokens, 16)
        grads = []
        for module in (layer, compiled):
            layer.zero_grad()
            y = module(x, embeddings)
            y.float().square().sum().backward()
            grads.append([y.detach(), *(p.grad.clone() for p in layer.parameters())])
        torch.testing.assert_close(grads[0], grads[1])
        frames = frames or counter.frame_count
        assert counter.frame_count == frames


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: modeling.Engram(64.0, 16), 'Engram: hidden_size must be an integer, got float 64.0'),
        (lambda: modeling.Engram(65, 16), 'Engram: hidden_size must be a multiple of 64, got 65'),
        (lambda: modeling.Engram(64, 16, num_streams=9), 'Engram: num_streams must be at most 8, got 9'),
        (lambda: modeling.Engram(64, 16, taps=0), 'Engram: taps must be at least 1, got 0'),
        (lambda: modeling.Engram(64, 16, eps='a'), "Engram: eps must be a number, got str 'a'"),
        (lambda: modeling.EngramGateLayer(64, 2.5), 'EngramGateLayer: num_experts must be an integer, got float 2.5'),
    ],
)
def test_bad_arguments_of_the_layers_are_told(make, sentence):
    with pytest.raises(ArgumentError, match=f'^{sentence}$'):
        make()


def test_wrong_arguments_of_the_gate_are_named():
    x = torch.zeros(2, 4, 64, dtype=torch.bfloat16)
    with pytest.raises(
        ArgumentError, match=r'modeling\.engram_gate: hidden_states must come with k and v or kv, .* got 2'
    ):
        engram_gate(x, x, x[:, 0])
    with pytest.raises(ArgumentError, match=r'image_token_mask must be a tensor, got int 3'):
        engram_gate(x, torch.zeros(2, 5 * 64, dtype=torch.bfloat16), x[0], x[0], 1e-6, 1e-6, 3)
