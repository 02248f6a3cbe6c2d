import copy
import inspect
import pickle
import pydoc
import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tile_kernels import ArgumentError, QuantFormat, QuantTensor, UnsupportedError, knobs, mhc
from tile_kernels.core.cost import Cost
from tile_kernels.core.replay import MISS

FMT = QuantFormat.parse('e4m3_1x32_f32')


def test_schemas_follow_from_annotations(sample):
    assert sample.spread.schema == 'tests_spread(Tensor x, SymInt mult=4, float factor=1.0) -> Tensor'
    assert sample.unit_cast.schema == 'tests_unit_cast(Tensor x, str fmt) -> (Tensor, Tensor)'
    assert sample.negate_.schema == 'tests_negate_(Tensor(x!) x, Tensor? mask=None) -> ()'


def test_direct_path_equals_operator_path(sample):
    x = torch.randn(5, 32)
    assert torch.equal(sample.spread(x, 3, factor=2.0), sample.spread.operator(x, 3, 2.0))
    direct, operator = sample.unit_cast(x, FMT), sample.unit_cast.operator(x, FMT.name)
    assert torch.equal(direct.data.view(torch.uint8), operator[0].view(torch.uint8))
    assert direct.fmt is FMT and isinstance(direct, QuantTensor)


@pytest.mark.parametrize('grad', [False, True])
def test_opcheck_passes(sample, grad):
    x = torch.randn(5, 32, requires_grad=grad)
    torch.library.opcheck(sample.spread.operator, (x, 3, 2.0))
    torch.library.opcheck(sample.unit_cast.operator, (x, FMT.name))
    torch.library.opcheck(sample.negate_.operator, (torch.randn(5, 32),))


def test_gradients_are_wired_by_name(sample):
    x = torch.randn(5, 32, requires_grad=True)
    sample.spread(x, mult=3, factor=2.0).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 6.0))
    y = torch.randn(5, 32, requires_grad=True)
    sample.spread.operator(y, 3, 2.0).sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.mark.parametrize('call', [lambda op, x: op(), lambda op, x: op(x, wrong=1), lambda op, x: op(x, 3, 2.0, 1)])
def test_wrong_calls_are_refused_by_python(sample, call):
    with pytest.raises(TypeError, match='spread'):
        call(sample.spread, torch.randn(5, 32))


def test_calls_of_a_kind_are_replayed_however_they_are_written(sample, monkeypatch):
    op, x, keys = sample.spread, torch.randn(5, 32), []
    monkeypatch.setattr(op, '_run', lambda key, given: keys.append(key))
    for call in (lambda: op(x, 3), lambda: op(mult=3, x=x), lambda: op(x, 3, factor=1.0)):
        call()
    assert len(set(keys)) == 1
    with torch.no_grad():
        op(x, 3)
    op(x, 4)
    op(x[:4], 3)
    op(x, [3])
    assert len(set(keys)) == 5 and keys[-1] is None
    monkeypatch.setitem(op._replays, keys[0], [lambda t: MISS, lambda t: (t,)])
    assert op(x, 3)[0] is x


def test_what_was_learned_holds_under_the_same_settings(sample, monkeypatch):
    x, keys = torch.randn(5, 32), []
    monkeypatch.setattr(sample.spread, '_run', lambda key, given: keys.append(key))
    for settings in ({}, {'num_sms': 3}, {}, {'num_sms': 3}, {'num_sms': 4}):
        with knobs(**settings):
            sample.spread(x)
    assert keys[0] == keys[2] and keys[1] == keys[3] and len(set(keys)) == 3
    knobs.touch()
    sample.spread(x)
    assert keys[-1] not in keys[:-1]


def test_a_write_learned_without_gradients_is_not_replayed_with_them(sample, monkeypatch):
    x = torch.ones(3, 2, requires_grad=True)
    keys = []
    with monkeypatch.context() as patch:
        patch.setattr(sample.negate_, '_run', lambda key, given: keys.append(key))
        with torch.no_grad():
            sample.negate_(x)
    monkeypatch.setitem(sample.negate_._replays, keys[0], [lambda x, mask: None])
    with pytest.raises(ArgumentError, match='x must not require a gradient'):
        sample.negate_(x)


def test_outputs_without_gradient_are_not_differentiable(sample):
    q = sample.unit_cast(torch.randn(5, 32, requires_grad=True), FMT)
    assert not q.data.requires_grad
    assert not sample.unit_cast.operator(torch.randn(5, 32, requires_grad=True), FMT.name)[0].requires_grad


def test_no_grad_and_autocast_leave_the_result_alone(sample):
    x = torch.randn(5, 32, requires_grad=True)
    with torch.no_grad():
        assert not sample.spread(x).requires_grad
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert sample.spread(x).dtype == torch.float32


def test_one_graph_for_several_token_counts(sample):
    counter = CompileCounter()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def step(x):
        q = sample.unit_cast(x, FMT)
        return sample.spread(x, mult=3), q.data, q.sf

    for num_tokens in (7, 16, 33):
        step(torch.randn(num_tokens, 32))
    assert counter.frame_count == 1


def test_compiled_gradients_equal_eager_ones(sample):
    x = torch.randn(5, 32, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    (sample.spread(x, 3) ** 2).sum().backward()
    torch.compile(lambda t: (sample.spread(t, 3) ** 2).sum(), fullgraph=True, dynamic=True)(y).backward()
    torch.testing.assert_close(x.grad, y.grad)


def test_export_keeps_one_node(sample):
    class Model(torch.nn.Module):
        def forward(self, x):
            return sample.spread(x, 2)

    program = torch.export.export(Model(), (torch.randn(4, 32),))
    calls = [n for n in program.graph.nodes if n.op == 'call_function']
    assert [n.target for n in calls] == [sample.spread.operator]


def test_functorch_gradients(sample):
    x = torch.randn(4, 32)
    grad = torch.func.grad(lambda t: sample.spread(t, 2).sum())(x)
    assert torch.equal(grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize('call', ['op', 'operator', 'compiled'])
def test_second_derivatives_are_refused(sample, call):
    spread = {
        'op': sample.spread,
        'operator': sample.spread.operator,
        'compiled': torch.compile(sample.spread, fullgraph=True, backend='eager'),
    }[call]
    x = torch.randn(4, 32, requires_grad=True)
    (grad,) = torch.autograd.grad((spread(x, 2) ** 2).sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 4 * x)
    with pytest.raises(UnsupportedError, match=r'tests\.spread: has no second derivative'):
        grad.sum().backward()


def test_second_derivatives_of_functorch_are_refused(sample):
    gradient = torch.func.grad(lambda t: (sample.spread(t, 2) ** 2).sum())
    with pytest.raises(UnsupportedError, match=r'tests\.spread: has no second derivative'):
        torch.func.grad(lambda t: gradient(t).sum())(torch.randn(4, 32))


def test_other_transforms_are_refused_by_the_name_of_the_op(sample):
    x, spread = torch.randn(4, 32), lambda t: sample.spread(t, 2)
    with pytest.raises(UnsupportedError, match=r'^tests\.spread: cannot be batched by torch\.vmap[^\n]*$'):
        torch.vmap(spread)(torch.stack([x, x]))
    with pytest.raises(UnsupportedError, match=r'^tests\.spread: cannot be batched by torch\.vmap[^\n]*$'):
        torch.func.jacrev(spread)(x)
    with pytest.raises(UnsupportedError, match=r'^tests\.spread: has no forward-mode derivative[^\n]*$'):
        torch.func.jvp(spread, (x,), (x,))


def test_fake_tensors_run_the_body_without_launching(sample):
    with torch._subclasses.FakeTensorMode():
        assert sample.spread(torch.empty(4, 32), 2).shape == (4, 2, 32)


def test_in_place_op_writes_its_argument(sample):
    x = torch.ones(3, 2)
    assert sample.negate_(x) is None
    assert torch.equal(x, -torch.ones(3, 2))


REFUSED = r'tests\.negate_: x must not require a gradient, since it is written in place, got float32\[3, 2\] on cpu'


def test_in_place_op_refuses_what_needs_a_gradient(sample):
    leaf = torch.ones(3, 2, requires_grad=True)
    for x in (leaf, leaf * 1.0, leaf.view(3, 2)):
        for call in (sample.negate_, sample.negate_.operator):
            with pytest.raises(ArgumentError, match=REFUSED):
                call(x)
        with pytest.raises(torch._dynamo.exc.TorchRuntimeError, match=REFUSED):
            torch.compile(lambda t: sample.negate_(t * 1.0), fullgraph=True, backend='aot_eager')(x)
        assert torch.equal(x, torch.ones(3, 2))
    with torch._subclasses.FakeTensorMode(), pytest.raises(ArgumentError, match=REFUSED):
        sample.negate_(torch.empty(3, 2, requires_grad=True))
    with pytest.raises(ArgumentError, match='x must not require a gradient'):
        torch.func.grad(lambda t: sample.negate_(t) or t.sum())(torch.ones(3, 2))


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
def test_in_place_op_writes_what_needs_no_gradient_here(sample, mode):
    x = torch.ones(3, 2, requires_grad=True)
    with mode():
        sample.negate_(x)
        sample.negate_.operator(x)
        sample.negate_(x)
        made_here = torch.ones(3, 2)
        sample.negate_(made_here)
    assert torch.equal(x, -torch.ones(3, 2)) and torch.equal(made_here, -torch.ones(3, 2))


@pytest.mark.parametrize('interpret', [False, True])
@pytest.mark.parametrize('call', ['op', 'operator'])
def test_autograd_sees_that_a_saved_tensor_was_written(sample, interpret, call):
    w = torch.ones(3, 2, requires_grad=True)
    x = torch.ones(3, 2)
    loss = (w * x).sum()
    with knobs(interpret=interpret):
        (sample.negate_ if call == 'op' else sample.negate_.operator)(x)
    with pytest.raises(RuntimeError, match='modified by an inplace operation'):
        loss.backward()


def test_cpu_tensors_run_the_checks_then_the_twin(sample):
    with pytest.raises(ArgumentError, match=r'x must be \(num_tokens, hidden\), got float32\[8\] on cpu'):
        sample.spread(torch.randn(8))
    assert torch.equal(sample.spread(torch.ones(2, 8), 2), torch.ones(2, 2, 8))


def test_interpreter_runs_the_kernel(sample):
    x = torch.randn(5, 64)[:, :32]  # strided rows
    with knobs(interpret=True):
        assert torch.equal(sample.spread(x, 3, factor=2.0), sample.spread_twin(x, 3, 2.0))
        assert sample.spread(torch.randn(0, 32), 3).shape == (0, 3, 32)


def test_missing_argument_is_a_type_error(sample):
    with pytest.raises(TypeError, match='fmt'):
        sample.unit_cast(torch.randn(2, 32))
    with pytest.raises(TypeError, match='colour'):
        sample.spread(torch.randn(2, 32), colour=3)


def test_dry_run_gives_launches_and_cost_without_a_gpu(sample):
    (launch,) = sample.spread.trace_case({'num_tokens': 4096, 'mult': 4})
    assert launch.kernel is sample.spread_kernel and launch.config == {'num_threads': 128}
    assert launch.cost.bytes == 4096 * 32 * 4 * 5
    assert launch.cost.floor_us() < launch.cost.copy_us()
    assert sample.spread.cost(torch.randn(2, 32), 4).bytes == 2 * 32 * 4 * 5


def test_a_floor_is_the_longer_of_moving_and_multiplying():
    assert Cost(48 * 10**6).floor_us() == pytest.approx(10)
    assert Cost(48 * 10**6, 2 * 989 * 10**7).floor_us() == pytest.approx(20)
    assert Cost(48 * 10**6, 2 * 989 * 10**7, dtype=torch.float8_e4m3fn).floor_us() == pytest.approx(10, rel=1e-3)


def test_help_shows_an_op_as_a_function():
    shown = pydoc.render_doc(mhc.sinkhorn, renderer=pydoc.plaintext)
    assert 'sinkhorn(x: torch.Tensor, repeat: int = 10, eps: float = 1e-06) -> torch.Tensor\n    ' in shown
    assert 'Args:' in shown and '<op' not in shown
    assert str(inspect.signature(mhc.sinkhorn)).startswith('(x: torch.Tensor, repeat: int = 10')


def test_an_op_in_a_class_is_no_method(sample):
    class Holder:
        spread = sample.spread

    assert Holder.spread is Holder().spread is sample.spread


@pytest.mark.parametrize('through', [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_copies_and_pickles_of_an_op_are_the_op(through):
    assert through(mhc.pre) is mhc.pre and through([mhc.sinkhorn])[0] is mhc.sinkhorn


def test_an_op_is_pickled_for_a_process_that_has_not_imported_it():
    program = 'import pickle, sys; print(pickle.load(sys.stdin.buffer))'
    run = subprocess.run([sys.executable, '-c', program], input=pickle.dumps(mhc.pre), capture_output=True, check=True)
    assert run.stdout == b'<op mhc.pre>\n'


def test_format_survives_compile(sample):
    out = torch.compile(lambda x: sample.unit_cast(x, FMT), fullgraph=True)(torch.randn(4, 32))
    assert out.fmt is FMT
