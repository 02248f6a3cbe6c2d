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
from tile_kernels.core.launch import state
from tile_kernels.core.op import op as tile_kernels_op
from tile_kernels.core.replay import MISS
from tile_kernels.testing import contract

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
    monkeypatch.setattr(op.calls, 'run', lambda key, given: keys.append(key))
    for call in (lambda: op(x, 3), lambda: op(mult=3, x=x), lambda: op(x, 3, factor=1.0)):
        call()
    assert len(set(keys)) == 1
    with torch.no_grad():
        op(x, 3)
    op(x, 4)
    op(x[:4], 3)
    op(x, [3])
    assert len(set(keys)) == 5 and keys[-1] is None
    monkeypatch.setitem(op.calls.replays, keys[0], [lambda t: MISS, lambda t: (t,)])
    assert op(x, 3)[0] is x


def test_what_was_learned_holds_under_the_same_settings(sample, monkeypatch):
    x, keys = torch.randn(5, 32), []
    monkeypatch.setattr(sample.spread.calls, 'run', lambda key, given: keys.append(key))
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
        patch.setattr(sample.negate_.calls, 'run', lambda key, given: keys.append(key))
        with torch.no_grad():
            sample.negate_(x)
    monkeypatch.setitem(sample.negate_.calls.replays, keys[0], [lambda x, mask: None])
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


def test_ops_that_are_compiled_directly_do_not_share_a_limit_of_recompilations(sample):
    x = torch.randn(4, 32)
    with torch._dynamo.config.patch(recompile_limit=1):
        for op in (sample.spread, sample.through, sample.doubled):
            assert torch.equal(torch.compile(op, fullgraph=True, backend='eager')(x), op(x))


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


def compiled(fn):
    return torch.compile(fn, fullgraph=True, dynamic=True, backend='aot_eager')


@pytest.mark.parametrize('call', ['op', 'compiled'])
def test_an_identity_gradient_is_declared(sample, call):
    x = torch.randn(3, 4, requires_grad=True)
    through = compiled(sample.through) if call == 'compiled' else sample.through
    y = through(x, 1.5)
    assert torch.equal(y, x + 1.5)
    dy = torch.randn(3, 4)
    y.backward(dy)
    assert torch.equal(x.grad, dy)
    torch.library.opcheck(sample.through.operator, (x.detach().requires_grad_(), 1.0))


def test_lists_tuples_and_optional_quantized_tensors_are_parameters(sample):
    assert sample.total.schema == (
        'tests_total(Tensor[] xs, Tensor? q=None, Tensor? q_sf=None, str? q_fmt=None, SymInt[] dims=[0]) -> Tensor'
    )
    assert sample.zero_.schema == 'tests_zero_(Tensor(xs!)[] xs) -> ()'
    xs = [torch.randn(5, 32), torch.randn(5, 32)]
    q = sample.unit_cast(torch.ones(5, 32), FMT)
    for fn in (sample.total, compiled(sample.total)):
        torch.testing.assert_close(fn(xs), xs[0].sum(0) + xs[1].sum(0))
        torch.testing.assert_close(fn(xs, q, (0, 1)), xs[0].sum() + xs[1].sum() + 160)
    torch.library.opcheck(sample.total.operator, (xs, q.data, q.sf, FMT.name, (0,)), test_utils=['test_faketensor'])
    torch.library.opcheck(sample.total.operator, (xs,))
    with pytest.raises(ArgumentError, match='xs must be a list of tensors, got'):
        sample.total([1, 2])
    with pytest.raises(ArgumentError, match='dims must be a tuple of integers, got'):
        sample.total(xs, None, ('a',))


@pytest.mark.parametrize('call', ['op', 'compiled'])
def test_lists_of_tensors_are_written(sample, call):
    zero = compiled(lambda xs: sample.zero_(xs)) if call == 'compiled' else sample.zero_
    xs = [torch.ones(3), torch.ones(2, 2)]
    before = [x._version for x in xs]
    zero(xs)
    assert not any(x.any() for x in xs)
    assert all(x._version > version for x, version in zip(xs, before, strict=True))
    with pytest.raises(ArgumentError, match='xs must not require a gradient'):
        sample.zero_([torch.ones(3, requires_grad=True)])


def test_an_op_with_a_list_of_tensors_has_no_backward(sample):
    with pytest.raises(TypeError, match='a list of tensors cannot have a backward'):
        tile_kernels_op(outputs='y', backward='identity')(lambda_with_list)


def lambda_with_list(xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[0]


def test_a_form_that_writes_into_memory_of_the_caller_is_derived(sample):
    op = sample.scaled.out
    assert op.name == 'tests.scaled_'
    assert op.schema == 'tests_scaled_(Tensor x, float factor=2.0, *, Tensor(y!) y, Tensor(total!) total) -> ()'
    x, y, total = torch.randn(5, 32), torch.full((5, 32), torch.nan), torch.full((5,), torch.nan)
    for fn in (op, compiled(lambda *args, **kwargs: op(*args, **kwargs))):
        y.fill_(torch.nan)
        total.fill_(torch.nan)
        assert fn(x, 3.0, y=y, total=total) is None
        assert torch.equal(y, x * 3) and torch.equal(total, x.sum(-1))
    with pytest.raises(ArgumentError, match=r'tests.scaled_: y must be \(5, 32\) float32 on cpu, got'):
        op(x, y=y[:4], total=total)
    with pytest.raises(ArgumentError, match='total must be contiguous'):
        op(x, y=y, total=torch.empty(10)[::2])
    assert [case['num_tokens'] for case in op.case_set.smoke] == [0, 1, 5]
    for case in op.case_set.smoke:
        contract.check_operator(op, case)
        contract.check_fake(op, case)
        contract.check_opcheck(op, case)


def test_outputs_of_an_inner_op_are_new_memory(sample):
    outs = {'y': torch.empty(2, 2)}
    with state.set(outs=outs):
        y, _ = sample.scaled.body(x=torch.ones(3, 4))
    assert y.shape == (3, 4) and 'y' in outs


def test_a_public_function_is_the_op(sample):
    op, x = sample.doubled, torch.randn(3, 4)
    assert op.name == 'tests.doubled' and op is sample._doubled
    assert torch.equal(op(x, times=2), x * 4) and torch.equal(op.call(x, 3.0), x * 3)
    assert torch.equal(op.operator(x, 5.0), x * 5)
    assert torch.equal(compiled(lambda t: op(t, 3))(x), x * 8)
    assert list(inspect.signature(op).parameters) == ['x', 'times']
    assert 'how often' in pydoc.render_doc(op)
    with pytest.raises(TypeError, match='doubled'):
        op(x, wrong=1)


def test_an_op_with_an_out_form_tells_autograd_what_it_writes(sample):
    x = torch.ones(3)
    before = x._version
    sample.bump.body(x=x)
    assert x._version > before
