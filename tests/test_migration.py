"""The page `docs/migration.md`: its snippets run and print what it says, and its names exist."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

from tile_kernels import config

PAGE = (Path(__file__).parents[1] / 'docs' / 'migration.md').read_text()
SNIPPETS = list(
    re.finditer(r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n\n```text\n(?P<output>.*?)```', PAGE, re.DOTALL)
)
NAMES = sorted(set(re.findall(r'`((?:attention|engram|modeling|moe|quant|rand|transform)(?:\.[A-Za-z_0-9]+)+)', PAGE)))


@pytest.fixture(autouse=True)
def settings():
    yield
    config.reset_runtime_config()


@pytest.mark.parametrize('snippet', SNIPPETS, ids=lambda snippet: snippet['name'])
def test_snippet_prints_what_the_page_says(snippet, tmp_path, capsys):
    script = tmp_path / snippet['name']
    script.write_text(snippet[1])
    runpy.run_path(str(script), run_name='__main__')
    assert capsys.readouterr().out == snippet['output']


def test_every_snippet_is_run():
    assert 0 < len(SNIPPETS) == PAGE.count('```python')


@pytest.mark.parametrize('name', NAMES)
def test_every_name_exists(name):
    path, _, last = name.rpartition('.')
    package = importlib.import_module(f'tile_kernels.{path}')
    assert hasattr(package, last) or importlib.import_module(f'tile_kernels.{name}')


def test_names_are_found():
    assert {'modeling.MHCPipeline', 'moe.topk_gating', 'quant.fake_quantize'} <= set(NAMES)
