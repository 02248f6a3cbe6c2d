"""The key of a kernel covers the code that reaches it, and nothing else."""

import ast
import copy
import dis
import functools
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

import tile_kernels
from tile_kernels import FAMILIES
from tile_kernels.core import cache, nvcc
from tile_kernels.core.code_digest import Code, Node, Sources, code
from tile_kernels.core.jit import kernels
from tile_kernels.core.knobs import knobs
from tile_kernels.core.registry import load_ops

ROOT = Path(tile_kernels.__file__).parent
_HOST = ('core.op', 'core.launch', 'core.check', 'core.cases', 'core.replay', 'core.params', 'core.knobs', 'core.jit')
_HOST_FOLDERS = ('cli', 'reference', 'testing', 'interpreter', 'modeling', 'compat')


class Edited(Sources):
    """The sources with some modules replaced."""

    def __init__(self, texts):
        super().__init__()
        self.texts = texts

    def read(self, module):
        found = super().read(module)
        return (self.texts[module], found[1]) if found is not None and module in self.texts else found


@functools.cache
def launches():
    """For every kernel the first launch of a smoke case, and the family of the op."""
    found = {}
    for op in load_ops().values():
        for case in op.case_set.smoke if op.case_set is not None else ():
            for launch in op.trace_case(case):
                found.setdefault(launch.kernel.name, launch)
    return found


def family(kernel):
    return kernel.__module__.split('.')[1]


def sample(per_family):
    """Names of kernels of every family."""
    taken = {}
    for name, kernel in kernels.items():
        if kernel.__module__.startswith('tile_kernels.') and name in launches():
            taken.setdefault(family(kernel), []).append(name)
    return [name for names in taken.values() for name in names[:: max(1, len(names) // per_family)][:per_family]]


def digest(graph, name):
    launch = launches()[name]
    return graph.digest(launch.kernel.builder, graph.types(launch.static))


def reached(graph, name):
    launch = launches()[name]
    return graph.reached(launch.kernel.builder, graph.types(launch.static))


def all_modules():
    return [name for _, name, _ in pkgutil.walk_packages([str(ROOT)], 'tile_kernels.')]


def as_statements(text):
    return ast.parse(textwrap.dedent(text)).body


def edit_documentation(text):
    """Other docstrings, comments, line numbers and format."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            node.body.insert(0, *as_statements('"Words that nobody has written."'))
    return '# a comment\n\n\n' + '\n\n'.join(f'{line}  # why' if line.endswith(':') else line for line in _lines(tree))


def _lines(tree):
    return ast.unparse(ast.fix_missing_locations(tree)).splitlines()


def edit_node(tree, node):
    """Change one top-level name, or one method of a class."""
    tree = copy.deepcopy(tree)
    (extra,) = as_statements('_edited = 12345')
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and statement.name == node.name:
            target = statement
            if node.member:
                target = next(s for s in statement.body if isinstance(s, ast.FunctionDef) and s.name == node.member)
            target.body.append(extra)
            return tree
        if isinstance(statement, (ast.Assign, ast.AnnAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names = {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            if node.name in names:
                statement.value = ast.Tuple([statement.value, ast.Constant(12345)], ast.Load())
                return tree
        if isinstance(statement, ast.If) and any(
            isinstance(n, ast.Name) and n.id == node.name and isinstance(n.ctx, ast.Store) for n in ast.walk(statement)
        ):
            statement.orelse.append(extra)
            (assign,) = [s for s in statement.orelse if isinstance(s, ast.Assign) and s is not extra]
            assign.value = ast.Tuple([assign.value, ast.Constant(12345)], ast.Load())
            return tree
    raise LookupError(node)


def fork(base, module, text):
    """The same code with one module replaced; the others are not parsed again."""
    graph = Code(Edited({module: text}))
    graph._modules = {name: known for name, known in base._modules.items() if name != module}
    graph._scans = dict(base._scans)
    return graph


def test_documentation_and_format_do_not_count():
    texts = {name: edit_documentation(found[0]) for name in all_modules() if (found := Sources().read(name))}
    edited = Code(Edited(texts))
    assert len(texts) > 150
    different = [name for name in launches() if digest(edited, name) != digest(code(), name)]
    assert different == []


def test_host_code_does_not_count():
    chosen = [kernel.choose for kernel in kernels.values() if kernel.choose is not None]
    hosts = {choose.__code__ for choose in chosen if choose.__name__ != '<lambda>'}
    hosts |= {op.fn.__code__ for op in load_ops().values()}
    lines = {(c.co_filename, c.co_firstlineno) for c in hosts}
    for name in launches():
        for node in reached(code(), name):
            short = node.module.removeprefix('tile_kernels.')
            assert short not in _HOST and short.split('.')[0] not in _HOST_FOLDERS, (name, node)
            assert node.name, f'{name} brings in the whole of {node.module}'
            for statement in code()._statements(node):
                first = min([statement.lineno, *(d.lineno for d in getattr(statement, 'decorator_list', ()))])
                assert (str(code().sources.file(node.module)), first) not in lines, (name, node)


def test_host_functions_of_every_module_can_change():
    used = {node for name in launches() for node in reached(code(), name)}
    texts, changed = {}, 0
    for name in all_modules():
        found = Sources().read(name)
        if found is None:
            continue
        tree = ast.parse(found[0])
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef) and Node(name, statement.name) not in used:
                statement.body += as_statements('_edited = 12345')
                changed += 1
        texts[name] = '\n'.join(_lines(tree))
    edited = Code(Edited(texts))
    assert changed > 500
    assert [name for name in launches() if digest(edited, name) != digest(code(), name)] == []


def test_everything_that_is_reached_counts():
    names = sample(3)
    uses = {name: reached(code(), name) for name in names}
    before = {name: digest(code(), name) for name in names}
    nodes = sorted(set().union(*uses.values()))
    assert len(nodes) > 150
    for node in nodes if knobs.full_test else nodes[::2]:
        text = '\n'.join(_lines(edit_node(code().module(node.module).tree, node)))
        graph = fork(code(), node.module, text)
        inside = [name for name in names if node in uses[name]]
        outside = [name for name in names if node not in uses[name]]
        for name in inside[:2]:
            assert digest(graph, name) != before[name], (name, node)
        for name in outside[:1]:
            assert digest(graph, name) == before[name], (name, node)


def test_annotations_count_in_kernels_only():
    name = 'tile_kernels.transpose.batched_transpose'
    text = Sources().read(name)[0]
    (kernel,) = [k for k in launches() if kernels[k].__module__ == name][:1]
    tree = ast.parse(text)
    nested = [
        inner
        for outer in tree.body
        if isinstance(outer, ast.FunctionDef) and outer.name == kernel
        for inner in ast.walk(outer)
        if isinstance(inner, ast.FunctionDef) and any('prim_func' in ast.unparse(d) for d in inner.decorator_list)
    ]
    for outer in tree.body:
        if isinstance(outer, ast.FunctionDef) and outer.name == kernel:
            outer.returns = ast.Name('object', ast.Load())
            outer.args.args[0].annotation = ast.Name('object', ast.Load())
    plain = fork(code(), name, '\n'.join(_lines(tree)))
    assert digest(plain, kernel) == digest(code(), kernel)
    nested[0].args.args[0].annotation = ast.Name('object', ast.Load())
    assert digest(fork(code(), name, '\n'.join(_lines(tree))), kernel) != digest(code(), kernel)


def executed(kernel, static, config):
    """The functions of the package that run while a kernel is built, macros included."""
    seen = set()

    def watch(frame, event, _):
        if event != 'call':
            return
        if frame.f_code.co_filename.startswith(str(ROOT)):
            seen.add((frame.f_globals['__name__'], frame.f_code))
            if frame.f_code.co_name == 'expand' and 'fn' in frame.f_locals:
                fn = frame.f_locals['fn']
                seen.add((fn.__module__, fn.__code__))

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        kernel.builder(*static, **config)
    finally:
        sys.setprofile(before)
    return {(module, compiled) for module, compiled in seen if is_written(module, compiled)}


@functools.cache
def functions_of(module):
    """Name and line of every function of a module."""
    todo, found = [compile(Sources().read(module)[0], module, 'exec')], set()
    while todo:
        inner = [constant for constant in todo.pop().co_consts if isinstance(constant, types.CodeType)]
        found |= {(function.co_name, function.co_firstlineno) for function in inner}
        todo += inner
    return found


def is_written(module, compiled):
    """Whether a function stands in the module, and was not made by TileLang of one that does."""
    return (compiled.co_name, compiled.co_firstlineno) in functions_of(module)


def globals_of(compiled):
    """Names a function looks up in its module, those of nested functions included."""
    for instruction in dis.get_instructions(compiled):
        if instruction.opname in ('LOAD_GLOBAL', 'LOAD_NAME'):
            yield instruction.argval
    for constant in compiled.co_consts:
        if isinstance(constant, types.CodeType):
            yield from globals_of(constant)


def is_inside(graph, module, line, nodes):
    """Whether the function at a line of a module is among the nodes."""
    statement = graph.module(module).at_line(line)
    if isinstance(statement, ast.ClassDef):
        members = [s for s in statement.body if hasattr(s, 'name')]
        for member in members:
            first = min([member.lineno, *(d.lineno for d in member.decorator_list)])
            if first <= line <= member.end_lineno:
                return Node(module, statement.name, member.name) in nodes
    return any(statement in graph._statements(node) for node in nodes if node.module == module)


@pytest.mark.parametrize('of', FAMILIES)
def test_what_runs_while_a_kernel_is_built_counts(of):
    for name in sample(1000 if knobs.full_test else 3):
        if family(kernels[name]) != of:
            continue
        launch = launches()[name]
        nodes = reached(code(), name)
        ran = executed(launch.kernel, launch.static, launch.config)
        assert launch.kernel.builder.__code__ in {compiled for _, compiled in ran}
        for module, compiled in ran:
            assert is_inside(code(), module, compiled.co_firstlineno, nodes), (module, compiled.co_name)
            for used in globals_of(compiled):  # an independent look at the same names, through byte code
                targets, _ = code()._resolve(module, (used,))
                for target in targets:
                    if target.name and target.module != 'tile_kernels.core.check':
                        assert target in nodes, (module, compiled.co_name, used)


def test_the_key_is_the_same_in_every_process(tmp_path):
    script = (
        'from tile_kernels.core.jit import kernels; import tile_kernels;'
        "print([kernels[n]._digest((64, 'x'), {'a': 1}, 'sm_90a') for n in sorted(kernels)][:20])"
    )
    printed = set()
    for seed in ('0', '7'):
        env = {**os.environ, 'PYTHONHASHSEED': seed, 'PYTHONPATH': str(ROOT.parent)}
        command = [sys.executable, '-c', script]
        printed.add(subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, check=True, timeout=120).stdout)
    assert len(printed) == 1


def test_a_recorded_digest_holds_until_a_text_or_a_value_changes():
    name = 'norm_backward_kernel'
    builder, types = launches()[name].kernel.builder, code().types(launches()[name].static)
    record = json.loads(json.dumps(code().record(builder, types)))
    assert record['digest'] == digest(code(), name) and code().holds(record) and Code().holds(record)
    module = 'tile_kernels.norm._macros'
    assert not Code(Edited({module: Sources().read(module)[0] + '# more'})).holds(record)
    constant = next(iter(record['constants']))
    assert not code().holds({**record, 'constants': {**record['constants'], constant: 'other'}})
    for broken in (None, [], {}, {'digest': 'x'}, {**record, 'texts': {}}):
        assert not code().holds(broken)


def test_a_process_records_digests_beside_the_libraries(tmp_path, monkeypatch):
    launch = launches()['norm_backward_kernel']
    for expected in (1, 0):  # the second process finds the record
        graph, parsed = Code(), []
        monkeypatch.setattr(cache, '_digests', {})
        monkeypatch.setattr(cache, 'code', lambda graph=graph: graph)
        monkeypatch.setattr(
            graph, 'reach', lambda roots, graph=graph, parsed=parsed: parsed.append(1) or Code.reach(graph, roots)
        )
        found = cache.code_digest(tmp_path, launch.kernel.builder, launch.static)
        assert found == digest(code(), 'norm_backward_kernel') and bool(parsed) == expected
    assert len(list(tmp_path.glob('.code/*.json'))) == 1 and not list(tmp_path.rglob('*.tmp'))


def test_a_directory_made_for_the_first_kernel_has_its_digest(tmp_path, monkeypatch):
    launch = launches()['norm_backward_kernel']
    monkeypatch.setattr(nvcc, 'compile_library', lambda func, configs, arch, path: path.write_bytes(b'compiled'))
    with knobs(cache_dir=tmp_path / 'new'):
        launch.kernel.library(launch.static, launch.config, 'sm_90a')
    (record,) = (tmp_path / 'new').glob('.code/*.json')
    assert Code().holds(json.loads(record.read_text()))


# A user's own kernel ------------------------------------------------------------------------

USER = '''
from tile_kernels.core.lang import T, macro
import functools
from helper import WIDTH, scale
import helper as h

TABLE = {}

def register(fn):
    TABLE[fn.__name__] = fn
    return fn

@register
def first(x):
    return x + 1

def unused(x):
    return x

def builder(hidden, *, threads=WIDTH):
    """Words."""
    return scale(TABLE['first'](hidden)) + h.deep(hidden)

def looks_up(name):
    return getattr(h, name)(3)

def factory(n):
    def made(hidden):
        return hidden + n
    return made
'''
HELPER = '''
WIDTH = 4
_state = 0

class Shape:
    """A class."""
    def used(self):
        return WIDTH

    def idle(self):
        return 1

def scale(x: int) -> int:
    """Words."""
    return x * Shape().used()

def deep(x):
    return x

def other(x):
    return x
'''


@pytest.fixture
def user(tmp_path, monkeypatch):
    """Digest of a builder of a user's module, with its text and that of the module beside it edited."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, 'dont_write_bytecode', True)

    def made(name='builder', edit=(), edit_helper=(), call=None):
        for module in ('mine', 'helper'):
            sys.modules.pop(module, None)
        importlib.invalidate_caches()
        (tmp_path / 'mine.py').write_text(USER.replace(*edit) if edit else USER)
        (tmp_path / 'helper.py').write_text(HELPER.replace(*edit_helper) if edit_helper else HELPER)
        module = importlib.import_module('mine')
        builder = getattr(module, name)
        return Code().digest(builder(*call) if call else builder)

    yield made
    for module in ('mine', 'helper'):
        sys.modules.pop(module, None)


def test_a_kernel_of_a_user_counts_with_the_modules_beside_it(user):
    before = user()
    assert user() == before
    for edit in (('"""Words."""', '"""Others."""'), ('def unused(x):', 'def unused(x, y):'), ('\n\n', '\n\n# more\n')):
        assert user(edit=edit) == before, edit
    for edit in (('x + 1', 'x + 2'), ('h.deep(hidden)', 'h.other(hidden)'), ('threads=WIDTH', 'threads=2')):
        assert user(edit=edit) != before, edit
    for edit in (('return 1', 'return 2'), ('x: int', 'x: float'), ('def other(x):', 'def other(y):')):
        assert user(edit_helper=edit) == before, edit
    for edit in (
        ('WIDTH = 4', 'WIDTH = 5'),
        ('return WIDTH', 'return 2 * WIDTH'),
        ('return x\n\ndef o', 'return 2\n\ndef o'),
    ):
        assert user(edit_helper=edit) != before, edit


def test_a_name_looked_up_at_run_time_brings_in_the_module(user):
    before = user('looks_up')
    assert user('looks_up', edit_helper=('def other(x):\n    return x', 'def other(x):\n    return 2')) != before
    assert user('looks_up', edit_helper=('"""Words."""', '"""Others."""')) == before


def test_what_a_builder_encloses_counts(user):
    assert user('factory', call=(1,)) == user('factory', call=(1,))
    assert user('factory', call=(1,)) != user('factory', call=(2,))


def test_the_value_of_a_constant_counts(user, monkeypatch):
    before = user()
    mine = sys.modules['mine']
    monkeypatch.setattr(sys.modules['helper'], 'WIDTH', 8)
    assert Code().digest(mine.builder) != before


def test_objects_given_to_a_builder_bring_their_class():
    from tile_kernels.core.formats import QuantFormat

    nodes = code().types((QuantFormat.parse('e4m3_1x128_f32'), 4, torch.bfloat16))
    assert {node.name for node in nodes} == {'QuantFormat', 'Element'}
