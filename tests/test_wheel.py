"""What the wheel holds, and what it leaves out. Building takes some seconds."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import tile_kernels

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / 'tile_kernels'

pytestmark = pytest.mark.skipif(importlib.util.find_spec('setuptools') is None, reason='builds with setuptools')


@pytest.fixture(scope='module')
def wheel(tmp_path_factory):
    """The wheel built from a copy of what it is made of: building in the checkout would leave files there."""
    copy, out = tmp_path_factory.mktemp('source'), tmp_path_factory.mktemp('wheel')
    for name in ('tile_kernels', 'tests', 'tools', 'docs', 'examples'):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns('__pycache__'))
    table = copy / 'tile_kernels' / 'tuned' / 'some-gpu' / 'some_kernel.json'
    table.parent.mkdir(parents=True)
    table.write_text('{}')
    for name in ('pyproject.toml', 'README.md', 'LICENSE', 'tile_kernels_pytest.py'):
        shutil.copy(ROOT / name, copy)
    code = f'from setuptools import build_meta; build_meta.build_wheel({str(out)!r})'
    subprocess.run([sys.executable, '-c', code], cwd=copy, capture_output=True, check=True)
    (built,) = out.glob('*.whl')
    with zipfile.ZipFile(built) as archive:
        yield built.name, {name: archive.read(name) for name in archive.namelist()}


def test_it_is_called_open_tile_kernels_and_has_the_version_of_the_package(wheel):
    name, files = wheel
    assert name == f'open_tile_kernels-{tile_kernels.__version__}-py3-none-any.whl'
    (metadata,) = (text.decode() for path, text in files.items() if path.endswith('/METADATA'))
    assert re.search('^Name: open-tile-kernels$', metadata, re.MULTILINE)


def test_it_holds_every_module_of_the_package_and_the_plugin_and_nothing_else(wheel):
    _, files = wheel
    own = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob('*.py')} | {'tile_kernels_pytest.py'}
    outside = {path for path in files if not path.startswith('open_tile_kernels-')}
    assert own <= outside
    tables = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob('*.json')}
    table = 'tile_kernels/tuned/some-gpu/some_kernel.json'
    track = {str(path.relative_to(ROOT)) for path in (PACKAGE / 'learn' / 'exercises').glob('*/*.md')}
    assert outside - own == {'tile_kernels/py.typed', table, 'tile_kernels/learn/answers.bin'} | tables | track
    assert 'tile_kernels/compat/quant/types.py' in own and 'tile_kernels/compat/torch/__init__.py' in own


#: What a learner does after `pip install`, in one process.
FIRST_STEPS = """
import contextlib, io, pathlib, tile_kernels
from tile_kernels.cli.main import main

assert '/site/' in tile_kernels.__file__
assert main(['learn', 'start']) == 0
assert main(['learn', 'check', '1']) == 1
with contextlib.redirect_stdout(io.StringIO()) as answer:
    assert main(['learn', 'reveal', '1', '--yes']) == 0
pathlib.Path('tile-kernels-learn/01_copy.py').write_text(answer.getvalue())
assert main(['learn', 'check', '1']) == 0
"""


def test_the_learning_track_works_without_a_checkout(wheel, tmp_path):
    for name, content in wheel[1].items():
        if name.startswith('tile_kernels'):
            (tmp_path / 'site' / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / 'site' / name).write_bytes(content)
    (tmp_path / 'first_steps.py').write_text(FIRST_STEPS)
    environment = os.environ | {'PYTHONPATH': str(tmp_path / 'site')}
    command = [sys.executable, 'first_steps.py']
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 'copy is not finished' in done.stdout and '★ 01' in done.stdout


def test_it_declares_the_command_and_the_plugin(wheel):
    (text,) = (text.decode() for path, text in wheel[1].items() if path.endswith('/entry_points.txt'))
    assert 'tile-kernels = tile_kernels.cli.main:main' in text
    assert 'tile_kernels = tile_kernels_pytest' in text
