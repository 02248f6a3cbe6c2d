import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.structs import as_tensor
from tile_kernels import QuantFormat, knobs
from tile_kernels.core import replay as replay_module
from tile_kernels.core.formats import QuantTensor
from tile_kernels.core.launch import launch
from tile_kernels.core.replay import BODY, MISS, record


@pytest.fixture
def stub(sample):
    """A bound function for the sample kernel on CPU tensors that says what it was called with."""
    calls = []

    def bound(x, y, factor):
        assert isinstance(x, Tensor) or isinstance(y, Tensor)  # a launch takes its stream from a tensor
        x, y = as_tensor(x), as_tensor(y)
        calls.append((x, y, factor))
        with _disable_current_modes():  # a kernel writes memory without asking PyTorch
            y.copy_(sample.spread_twin(x, y.shape[1], factor) if y.dim() == 3 else torch.full_like(y, factor))

    kernel = sample.spread_kernel
    for size in (3, 5):
        kernel.bound[((32, 2), size, -1)] = bound
    yield calls
    kernel.bound.clear()


def test_a_replayed_call_allocates_and_launches_the_same(sample, stub):
    x = torch.randn(5, 32)
    with knobs(interpret=True):
        first, replay = record(sample.spread.fn, (x, 2, 3.0), {}, [x])
    again, once_more = replay(x), replay(x)
    assert torch.equal(first, again) and again.stride() == first.stride()
    assert again.data_ptr() not in (first.data_ptr(), once_more.data_ptr())
    assert len(stub) == 3 and stub[-1][2] == 3.0
    other = torch.randn(5, 32)
    assert torch.equal(replay(other), sample.spread_twin(other, 2, 3.0))


def test_a_body_that_computes_is_not_replayed(sample, stub):
    def body(x):
        y = sample.spread.fn(x, 2)
        return y.mul_(2)

    x = torch.randn(5, 32)
    result, replay = record(body, (x,), {}, [x])
    assert replay(x) is BODY and torch.equal(result, sample.spread_twin(x, 2) * 2)


@pytest.mark.parametrize('prepare', [lambda x: x.clone(), lambda x: x.to(torch.float64).float(), lambda x: x + 0])
def test_a_body_that_prepares_its_input_is_not_replayed(sample, stub, prepare):
    x = torch.randn(5, 32)
    assert record(lambda t: sample.spread.fn(prepare(t), 2), (x,), {}, [x])[1](x) is BODY


def test_an_output_that_aliases_an_input_is_not_replayed():
    x = torch.randn(5, 32)
    assert record(lambda t: t.view(-1), (x,), {}, [x])[1](x) is BODY


def test_views_of_arguments_are_repeated(sample, stub):
    def body(x):
        y = x.new_empty(3, 2, 32)
        launch(sample.spread_kernel, (32, 2), x.unsqueeze(0).select(0, 0), y, 1.0)
        return y

    x = torch.randn(3, 32)
    _, replay = record(body, (x,), {}, [x])
    other = torch.randn(3, 32)
    assert torch.equal(replay(other), sample.spread_twin(other, 2))


def test_launches_see_other_shapes_types_and_places(sample, stub):
    def body(x):
        y, z = x.new_empty(2, 3, 64), x.new_empty(4)
        launch(sample.spread_kernel, (32, 2), x, y[1].view(3, 2, 32), 2.0)
        launch(sample.spread_kernel, (32, 2), x, y.view(torch.int32)[0, ::2], 7)
        launch(sample.spread_kernel, (32, 2), x.view(torch.int32)[:, 16:], z, 5.0)
        return y, z

    x = torch.randn(3, 32)
    _, replay = record(body, (x,), {}, [x])
    other = torch.randn(3, 32)
    y, z = replay(other)
    assert torch.equal(y[1].view(3, 2, 32), sample.spread_twin(other, 2, 2.0))
    assert bool((y[0, ::2].view(torch.int32) == 7).all()) and bool((z == 5).all())
    assert torch.equal(stub[-1][0], other[:, 16:].view(torch.int32))


def test_a_tensor_given_twice_is_not_recorded(sample, stub):
    def body(x, y):
        return sample.spread.fn(y, 2)

    x = torch.randn(5, 32)
    assert record(body, (x, x), {}, [x, x])[1] is None
    assert record(body, (x, x.view(32, 5)), {}, [x, x.view(32, 5)])[1] is None
    pair = x, x + 1
    _, replay = record(body, pair, {}, [*pair])
    assert torch.equal(replay(x + 2, x), sample.spread_twin(x, 2)) and replay(x, x) is MISS


def test_inputs_in_one_buffer_are_told_apart(sample, stub):
    def body(x, y):
        z = x.new_empty(3, 2, 32)
        launch(sample.spread_kernel, (32, 2), y.view(3, 32), z, 1.0)
        return z

    both = torch.randn(6, 32)
    _, replay = record(body, (both[:3], both[3:].view(96)), {}, [both[:3], both[3:].view(96)])
    other = torch.randn(96)
    assert torch.equal(replay(torch.randn(3, 32), other), sample.spread_twin(other.view(3, 32), 2))


def test_a_missing_tensor_keeps_its_place(sample, stub):
    x = torch.randn(5, 32)
    _, replay = record(lambda: sample.spread.fn(x, 2), (), {}, [None, x, None])
    assert torch.equal(replay(None, x, None), sample.spread_twin(x, 2))


def test_workspaces_between_launches_are_allocated_anew(sample, stub):
    def body(x):
        rows = x.new_empty(2, 3, 2, 32)  # two workspaces in one allocation
        y = x.new_empty(3, 2, 32)
        launch(sample.spread_kernel, (32, 2), x, rows[1], 2.0)
        launch(sample.spread_kernel, (32, 2), rows[1, :, 0], y, 3.0)
        return y

    x = torch.randn(3, 32)
    result, replay = record(body, (x,), {}, [x])
    other = torch.randn(3, 32)
    assert torch.equal(result, sample.spread_twin(x, 2, 2.0) * 3.0)
    assert torch.equal(replay(other), sample.spread_twin(other, 2, 2.0) * 3.0)


@pytest.mark.parametrize('most', [1 << 20, 1 << 10])
def test_workspaces_share_an_allocation(sample, stub, monkeypatch, most):
    monkeypatch.setattr(replay_module, '_SHARED_BYTES', most)
    made = []

    def allocate(*shape, **options):
        made.append(shape)
        return torch_empty(*shape, **options)

    def body(x):
        first, second, third = x.new_empty(3, 2, 32), x.new_empty(3, 2, 32), x.new_empty(3, 2, 32)
        y, z = x.new_empty(3, 2, 32), x.new_empty(3, 2, 32)
        launch(sample.spread_kernel, (32, 2), x, first, 2.0)
        launch(sample.spread_kernel, (32, 2), x, second, 3.0)
        launch(sample.spread_kernel, (32, 2), first[:, 0], third, 5.0)
        launch(sample.spread_kernel, (32, 2), second[:, 0], y, 7.0)
        launch(sample.spread_kernel, (32, 2), third[:, 1], z, 11.0)
        return y, z

    x, torch_empty = torch.randn(3, 32), torch.empty
    _, replay = record(body, (x,), {}, [x])
    monkeypatch.setitem(replay.__globals__, 'empty', allocate)
    for _ in range(2):
        other = torch.randn(3, 32)
        y, z = replay(other)
        assert torch.equal(y, sample.spread_twin(other, 2, 3.0) * 7.0)
        assert torch.equal(z, sample.spread_twin(other, 2, 2.0) * 5.0 * 11.0)
    assert made == ([] if most < 2048 else [(2048,)] * 2)  # two of 768 bytes; `third` is the tensor of its launch


def test_memory_from_elsewhere_is_not_replayed(sample, stub):
    table = torch.zeros(3, 2, 32)

    def body(x):
        launch(sample.spread_kernel, (32, 2), x, table, 2.0)
        return x.new_empty(3)

    x = torch.randn(3, 32)
    assert record(body, (x,), {}, [x])[1](x) is BODY


def test_an_input_view_with_another_offset_keeps_its_place(sample, stub):
    base = torch.randn(9, 32)
    _, replay = record(lambda t: sample.spread.fn(t.unsqueeze(0)[0], 2), (base[:3],), {}, [base[:3]])
    later = base[5:8]
    assert torch.equal(replay(later), sample.spread_twin(later, 2))


@pytest.mark.parametrize(
    'other',
    [
        torch.randn(5, 33)[:, :32],
        torch.randn(6, 32),
        torch.randn(5, 32).double(),
        torch.randn(5 * 32 + 1)[1:].view(5, 32),
        torch.randn(5, 32).requires_grad_(),
        torch.nn.Parameter(torch.randn(5, 32), requires_grad=False),
        torch.empty(5, 32, device='meta'),
    ],
    ids=['strides', 'shape', 'dtype', 'alignment', 'gradient', 'type', 'device'],
)
def test_a_call_unlike_the_recorded_one_is_not_repeated(sample, stub, other):
    x = torch.randn(5, 32)
    _, replay = record(sample.spread.fn, (x, 2), {}, [x])
    calls = len(stub)
    assert replay(other) is MISS and len(stub) == calls
    assert replay(torch.randn(5, 32)) is not MISS


def test_misaligned_tensors_are_told_apart(sample, stub):
    def at(offset):
        return torch.randn(5 * 32 + offset)[offset:].view(5, 32)

    _, replay = record(lambda x, y: sample.spread.fn(x, 2), (at(1), at(0)), {}, [at(1), at(0)])
    assert replay(at(1), at(0)) is not MISS and replay(at(5), at(0)) is not MISS
    assert replay(at(0), at(1)) is MISS and replay(at(1), at(1)) is MISS and replay(at(2), at(0)) is MISS


def test_padding_and_formats_of_quantised_results_are_kept(sample, stub):
    fmt = QuantFormat.parse('e4m3_1x32_f32_col')

    def body(x):
        q = fmt.empty(5, 32, x.device)
        launch(sample.spread_kernel, (32, 2), x, q.sf, 0.5)
        return q

    x = torch.randn(5, 32)
    result, replay = record(body, (x,), {}, [x])
    again = replay(x)
    assert type(again) is QuantTensor and again.fmt is fmt and bool((again.sf == 0.5).all())
    assert again.sf.stride() == result.sf.stride() == (1, 8)
    assert again.sf.untyped_storage().nbytes() >= result.sf.untyped_storage().nbytes()


def test_a_replayed_write_is_told_to_autograd(sample, stub):
    def body(x, y):
        launch(sample.spread_kernel, (32, 2), x, y, 2.0)

    x, y = torch.randn(3, 32), torch.zeros(3, 2, 32)
    _, replay = record(body, (x, y), {}, [x, None, y], [y])
    before = x._version, y._version
    replay(x, None, y)
    assert (x._version, y._version - before[1]) == (before[0], 2)  # the stub writes by `copy_`, a kernel would not
    with torch.inference_mode():  # such tensors have no version
        y = torch.zeros(3, 2, 32)
        _, replay = record(body, (x, y), {}, [x, None, y], [y])
        assert replay(x, None, y) is None and torch.equal(y, sample.spread_twin(x, 2, 2.0))
