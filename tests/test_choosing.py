"""The page `docs/choosing.md`: its snippets run and print what it says, and its names exist."""

import importlib
import re
import runpy
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[1] / 'docs' / 'choosing.md').read_text()
SNIPPETS = list(
    re.finditer(r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n\n```text\n(?P<output>.*?)```', PAGE, re.DOTALL)
)
NAMES = sorted(set(re.findall(r'`([a-z_]+)\.([A-Za-z_0-9]+)`', PAGE)))


@pytest.mark.parametrize('snippet', SNIPPETS, ids=lambda snippet: snippet['name'])
def test_snippet_prints_what_the_page_says(snippet, tmp_path, capsys):
    script = tmp_path / snippet['name']
    script.write_text(snippet[1])
    runpy.run_path(str(script), run_name='__main__')
    assert capsys.readouterr().out == snippet['output']


def test_every_snippet_is_run():
    assert 0 < len(SNIPPETS) == PAGE.count('```python')


@pytest.mark.parametrize(('family', 'name'), NAMES)
def test_every_name_exists(family, name):
    assert name in importlib.import_module(f'tile_kernels.{family}').__all__
