"""Native sparse attention against plain PyTorch: branches, selection, gates, packed sequences, gradients, compile."""

import math

import pytest
import torch
from torch import Tensor

from tile_kernels import ArgumentError, knobs
from tile_kernels.attention import nsa_attend, parallel_nsa
from tile_kernels.attention.parallel_nsa import attend_means, mean_blocks, select_blocks

DEVICE = 'cuda' if torch.cuda.is_available() else 'cpu'
BF16 = torch.bfloat16
SIZE = 16


@pytest.fixture
def interpreting():
    with knobs(interpret=True):
        yield


def operands(tokens=50, heads=(6, 2), dim=32, batch=1):
    torch.manual_seed(tokens)
    shapes = [(batch, tokens, heads[0], dim), (batch, tokens, heads[1], dim), (batch, tokens, heads[1], dim)]
    leaves = [torch.randn(shape, device=DEVICE).to(BF16) for shape in shapes]
    gates = [torch.rand(batch, tokens, heads[0], device=DEVICE).to(BF16) for _ in range(3)]
    return leaves, gates


def masked(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Attention (heads, tokens, dim) in float64 to the keys that are visible (heads, tokens, keys), and its weights."""
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(~visible, -math.inf)
    weights = torch.where(visible.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    return weights @ v, weights


def plain_nsa(q, k, v, gates, number, window, lists=None):
    """One sequence (tokens, heads, dim) in float64: the sum of the three branches, and the blocks it selected."""
    tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    q, k, v = (x.double() for x in (q, k, v))
    means = [x[: tokens // SIZE * SIZE].unflatten(0, (-1, SIZE)).mean(1).to(BF16).double() for x in (k, v)]
    first = lambda x: x.transpose(0, 1)
    wide = lambda x: first(x.repeat_interleave(group, 1))
    token, block = torch.arange(tokens), torch.arange(tokens // SIZE)
    complete = ((block + 1) * SIZE - 1 <= token[:, None]).expand(heads, -1, -1)
    compressed, weights = masked(first(q), wide(means[0]), wide(means[1]), complete)
    if lists is None:
        columns = -(-tokens // SIZE)
        scores = torch.zeros(kv_heads, tokens, columns, dtype=torch.float64)
        scores[:, :, : tokens // SIZE] = weights.unflatten(0, (kv_heads, group)).sum(1)
        own = token[:, None] // SIZE
        column = torch.arange(columns)
        scores = torch.where((column == 0) | (column == own) | (column == own - 1), math.inf, scores)
        scores = scores.masked_fill(column > own, -math.inf)
        lists = []
        for h in range(kv_heads):
            for t in range(tokens):
                best = scores[h, t].sort(descending=True, stable=True).indices[:number]
                lists.append(best[best <= t // SIZE].tolist())
    chosen = torch.zeros(kv_heads, tokens, tokens, dtype=torch.bool)
    for h in range(kv_heads):
        for t in range(tokens):
            for n in lists[h * tokens + t]:
                chosen[h, t, n * SIZE : min((n + 1) * SIZE, t + 1)] = True
    distance = token[:, None] - token
    near = ((distance >= 0) & (distance < window)).expand(heads, -1, -1)
    selected, _ = masked(first(q), wide(k), wide(v), chosen.repeat_interleave(group, 0))
    close, _ = masked(first(q), wide(k), wide(v), near)
    parts = [first(x) for x in (compressed, selected, close)]
    return sum(part * gate.double().unsqueeze(-1) for part, gate in zip(parts, gates, strict=True)), lists


def relative(x: Tensor, exact: Tensor) -> float:
    return ((x.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp(min=1e-9)).item()


@pytest.mark.parametrize('heads', [(6, 2), (17, 1), (3, 3)])
def test_all_branches_and_gradients(heads, request):
    if heads != (17, 1):  # slow; the contract tests of `nsa_attend` interpret odd groups
        request.getfixturevalue('interpreting')
    leaves, gates = operands(36, heads)
    everything = [x.requires_grad_() for x in (*leaves, *gates)]
    o = parallel_nsa(*leaves, *gates, block_counts=3, block_size=SIZE, window_size=20)
    wide = [x.detach().double().requires_grad_() for x in everything]
    expected, _ = plain_nsa(*(x[0] for x in wide[:3]), [g[0] for g in wide[3:]], 3, 20)
    assert relative(o[0], expected) < 8e-3
    upstream = torch.randn(o.shape, device=DEVICE).to(BF16)
    own = torch.autograd.grad(o, everything, upstream)
    exact = torch.autograd.grad(expected[None], wide, upstream.double())
    for mine, theirs in zip(own, exact, strict=True):
        assert relative(mine, theirs) < 1.5e-2


def test_more_than_three_blocks_are_selected_by_score():
    (q, k, v), _ = operands(150, (4, 2))
    means = mean_blocks(k, SIZE, None)
    _, lse = attend_means(q, means, mean_blocks(v, SIZE, None), SIZE, 32**-0.5, None)
    found = select_blocks(q, means, lse, 5, SIZE, 32**-0.5, None)
    _, lists = plain_nsa(q[0], k[0], v[0], [torch.ones(150, 4)] * 3, 5, 1)
    same = 0
    for h in range(2):
        for t in range(150):
            mine = [n for n in found[0, t, h].tolist() if n >= 0]
            assert mine == sorted(mine) and {0, t // SIZE, max(t // SIZE - 1, 0)} <= set(mine)
            assert len(mine) == min(5, t // SIZE + 1)
            same += mine == sorted(lists[h * 150 + t])
    assert same >= 0.98 * 300  # scores that are almost equal may be rounded to the other order


def test_packed_sequences_are_those_alone():
    lengths = (0, 33, 1, 0, 40)
    (q, k, v), gates = operands(77, (6, 2))
    for x in (q, k, v, *gates):
        x[:, 74:] = math.nan
    cuts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE)  # int64
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options = dict(block_counts=3, block_size=SIZE, window_size=9)
    o = parallel_nsa(*leaves, *(g.nan_to_num(0.0) for g in gates), cu_seqlens=cuts, **options)
    assert not o[:, 74:].any()
    gradients = torch.autograd.grad(o.float().square().sum(), leaves)
    assert all(g.isfinite().all() and not g[:, 74:].any() for g in gradients)
    for start, end in zip(cuts.tolist(), cuts.tolist()[1:], strict=False):
        if end > start:
            own = [x.detach()[:, start:end].clone().requires_grad_() for x in (q, k, v)]
            alone = parallel_nsa(*own, *(g[:, start:end] for g in gates), **options)
            torch.testing.assert_close(alone, o[:, start:end], rtol=2e-2, atol=1e-2)
            for mine, whole in zip(torch.autograd.grad(alone.float().square().sum(), own), gradients, strict=True):
                torch.testing.assert_close(mine, whole[:, start:end], rtol=5e-2, atol=3e-2)


def test_given_lists_and_counts(interpreting):
    (q, k, v), _ = operands(40, (4, 2))
    lists = torch.randint(-1, 3, (1, 40, 2, 4), device=DEVICE)  # int64
    counts = torch.randint(0, 5, (1, 40, 2), device=DEVICE)
    o = parallel_nsa(q, k, v, block_indices=lists, block_counts=counts, block_size=SIZE)
    expected = nsa_attend.twin(q, k, v, lists.int(), counts.int(), None, SIZE, 32**-0.5)[0]
    torch.testing.assert_close(o, expected, rtol=1e-2, atol=1e-2)
    wrong = nsa_attend.twin(q, k, v, lists.int() + 1, counts.int(), None, SIZE, 32**-0.5)[0]  # a planted error
    assert (wrong - o).abs().max() > 0.1


def test_keys_that_no_list_has_do_not_matter(interpreting):
    (q, k, v), _ = operands(48, (4, 2))
    lists = torch.zeros(1, 48, 2, 1, device=DEVICE, dtype=torch.int32)
    k[:, SIZE:], v[:, SIZE:] = math.nan, math.inf
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = parallel_nsa(*leaves, block_indices=lists, block_size=SIZE)
    assert o.isfinite().all()
    gradients = torch.autograd.grad(o.float().square().sum(), leaves)
    assert all(g.isfinite().all() for g in gradients) and not gradients[1][:, SIZE:].any()


def test_compile():
    def step(q, k, v, g):
        return parallel_nsa(q, k, v, g, g, g, block_counts=2, block_size=SIZE, window_size=5)

    compiled = torch.compile(step, fullgraph=True, backend='aot_eager')
    (q, k, v), (g, *_) = operands(33, (2, 1))
    leaf = q.clone().requires_grad_()
    o = compiled(leaf, k, v, g)
    assert torch.equal(o, step(q, k, v, g))
    assert torch.autograd.grad(o.float().sum(), leaf)[0].isfinite().all()


@pytest.mark.parametrize(
    ('given', 'sentence'),
    [
        (dict(block_size=48), 'block_size must be one of 16, 32, 64, 128, got 48'),
        (dict(block_counts=0), 'block_counts must be at least 1'),
        (dict(block_counts=torch.ones(1, 20, 1)), 'block_counts must be an integer unless block_indices is given'),
        (dict(window_size=-1), 'window_size must be at least 0'),
        (dict(g_cmp=torch.ones(1, 20, 3)), r'g_cmp must be \(batch, tokens, heads\) with heads = 2'),
        (dict(block_indices=torch.zeros(1, 20, 1, 2)), 'block_indices must be int32 or int64'),
        (dict(cu_seqlens=torch.zeros(2)), 'cu_seqlens must be int32 or int64'),
    ],
)
def test_bad_input_gets_one_sentence(given, sentence):
    (q, k, v), _ = operands(20, (2, 1))
    with pytest.raises(ArgumentError, match=sentence):
        parallel_nsa(q, k, v, **dict(block_size=SIZE) | given)
