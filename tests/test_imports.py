"""What importing costs, what it must not touch, and which way imports point."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / 'tile_kernels'

#: What each part may import of this package; `*` marks everything.
ALLOWED = {
    'core': {'core', 'interpreter'},  # launch reaches the interpreter when it runs a kernel on a CPU
    'reference': {'core', 'reference', 'moe', 'engram'},
    'compat': {'reference'},
    'interpreter': {'interpreter', 'core'},
    'engram': {'core', 'engram'},
    'gemm': {'core', 'gemm'},
    'distributed': {'core', 'distributed', 'moe', 'quant'},
    'modeling': {'core', 'distributed', 'engram', 'gemm', 'mhc', 'modeling', 'moe', 'quant'},
    'rand': {'core', 'rand'},
    'transform': {'core', 'transform'},
    'mhc': {'core', 'mhc'},
    'moe': {'core', 'modeling', 'moe', 'quant'},  # routing builds on casts; the layer is offered here as well
    'quant': {'core', 'quant'},
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
        "*(name in sys.modules for name in ('tilelang', 'tvm_ffi', 'rich', 'tile_kernels.reference')))"
    )
    assert out.split() == ['True'] + ['False'] * 5


def test_importing_costs_little_more_than_torch():
    # importing torch leaves a full collection of its own objects due, which whoever comes next pays for: not counted
    clock = 'time.process_time()'
    code = f'import gc, time, torch; gc.disable(); t = {clock}; import tile_kernels; print({clock} - t)'
    run(code)  # writes bytecode
    assert min(float(run(code)) for _ in range(3)) < 0.3


#: Packages a user imports from, and the modules `dir()` shows besides their names.
SHOWN_MODULES = {
    'tile_kernels': {'config', 'distributed', 'interpreter', 'modeling', 'reference', 'testing', 'torch', 'utils'},
    'tile_kernels.modeling': {'engram', 'mhc', 'moe'},
}
PUBLIC = ['tile_kernels', *(f'tile_kernels.{part}' for part in (*ALLOWED, 'testing') if part not in ('core', 'compat'))]


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


def test_nothing_imports_the_tests():
    assert not [p for p in PACKAGE.rglob('*.py') if 'import tests' in p.read_text() or 'from tests' in p.read_text()]
