"""Every Python snippet of `docs/sight.md` runs and prints what the page says."""

import re
import runpy
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / 'docs' / 'sight.md').read_text()
SNIPPET = re.compile(r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n(?:\n```text\n(?P<output>.*?)```)?', re.DOTALL)
SNIPPETS = list(SNIPPET.finditer(PAGE))


@pytest.mark.parametrize('snippet', SNIPPETS, ids=lambda snippet: snippet['name'])
def test_snippet_prints_what_the_page_says(snippet, tmp_path, capsys, monkeypatch):
    for other in SNIPPETS:
        (tmp_path / other['name']).write_text(other[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    runpy.run_path(str(tmp_path / snippet['name']), run_name='__main__')
    sys.modules.pop('matmul', None)
    assert capsys.readouterr().out.replace(f'{tmp_path}/', '') == (snippet['output'] or '')


def test_every_snippet_is_run():
    assert len(SNIPPETS) == PAGE.count('```python') == 1 + PAGE.count('```text') == 4
