"""What importing costs, what it must not touch, and which way imports point."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tile_kernels import FAMILIES, modeling
from tile_kernels.core.op import ops

PACKAGE = Path(__file__).parent.parent / 'tile_kernels'

#: What each part may import of this package; `*` marks everything.
ALLOWED = {
    'core': {'core', 'interpreter'},  # launch reaches the interpreter when it runs a kernel on a CPU
    'reference': {'core', 'reference', 'moe', 'engram'},
    'compat': {
        'activation',
        'compat',
        'core',
        'engram',
        'mhc',
        'modeling',
        'moe',
        'norm',
        'quant',
        'reference',
        'transpose',
    },
    'device': {'core', 'device'},
    'activation': {'core', 'device', 'activation', 'quant'},
    'norm': {'core', 'device', 'norm', 'quant'},
    'integrations': {'activation', 'attention', 'core', 'integrations', 'modeling', 'moe', 'norm', 'transform'},
    'interpreter': {'interpreter', 'core'},
    'attention': {'core', 'attention', 'device'},
    'engram': {'core', 'engram'},
    'gemm': {'core', 'gemm'},
    'learn': {'core', 'gemm', 'interpreter', 'learn', 'sight', 'testing', 'tuning'},  # exercise 17 is timed beside gemm
    'linear_attention': {'core', 'device', 'engram', 'linear_attention'},
    'distributed': {'core', 'distributed', 'moe', 'quant', 'scale'},
    'modeling': {
        'activation',
        'attention',
        'transform',
        'compat',
        'core',
        'distributed',
        'engram',
        'gemm',
        'linear_attention',
        'mhc',
        'modeling',
        'moe',
        'norm',
        'quant',
    },
    'profiler': {'core', 'interpreter', 'profiler', 'sight', 'tuning'},
    'rand': {'core', 'rand'},
    'scale': {'core', 'interpreter', 'scale'},
    'sight': {'core', 'interpreter', 'sight'},
    'transform': {'core', 'transform'},
    'tuning': {'core', 'interpreter', 'sight', 'testing', 'tuning'},
    'mhc': {'core', 'device', 'mhc'},
    'moe': {'core', 'device', 'modeling', 'moe', 'quant'},  # routing builds on casts; the layer is offered here as well
    'quant': {'activation', 'core', 'device', 'norm', 'quant'},  # offers the names of TileKernels, loaded late
    'transpose': {'core', 'transpose'},
}


def run(code: str) -> str:
    """What a fresh process prints; it may keep bytecode, as an installed package does."""
    env = {name: value for name, value in os.environ.items() if name != 'PYTHONDONTWRITEBYTECODE'}
    command = [sys.executable, '-c', code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=120).stdout


def test_importing_registers_operators_and_loads_no_tilelang_no_cuda_and_no_twins():
    out = run(
        "import sys, torch, tile_kernels; print(hasattr(torch.ops.tile_kernels, 'quant_per_token_cast'), "
        'torch.cuda.is_initialized(), '
        "*(name in sys.modules for name in ('tilelang', 'tvm_ffi', 'rich', 'tile_kernels.reference', "
        "'tile_kernels.tuning', 'tile_kernels.profiler')))"
    )
    assert out.split() == ['True'] + ['False'] * 7


def test_importing_costs_little_more_than_torch():
    # importing torch leaves a full collection of its own objects due, which whoever comes next pays for: not counted
    clock = 'time.process_time()'
    code = f'import gc, time, torch; gc.disable(); t = {clock}; import tile_kernels; print({clock} - t)'
    run(code)  # writes bytecode
    assert min(float(run(code)) for _ in range(3)) < 0.3


#: Packages a user imports from, and the modules `dir()` shows besides their names.
SHOWN_MODULES = {
    'tile_kernels': {
        'config',
        'distributed',
        'integrations',
        'interpreter',
        'modeling',
        'profiler',
        'reference',
        'scale',
        'sight',
        'testing',
        'torch',
        'utils',
    },
    'tile_kernels.modeling': set(modeling._MODULES),
}
PUBLIC = [
    'tile_kernels',
    *(f'tile_kernels.{part}' for part in (*ALLOWED, 'testing') if part not in ('core', 'compat', 'device')),
]


@pytest.mark.parametrize('name', PUBLIC)
def test_dir_shows_public_names_only(name):
    module = importlib.import_module(name)
    shown = set(dir(module))
    assert shown == {*module.__all__, *SHOWN_MODULES.get(name, ())}
    assert all(hasattr(module, attribute) for attribute in shown)


@pytest.mark.parametrize('name', PUBLIC)
def test_importing_everything_replaces_no_family_and_no_torch(name):
    scope = {}
    exec('import torch; from tile_kernels import engram, mhc, moe; own = torch, engram, mhc, moe', scope)
    exec(f'from {name} import *', scope)
    assert all(scope[module.__name__.rpartition('.')[2]] is module for module in scope['own'])


def imported_parts(path: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != 'tile_kernels' else [f'tile_kernels.{a.name}' for a in node.names]
        parts |= {name.split('.')[1] for name in names if name.startswith('tile_kernels.')}
    return parts


def test_imports_point_one_way():
    wrong = []
    for part, allowed in ALLOWED.items():
        for path in (PACKAGE / part).rglob('*.py'):
            extra = imported_parts(path) - allowed
            wrong += [f'{path.relative_to(PACKAGE)} imports {name}' for name in sorted(extra)]
    assert not wrong


@pytest.mark.parametrize('outside', ['tests', 'tools'])
def test_the_package_imports_nothing_that_is_not_installed(outside):
    texts = {path: path.read_text() for path in PACKAGE.rglob('*.py')}
    assert not [path for path, text in texts.items() if f'import {outside}' in text or f'from {outside}' in text]


def test_the_library_does_not_import_its_command_line():
    library = [path for path in PACKAGE.rglob('*.py') if path.parent.name != 'cli' and path.name != '__main__.py']
    assert not [path.relative_to(PACKAGE) for path in library if 'cli' in imported_parts(path)]


def declares_ops(path: Path) -> bool:
    """Whether a file decorates a function with the `op` of the core, under whichever name it imports it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module == 'tile_kernels.core.op'
        for alias in node.names
        if alias.name == 'op'
    }
    decorators = [
        decorator.func if isinstance(decorator, ast.Call) else decorator
        for node in nodes
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
    ]
    return any(isinstance(decorator, ast.Name) and decorator.id in names for decorator in decorators)


def test_every_folder_that_declares_ops_is_a_registered_family():
    found = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob('*.py') if declares_ops(path)}
    assert found == set(FAMILIES), 'add the folder to FAMILIES and to the imports of tile_kernels/__init__.py'
    assert {op.family for op in ops.values()} == set(FAMILIES)


def test_a_decorated_op_is_seen(tmp_path):
    file = tmp_path / 'new.py'
    start = 'from tile_kernels.core.op import op\n'
    for text, expected in (
        ('@op\ndef f(x): ...', True),
        ("@op(outputs='y', twin=g)\ndef f(x): ...", True),
        ('@kernel\ndef f(x): ...', False),
    ):
        file.write_text(start + text)
        assert declares_ops(file) is expected
    file.write_text('from tile_kernels.interpreter.engine.dialect import op\n@op\ndef f(x): ...')
    assert not declares_ops(file)


@pytest.mark.parametrize(('version', 'said'), [('2.1.0', True), ('1.0.0', True), ('0.1.0', False)])
def test_the_first_import_notices_the_other_project(version, said, tmp_path):
    metadata = tmp_path / f'tile_kernels-{version}.dist-info' / 'METADATA'
    metadata.parent.mkdir()
    metadata.write_text(f'Metadata-Version: 2.1\nName: tile-kernels\nVersion: {version}\n')
    code = (
        f'import sys, warnings; sys.path.insert(0, {str(tmp_path)!r})\n'
        'with warnings.catch_warnings(record=True) as caught:\n'
        '    warnings.simplefilter("always"); import tile_kernels\n'
        'print(*(w.message for w in caught if "another project" in str(w.message)), sep="\\n")'
    )
    sentence = (
        f'tile-kernels {version}, another project, is installed over the files of this package; '
        'run: pip uninstall tile-kernels open-tile-kernels, then install open-tile-kernels again'
    )
    assert run(code).strip() == (sentence if said else '')
