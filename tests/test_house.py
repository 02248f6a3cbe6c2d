"""House rules that a machine can hold: docstrings, twins, cases, names of files, no stray wording."""

import ast
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


FAMILY_FILES = [p for p in FILES if p.parent.parent.name == 'tile_kernels' and p.parent.name in tile_kernels.FAMILIES]

#: Private files of a family: device code, checks on the host, inputs of cases.
PRIVATE_FILES = {'__init__.py', '_macros.py', '_checks.py', '_samples.py'}


def stem_of(name: str) -> str:
    """The name of an op or file without the marks of gradients and of forms in place."""
    return re.sub(r'(_bwd\w*|_backward|_forward)?_?$', '', name)


@pytest.mark.parametrize('op', ops.values(), ids=ops)
def test_an_op_lives_in_the_file_of_its_name(op):
    """A gradient may live in the file of its op."""
    package, family, *rest = op.fn.__module__.split('.')
    name = op.name.partition('.')[2].rstrip('_')
    assert (package, family) == ('tile_kernels', op.family) and len(rest) == 1
    assert rest[0] == name or stem_of(rest[0]) == stem_of(name)


@pytest.mark.parametrize('op', ops.values(), ids=ops)
def test_a_twin_lives_in_the_file_that_its_op_has(op):
    if op.twin.__module__ != 'tile_kernels.core.op':  # derived from another twin
        assert op.twin.__module__ == f'tile_kernels.reference.{op.family}.{op.fn.__module__.split(".")[2]}'


def test_no_public_function_shares_its_name_with_a_different_op():
    for family in tile_kernels.FAMILIES:
        module = getattr(tile_kernels, family)
        different = [name for name in module.__all__ if getattr(module, name) is not ops.get(f'{family}.{name}')]
        assert not [name for name in different if f'{family}.{name}' in ops]


def test_families_use_the_same_names_for_private_files():
    private = [p for p in FAMILY_FILES if p.name.startswith('_') and p.name not in PRIVATE_FILES]
    assert not [p.relative_to(ROOT) for p in private]
    old = [p for p in FAMILY_FILES if p.name.startswith('front') or p.name.endswith('_device.py')]
    assert not [p.relative_to(ROOT) for p in old]


def test_files_of_kernels_stand_beside_an_op():
    for path in FAMILY_FILES:
        if path.name.endswith('_kernels.py'):
            own = [op.name.partition('.')[2] for op in ops.values() if op.family == path.parent.name]
            assert any(path.stem.startswith(name) for name in own), path.name


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


def test_a_kernel_name_belongs_to_one_file():
    found: dict[str, set[str]] = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any(
                isinstance(d, ast.Call) and getattr(d.func, 'id', '') == 'kernel' for d in node.decorator_list
            ):
                found.setdefault(node.name, set()).add(str(path.relative_to(ROOT)))
    assert len(found) > 100 and not {name: files for name, files in found.items() if len(files) > 1}
