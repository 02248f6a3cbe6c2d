"""Every op, from its declaration: tensors on another device, bases without alignment, the key of a replay."""

import pytest
import torch
from torch import Tensor

import tile_kernels
from tile_kernels import QuantTensor, knobs
from tile_kernels.core.cases import bounds_of
from tile_kernels.core.errors import ArgumentError
from tile_kernels.core.op import ops
from tile_kernels.testing import contract
from tile_kernels.testing.poison import poisoned

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)

OPS = [op for op in ops.values() if op.case_set is not None]


def arguments(op, case):
    """The arguments of a case, absent ones as their defaults."""
    given = op.case_set.arguments(op.name, case)
    return {param.name: given.get(param.name, param.default) for param in op.params}


def richest(op):
    """The smoke case with the most tensors that have elements; of several, the smallest."""

    def count(case):
        sizes = [value.numel() for value in op.case_set.arguments(op.name, case).values() if isinstance(value, Tensor)]
        return sum(size > 0 for size in sizes), -sum(sizes)

    return max(op.case_set.smoke, key=count)


@pytest.mark.parametrize('op', OPS, ids=lambda op: op.name)
def test_a_tensor_on_another_device_gets_one_sentence(op):
    given = arguments(op, richest(op))
    tensors = [name for name, value in given.items() if isinstance(value, Tensor) and value.numel() > 0]
    for name in tensors if len(tensors) > 1 else ():
        elsewhere = given | {name: given[name].to('meta')}
        with knobs(interpret=True), pytest.raises(ArgumentError, match=r'device|on meta'):
            op.call(**elsewhere)


@pytest.mark.parametrize('op', OPS, ids=lambda op: op.name)
def test_every_option_is_in_the_key_of_a_replay(op, monkeypatch):
    given = arguments(op, richest(op))
    keys = []
    monkeypatch.setattr(op.calls, 'run', lambda key, given: keys.append(key))
    op.call(**given)
    changed = []
    for name, value in given.items():
        if isinstance(value, (Tensor, QuantTensor, list)):
            continue
        op.call(**given | {name: not value if isinstance(value, bool) else ('another', value)})
        changed.append(name)
    same = [name for name, key in zip(changed, keys[1:], strict=True) if key is not None and key == keys[0]]
    assert keys[0] is None or same == []


def bits(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def moved(x: Tensor) -> Tensor:
    """The same elements and strides, one element behind a 16-byte boundary."""
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    memory = torch.empty(extent + 1, dtype=x.dtype)
    return memory[1:].as_strided(x.shape, x.stride(), 1).copy_(x)


@pytest.mark.skipif(torch.cuda.is_available(), reason='the interpreter checks alignment')
@pytest.mark.parametrize('op', OPS, ids=lambda op: op.name)
def test_bases_without_alignment_give_the_same_or_one_sentence(op):
    given = arguments(op, richest(op))
    names = [name for name, value in given.items() if isinstance(value, Tensor) and value.numel() > 0]
    if sum(given[name].numel() for name in names) > (60_000 if not knobs.full_test else 1 << 30):
        pytest.skip('the case with the most tensors takes too long')
    expected = contract._outcome(op, op.twin, arguments(op, richest(op)))
    for name in names:
        fresh = arguments(op, richest(op))
        fresh[name] = moved(fresh[name])
        try:
            with knobs(interpret=True, checks='memory'), poisoned():
                found = contract._outcome(op, op.call, fresh)
        except ArgumentError:
            continue
        for output, tensor in expected.items():
            match = op.case_set.match
            if isinstance(match, dict) and tensor.is_floating_point():
                contract._assert_close(found[output], tensor, bounds_of(match, output, tensor))
            else:
                assert torch.equal(bits(found[output]), bits(tensor))
