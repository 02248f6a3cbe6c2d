"""A replayed call of any op gives what its body gives, with bound functions that interpret the kernel."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tests.structs import as_tensor
from tile_kernels import QuantTensor, knobs
from tile_kernels.core import launch
from tile_kernels.core.replay import BODY, MISS, record
from tile_kernels.modeling import MoELayer, moe
from tile_kernels.testing import assert_equal, contract


@pytest.fixture(autouse=True)
def interpreting(monkeypatch):
    """Bind kernels on CPU tensors to the interpreter, so that launches can be recorded without a GPU."""

    def bind(kernels, static, size, first, rest):
        kernel = launch.variant_for(kernels, static, launch.gpu_of(first))
        config = kernel.config(static, size)

        def bound(*args):
            with _disable_current_modes():  # a kernel writes memory without asking PyTorch
                launch._interpret(kernel, static, config, tuple(map(as_tensor, args)))

        return bound

    monkeypatch.setattr(launch, '_bind', bind)
    with knobs(interpret=True):
        yield


def tensors_of(arguments):
    found = []
    for value in arguments.values():
        found += list(value) if isinstance(value, (QuantTensor, list)) else [value] if isinstance(value, Tensor) else []
    return found


def one_and_last(cases):
    by_op = {}
    for case in cases:
        by_op.setdefault(case.op.name, []).append(case)
    return [case for own in by_op.values() for case in {str(c): c for c in (own[len(own) // 2], own[-1])}.values()]


@pytest.mark.skipif(torch.cuda.is_available(), reason='on a GPU the contract checks replayed calls')
@pytest.mark.parametrize('case', one_and_last(contract.contract_cases('smoke')), ids=str)
def test_replay_equals_body(case):
    op = case.op
    arguments, again = (op.case_set.arguments(op.name, case.case) for _ in range(2))
    result, replay = record(op.fn, (), arguments, tensors_of(arguments))

    def repeat(**given):
        answer = replay(*tensors_of(given))
        assert answer is not MISS
        if answer is BODY:
            pytest.skip('the body does more than allocate and launch')
        return answer

    expected = contract._outcome(op, lambda **given: result, arguments)
    found = contract._outcome(op, repeat, again)
    for name, tensor in expected.items():
        if op.case_set.match == 'bitwise' or not tensor.is_floating_point():
            assert_equal(found[name], tensor)
        else:
            torch.testing.assert_close(found[name], tensor, equal_nan=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason='binds kernels to the interpreter')
@pytest.mark.parametrize('compute', ['bf16', 'fp8'])
def test_replay_of_a_whole_layer(compute):
    torch.manual_seed(0)
    layer = MoELayer(4, 2, 128, compute=compute).eval()
    layer.experts.prepare_fp8()
    weights = (
        layer.experts.prepared
        if compute == 'fp8'
        else (layer.experts.gate_up_proj, None, layer.experts.down_proj, None)
    )

    def given(x):
        return [x, layer.gate.weight, None, *weights]

    with torch.no_grad():
        x, other = torch.randn(2, 5, 128).bfloat16()
        result, replay = record(moe._infer.__wrapped__, (*given(x), 2), layer.gate.options, given(x), None)
        assert_equal(result, moe._infer.__wrapped__(*given(x), 2, **layer.gate.options))
        assert_equal(replay(*given(other)), moe._infer.__wrapped__(*given(other), 2, **layer.gate.options))
    assert sum(name.startswith('f') and name[1:].isdigit() for name in replay.__globals__) == 7
