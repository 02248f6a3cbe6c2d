"""The top-k gate: its order, its ties, what is not a number, and every kind of row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter

from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.jit import compile_count
from tile_kernels.core.knobs import knobs
from tile_kernels.core.launch import forced_config
from tile_kernels.moe import topk_gate
from tile_kernels.moe.topk_gate_kernels import topk_gate_kernel

NAN, INF = float('nan'), float('inf')


@pytest.fixture(params=['twin', 'one row per warp', 'two rows per warp'])
def path(request, monkeypatch):
    """All ways the op runs on a CPU: its twin, and its kernel as it takes few and many tokens."""
    rows = 2 if request.param == 'two rows per warp' else 1
    monkeypatch.setattr(topk_gate_kernel, 'choose', lambda *_: dict(num_warps=2, rows=rows))
    with knobs(interpret=request.param != 'twin'):
        yield request.param


def expected(scores, num_topk):
    """The definition in Python: sort by (is NaN, -score, index)."""
    rows = []
    for row in scores.double().tolist():
        order = sorted(range(len(row)), key=lambda e: (row[e] != row[e], -row[e] if row[e] == row[e] else 0.0, e))
        rows.append(order[:num_topk])
    return torch.tensor(rows, dtype=torch.int64).reshape(len(rows), num_topk)


def check_rows(scores, num_topk):
    torch.testing.assert_close(topk_gate(scores, num_topk), expected(scores, num_topk), rtol=0, atol=0)


# Order --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('num_experts', 'num_topk'),
    [(1, 1), (2, 2), (16, 6), (31, 31), (32, 8), (33, 1), (36, 6), (64, 64), (72, 6), (108, 6), (130, 17), (256, 8)]
    + [(384, 8), (500, 16), (513, 33), (1024, 8), (1055, 40), (2048, 1)],
)
def test_every_row_length_and_k(num_experts, num_topk, path):
    torch.manual_seed(num_experts)
    check_rows(torch.randn(3, num_experts), num_topk)


def test_the_longest_row_and_the_largest_k():
    torch.manual_seed(0)
    scores = torch.randn(2, 4096)
    scores[1] = scores[1].mul(4).round()
    with knobs(interpret=True):
        check_rows(scores, 64)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('num_experts', [64, 72, 256, 264])
def test_short_floats(num_experts, dtype, path):
    check_rows(torch.randn(4, num_experts).to(dtype), 8)


@pytest.mark.parametrize('rows', topk_gate_kernel.space['rows'])
@pytest.mark.parametrize('num_warps', topk_gate_kernel.space['num_warps'])
@pytest.mark.parametrize('num_tokens', [1, 16, 19])
def test_every_config_with_whole_and_cut_blocks(num_tokens, num_warps, rows):
    scores = torch.randn(num_tokens, 96)
    scores[num_tokens // 2] = 0
    with knobs(interpret=True), forced_config(num_warps=num_warps, rows=rows):
        check_rows(scores, 6)


def test_no_tokens(path):
    topk_idx = topk_gate(torch.empty(0, 256), 8)
    assert topk_idx.shape == (0, 8)
    assert topk_idx.dtype == torch.int64


# Ties and special values --------------------------------------------------------------------


@pytest.mark.parametrize('num_experts', [36, 64, 256, 300])
def test_ties_take_the_smaller_index(num_experts, path):
    scores = torch.randint(0, 4, (4, num_experts)).float()
    scores[0] = 0
    check_rows(scores, 8)
    assert topk_gate(scores[:1], 8).tolist() == [list(range(8))]


def test_ties_inside_and_across_the_cut(path):
    scores = torch.full((3, 256), -1.0)
    scores[0, 100:120] = 2.0  # more equal scores than choices, fewer than lanes
    scores[1, 1::2] = 3.0  # more than lanes
    scores[2, [255, 3]] = 5.0
    scores[2, [254, 0, 17]] = 4.0
    check_rows(scores, 8)


def test_both_zeros_are_equal(path):
    scores = torch.full((2, 64), -1.0)
    scores[:, 8:24:2] = 0.0
    scores[:, 9:24:2] = -0.0
    check_rows(scores, 8)


@pytest.mark.parametrize('num_experts', [16, 72, 256])
def test_both_zeros_reach_a_cut_at_zero(num_experts, path):
    scores = torch.full((40, num_experts), -1.0)
    scores[:, ::2] = torch.where(torch.rand(40, -(-num_experts // 2)) < 0.5, -0.0, 0.0)
    scores[:, 1:10:2] = torch.arange(1.0, 6.0)
    check_rows(scores, 6)  # the sixth is the first zero, whatever its sign


def test_nan_ranks_last_whatever_its_sign(path):
    scores = torch.randn(4, 40)
    scores[0, ::2] = NAN
    scores[1, 5:] = -torch.tensor(NAN)
    scores[2, :] = NAN
    scores[3, 1:30] = -INF
    scores[3, 30:] = NAN
    check_rows(scores, 16)
    assert topk_gate(scores, 16)[2].tolist() == list(range(16))


def test_infinities(path):
    scores = torch.randn(3, 128)
    scores[0, ::3] = -INF
    scores[1, 7:] = -INF
    scores[2, ::5] = INF
    check_rows(scores, 12)


def test_neighbouring_floats_are_told_apart(path):
    bits = torch.tensor([1.0]).view(torch.int32) + torch.randperm(256, generator=torch.Generator().manual_seed(0))
    check_rows(bits.int().view(torch.float32).view(1, 256), 8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_two_rows(data):
    num_experts = data.draw(st.integers(1, 80))
    values = st.sampled_from([0.0, -0.0, 1.0, 1.5, -2.0, INF, -INF, NAN, 1e-45, -3e38])
    scores = data.draw(st.lists(values, min_size=2 * num_experts, max_size=2 * num_experts))
    num_topk = data.draw(st.integers(1, min(num_experts, 64)))
    with knobs(interpret=True), forced_config(num_warps=1, rows=data.draw(st.sampled_from([1, 2]))):
        check_rows(torch.tensor(scores).view(2, num_experts), num_topk)


# Memory -------------------------------------------------------------------------------------


def test_strided_and_misaligned_rows(path):
    storage = torch.randn(5, 300)
    check_rows(storage[:, :256], 8)
    check_rows(storage[:, 1:257], 8)
    check_rows(storage[:1, 3:259], 8)
    check_rows(storage[::2, 4:68], 8)


def test_number_of_tokens_and_stride_do_not_compile():
    def static(scores):
        return topk_gate.trace(scores, 8)[0].static

    assert static(torch.randn(3, 256)) == static(torch.randn(4000, 256))
    assert static(torch.randn(3, 512)[:, :256]) == static(torch.randn(5, 1024)[:, :256])
    before = compile_count()
    topk_gate(torch.randn(3, 256), 8)
    assert compile_count() == before


def test_one_graph_for_every_number_of_tokens():
    counter = CompileCounter()
    compiled = torch.compile(lambda scores: topk_gate(scores, 6), backend=counter, fullgraph=True, dynamic=True)
    for num_tokens in (3, 8, 17):
        scores = torch.randn(num_tokens, 64)
        assert torch.equal(compiled(scores), topk_gate(scores, 6))
    assert counter.frame_count == 1


# Errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('scores', 'num_topk', 'sentence'),
    [
        (torch.randn(8), 1, 'moe.topk_gate: scores must be (num_tokens, num_experts), got float32[8] on cpu'),
        (torch.randn(2, 8), 0, 'moe.topk_gate: num_topk must be at least 1, got 0'),
        (torch.randn(2, 8), 9, 'moe.topk_gate: num_topk must be at most 8, got 9'),
        (torch.randn(2, 80), 65, 'moe.topk_gate: num_topk must be at most 64, got 65'),
        (torch.randn(2, 4097), 8, 'moe.topk_gate: num_experts must be at most 4096, got 4097'),
        (torch.zeros(2, 8, dtype=torch.int32), 1, 'moe.topk_gate: scores must be float32 or bfloat16 or float16'),
        (torch.randn(8, 2).t(), 1, 'moe.topk_gate: scores must have stride 1 in the last dimension'),
    ],
)
def test_errors_are_one_sentence(scores, num_topk, sentence):
    with pytest.raises(ArgumentError) as raised:
        topk_gate(scores, num_topk)
    assert str(raised.value).startswith(sentence)
