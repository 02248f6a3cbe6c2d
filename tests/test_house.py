"""House rules that a machine can hold: docstrings, twins, cases, names of files, no stray wording."""

import inspect
import re
from pathlib import Path

import pytest

import tile_kernels
from tile_kernels.core.op import ops

ROOT = Path(__file__).parent.parent
FILES = [p for p in (ROOT / 'tile_kernels').rglob('*.py') if '__pycache__' not in p.parts]

for family in tile_kernels.FAMILIES:
    getattr(tile_kernels, family)


@pytest.mark.parametrize('op', ops.values(), ids=ops)
def test_every_op_is_complete(op):
    assert op.__doc__, 'needs a docstring'
    assert op.case_set is not None and op.case_set.smoke and op.case_set.bench, 'needs smoke and bench cases'
    own, twin = inspect.signature(op.fn), inspect.signature(op.twin)
    assert list(own.parameters) == list(twin.parameters), 'twin must take the same arguments'
    assert [p.default for p in own.parameters.values()] == [p.default for p in twin.parameters.values()]


def test_public_names_are_documented():
    missing = []
    for family in tile_kernels.FAMILIES:
        module = getattr(tile_kernels, family)
        missing += [f'{family}.{name}' for name in module.__all__ if not inspect.getdoc(getattr(module, name))]
    assert not missing


def test_a_todo_names_the_event_that_allows_it():
    pattern = re.compile(r'\b(TODO|FIXME|XXX)\b(?!\((torch|tilelang|python|cuda)[ <>=]*[\d.]+\))')
    assert not [p.relative_to(ROOT) for p in FILES if pattern.search(p.read_text())]


def test_device_names_are_not_written_into_ops():
    pattern = re.compile(r"device=['\"]cuda['\"]")
    families = [p for p in FILES if p.parent.name in tile_kernels.FAMILIES]
    assert not [p.relative_to(ROOT) for p in families if pattern.search(p.read_text())]


@pytest.mark.parametrize('op', ops.values(), ids=ops)
def test_token_counts_choose_among_few_variants(op):
    sizes = sorted({int(1.3**i) for i in range(80)})
    for launch in op.trace_case(op.case_set.bench[0]):
        chosen = {tuple(launch.kernel.config(launch.static, size).items()) for size in sizes}
        assert len(chosen) <= 5
