"""The layer of native sparse attention: equal to plain PyTorch in results and gradients."""

import copy
import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError
from tile_kernels.modeling import NSA

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16


def plain(layer: NSA, x: Tensor) -> Tensor:
    """The layer in plain PyTorch for one sequence (tokens, hidden_size) that selects all of its blocks."""
    tokens, dim, size = x.shape[0], layer.head_dim, layer.block_size
    heads = [(layer.q_proj, layer.num_heads), (layer.k_proj, layer.num_kv_heads), (layer.v_proj, layer.num_kv_heads)]
    q, k, v = (proj(x).unflatten(-1, (n, -1)).transpose(0, 1) for proj, n in heads)
    angle = torch.arange(tokens)[:, None] * layer.rope_theta ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angle.cos().to(x.device), angle.sin().to(x.device)

    def rotate(y):
        a, b = y.chunk(2, -1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    group = layer.num_heads // layer.num_kv_heads
    q, k, v = rotate(q), rotate(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    token, block = torch.arange(tokens, device=x.device), torch.arange(tokens // size, device=x.device)
    distance = token[:, None] - token

    def attend(keys, values, visible):
        scores = (q @ keys.transpose(-1, -2) * dim**-0.5).masked_fill(~visible, -math.inf)
        weights = torch.where(visible.any(-1, keepdim=True), scores, 0.0).softmax(-1)
        return torch.where(visible.any(-1, keepdim=True), weights, 0.0) @ values

    means = [y[:, : tokens // size * size].unflatten(1, (-1, size)).mean(2) for y in (k, v)]
    branches = (
        attend(*means, (block + 1) * size <= token[:, None] + 1),
        attend(k, v, distance >= 0),
        attend(k, v, (distance >= 0) & (distance < layer.window)),
    )
    gates = layer.g_proj(x).unflatten(-1, (layer.num_heads, 3)).sigmoid().permute(2, 1, 0)
    o = sum(gate.unsqueeze(-1) * branch for gate, branch in zip(gates, branches, strict=True))
    return layer.o_proj(o.transpose(0, 1).flatten(-2))


def make() -> NSA:
    torch.manual_seed(0)
    return NSA(32, 6, 2, 16, block_size=16, block_counts=3, window=7, device=DEVICE)


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()).item()


def test_equals_plain_pytorch():
    layer = make()
    wide = copy.deepcopy(layer).double()
    x = torch.randn(2, 45, 32, device=DEVICE).to(BF16).requires_grad_()
    x64 = x.detach().double().requires_grad_()
    y, exact = layer(x), torch.stack([plain(wide, row) for row in x64])
    assert relative(y, exact) < 1.5e-2
    upstream = torch.randn(y.shape, device=DEVICE).to(BF16)
    own = torch.autograd.grad(y, [x, *layer.parameters()], upstream)
    theirs = torch.autograd.grad(exact, [x64, *wide.parameters()], upstream.double())
    for mine, other in zip(own, theirs, strict=True):
        assert relative(mine, other) < 3e-2


def test_packed_sequences_and_state_dict():
    layer, other = make(), NSA(32, 6, 2, 16, block_size=16, block_counts=3, window=7, device=DEVICE)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(50, 32, device=DEVICE).to(BF16)
    cuts = torch.tensor([0, 0, 20, 50], device=DEVICE)
    with torch.no_grad():
        packed = layer(x, cu_seqlens=cuts)
        for start, end in ((0, 20), (20, 50)):
            torch.testing.assert_close(other(x[None, start:end])[0], packed[start:end], rtol=2e-2, atol=1e-2)


def test_compiles_once_for_several_lengths():
    layer, counter = make(), CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (33, 40):
        x = torch.randn(1, tokens, 32, device=DEVICE).to(BF16)
        with torch.no_grad():
            assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        (dict(num_heads=5), 'num_heads must be a multiple of 2'),
        (dict(block_size=24), 'block_size must be one of 16, 32, 64, 128'),
        (dict(window=-1), 'window must be at least 0'),
        (dict(num_heads=130), 'query heads of a kv head must be at most 64'),
    ],
)
def test_bad_input_gets_one_sentence(given, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        NSA(**dict(hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=16) | given)
