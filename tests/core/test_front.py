"""Replays of public functions: the second call of a kind is recorded, the third no longer runs the function."""

import pytest
import torch
from torch import Tensor

from tests.core.test_replay import stub  # noqa: F401 - a fixture
from tile_kernels import ArgumentError, QuantFormat, QuantTensor, knobs
from tile_kernels.core import check
from tile_kernels.core.front import replayed
from tile_kernels.core.launch import launch, state
from tile_kernels.core.op import ops


@pytest.fixture
def ran(sample, stub, monkeypatch):  # noqa: F811
    """CPU tensors count as tensors of a GPU; the list grows with each run of the body of a public function."""
    monkeypatch.setattr(torch.Tensor, 'is_cuda', property(lambda x: True), raising=False)
    monkeypatch.setattr(torch.Tensor, 'is_cpu', property(lambda x: False), raising=False)
    return []


@pytest.fixture
def front(sample, ran):
    @replayed
    def scaled(
        x: Tensor, factor: float = 1.0, out: tuple[Tensor, Tensor] | None = None, wide: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        ran.append(factor)
        check.at_least(factor, 0, 'factor')
        y = sample.spread(x, 2, factor)
        if out is not None:
            out[0].copy_(y)
        return y.view(x.shape[0], 64) if wide else y, None, x

    return scaled


def test_the_third_call_of_a_kind_runs_no_function(sample, front, ran, stub):  # noqa: F811
    for expected in (1, 2, 2, 2):
        x = torch.randn(5, 32)
        y, nothing, same = front(x, 3.0)
        assert torch.equal(y, sample.spread_twin(x, 2, 3.0)) and nothing is None and same is x
        assert len(ran) == expected
    assert stub[-1][2] == 3.0
    wide = [front(factor=3.0, x=x, wide=True)[0] for _ in range(4)][-1]
    assert torch.equal(wide, sample.spread_twin(x, 2, 3.0).view(5, 64)) and len(ran) == 4


@pytest.mark.parametrize('change', ['option', 'shape', 'dtype', 'strides', 'grad mode', 'settings'])
def test_calls_of_another_kind_run_the_function(front, ran, change):
    x = torch.randn(5, 32)
    for _ in range(3):
        front(x)
    before = len(ran)
    if change == 'option':
        with pytest.raises(ArgumentError, match='factor must be at least 0'):
            front(x, -1.0)
    elif change == 'dtype':
        with pytest.raises(ArgumentError, match='x must be float32'):
            front(x.double())
    elif change == 'grad mode':
        with torch.no_grad():
            front(x)
    elif change == 'settings':
        with knobs(num_sms=3):
            front(x)
    else:
        front(x[:3] if change == 'shape' else torch.randn(5, 64)[:, :32])
    assert len(ran) == before + 1


def test_what_cannot_be_replayed_runs_the_function(front, ran, sample):
    x, room = torch.randn(5, 32), (torch.empty(5, 2, 32), torch.empty(0))
    for _ in range(3):
        front(x, 1.0, room)  # memory of the caller
        front(x, True)  # equal to 1.0, and of another type: still the same kind
    assert len(ran) == 5
    for _ in range(3):
        front(x, torch.tensor(2.0).item())
    needing = torch.randn(5, 32, requires_grad=True)
    for step in range(3):
        assert front(needing, 2.0)[0].grad_fn is not None, step
    before = len(ran)
    with state.set(skip=True):
        front(x)
    assert len(ran) == before + 1


def test_a_function_that_computes_is_run_each_time(sample, ran):
    @replayed
    def doubled(x: Tensor) -> Tensor:
        ran.append(x)
        return sample.spread(x, 2) * 2

    x = torch.randn(5, 32)
    assert all(torch.equal(doubled(x), sample.spread_twin(x, 2) * 2) for _ in range(4)) and len(ran) == 4


def test_autograd_sees_what_a_replayed_function_writes(sample, ran):
    @replayed
    def into(x: Tensor, y: Tensor | None = None) -> Tensor | None:
        ran.append(x)
        sample.negate_(x)
        return y

    x, y = torch.ones(3, 32), torch.ones(3)
    versions = []
    for _ in range(4):
        before = x._version, y._version
        assert into(x, y) is y
        versions.append((x._version - before[0], y._version - before[1]))
    assert set(versions) == {(1, 0)} and len(ran) == 2


def test_pairs_and_formats_are_kinds_of_their_own(sample, ran):
    @replayed
    def back(x: tuple[Tensor, Tensor], fmt: str = 'bf16', block: tuple[int, int] | None = None) -> Tensor:
        ran.append(fmt)
        y = x[0].new_empty(5, 2, 32)
        launch(sample.spread_kernel, (32, 2), x[0], y, 2.0)
        return y

    pair = torch.randn(5, 32), torch.rand(5, 1)
    quantized = QuantTensor(*pair, QuantFormat.parse('e4m3_1x32_f32'))
    for x, block in ((pair, (1, 32)), (quantized, None)):
        ran.clear()
        results = [back(x, 'bf16', block) for _ in range(4)]
        assert len(ran) == 2 and torch.equal(results[-1], sample.spread_twin(pair[0], 2, 2.0))
    ran.clear()
    for _ in range(3):
        back(list(pair), 'bf16')  # the function decides what is wrong with a list
    assert len(ran) == 3


def test_public_functions_that_are_replayed_show_their_own_arguments():
    from tile_kernels import norm

    assert norm.norm_forward is ops['norm.norm_forward']
    with pytest.raises(ArgumentError, match=r'norm\.norm_forward: residual_out must come with residual'):
        norm.norm_forward(torch.ones(2, 64), None, 1e-6, residual_out=torch.ones(2, 64))
    with pytest.raises(TypeError, match='norm_forward'):
        norm.norm_forward(torch.ones(2, 64))
