"""The router: logits, choice and true gradients for hidden states and weights."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import tile_kernels.reference as reference
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.knobs import knobs
from tile_kernels.moe import MoETopKRouting, gate_logits, moe_topk_routing
from tile_kernels.moe.gate_logits import num_parts_for


@pytest.fixture(params=[False, True], ids=['twin', 'kernel'])
def path(request):
    with knobs(interpret=request.param):
        yield


def inputs(num_tokens, num_experts, hidden, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
    return x, torch.randn(num_experts, hidden, generator=generator).mul(hidden**-0.5).bfloat16()


@pytest.mark.parametrize(('num_tokens', 'num_experts', 'hidden'), [(5, 64, 128), (70, 72, 100), (3, 8, 1024)])
def test_scores_are_a_softmax_over_the_best(num_tokens, num_experts, hidden, path):
    x, weight = inputs(num_tokens, num_experts, hidden)
    scores, indices = moe_topk_routing(x, weight, topk=4)
    logits = x.double() @ weight.double().T
    best = logits.topk(4)
    assert scores.dtype == torch.float32 and indices.dtype == torch.int64
    assert torch.equal(indices, best.indices)
    torch.testing.assert_close(scores.double(), best.values.softmax(-1), rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_float64(path):
    x, weight = (t.requires_grad_() for t in inputs(66, 40, 136))
    scores, indices = MoETopKRouting.apply(x, weight, 4)
    upstream = torch.randn(66, 4)
    dx, dweight = torch.autograd.grad(scores, (x, weight), upstream)

    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = (exact_x @ exact_weight.T).gather(1, indices).softmax(-1)
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), upstream.double())
    assert dx.dtype == dweight.dtype == torch.bfloat16
    torch.testing.assert_close(dx.double(), expected[0], rtol=2**-7, atol=1e-4)
    torch.testing.assert_close(dweight.double(), expected[1], rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize(
    'dtypes', [(torch.float32,) * 2, (torch.float16,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
def test_wider_numbers_are_multiplied_in_float32(dtypes):
    x, weight = (t.to(d).requires_grad_() for t, d in zip(inputs(9, 40, 136), dtypes, strict=True))
    with torch.autocast('cpu', dtype=torch.bfloat16):
        scores, indices = moe_topk_routing(x, weight, 4)
    exact_x, exact_weight = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    exact = (exact_x @ exact_weight.T).gather(1, indices).softmax(-1)
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(9, 4)
    expected = torch.autograd.grad(exact, (exact_x, exact_weight), upstream.double())
    for gradient, truth, dtype in zip(
        torch.autograd.grad(scores, (x, weight), upstream), expected, dtypes, strict=True
    ):
        assert gradient.dtype == dtype
        torch.testing.assert_close(gradient.double(), truth, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_many_tokens_and_none(path):
    x, weight = (t.requires_grad_() for t in inputs(0, 16, 64))
    scores, indices = moe_topk_routing(x, weight, 2)
    assert scores.shape == indices.shape == (0, 2)
    (dweight,) = torch.autograd.grad(scores.sum(), weight)
    assert (dweight == 0).all()


def test_strided_and_unaligned_rows(path):
    x, weight = inputs(6, 24, 200)
    weight = weight[:, :128].contiguous()
    for view in (x[:, :128], x[::2, 8:136]):
        assert torch.equal(gate_logits(view, weight), gate_logits(view.clone(), weight))
    unaligned = x[:, 1:129]  # another kernel, whose sums have another order
    torch.testing.assert_close(gate_logits(unaligned, weight), gate_logits(unaligned.clone(), weight))


def test_autocast_stays_outside(path):
    x, weight = (t.requires_grad_() for t in inputs(5, 24, 64))
    expected = gate_logits(x, weight)
    with torch.autocast('cpu', dtype=torch.float16):
        actual = gate_logits(x, weight)
    assert torch.equal(actual, expected) and actual.dtype == torch.float32
    gradients = [torch.autograd.grad(y.square().sum(), (x, weight)) for y in (actual, expected)]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_sum_is_cut_for_few_tokens_only():
    assert [num_parts_for(t, 7168) for t in (1, 64, 128, 256, 512, 1024, 2048, 4096)] == [16, 16, 16, 8, 4, 8, 4, 1]
    assert [num_parts_for(1, hidden) for hidden in (511, 512, 2048)] == [1, 2, 8]


def test_reference_is_the_same():
    x, weight = inputs(7, 64, 128)
    for actual, expected in zip(moe_topk_routing(x, weight), reference.MoETopKRouting.apply(x, weight), strict=True):
        torch.testing.assert_close(actual, expected)


def test_one_graph_with_gradients():
    counter = CompileCounter()
    compiled = torch.compile(lambda x, w: moe_topk_routing(x, w, 4), backend=counter, fullgraph=True, dynamic=True)
    for num_tokens in (3, 8, 70):
        x, weight = (t.requires_grad_() for t in inputs(num_tokens, 32, 64))
        actual, expected = compiled(x, weight), moe_topk_routing(x, weight, 4)
        assert torch.equal(actual[1], expected[1])
        gradients = [torch.autograd.grad(s.square().sum(), (x, weight)) for s, _ in (actual, expected)]
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ('change', 'sentence'),
    [
        (
            dict(x=torch.zeros(2, 64).double()),
            'hidden_states must be float32 or bfloat16 or float16, got float64[2, 64]',
        ),
        (dict(weight=torch.zeros(8, 32).bfloat16()), 'gate_weight must be (num_experts, hidden) with hidden = 64'),
        (dict(topk=9), 'topk must be at most 8, got 9'),
    ],
)
def test_errors_are_one_sentence(change, sentence):
    arguments = dict(x=torch.zeros(2, 64).bfloat16(), weight=torch.zeros(8, 64).bfloat16(), topk=2) | change
    with pytest.raises(ArgumentError) as raised:
        moe_topk_routing(*arguments.values())
    assert str(raised.value).startswith(f'moe.moe_topk_routing: {sentence}')
