"""Every Python snippet of the page about tuning and profiling runs and prints what the page says."""

import re
import runpy
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / 'docs' / 'tuning-and-profiling.md'
SNIPPET = re.compile(r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n(?:\n```text\n(?P<output>.*?)```)?', re.DOTALL)
SNIPPETS = list(SNIPPET.finditer(PAGE.read_text()))


@pytest.mark.parametrize('snippet', SNIPPETS, ids=lambda snippet: snippet['name'])
def test_snippet_prints_what_the_page_says(snippet, tmp_path, capsys, monkeypatch):
    for other in SNIPPETS:
        (tmp_path / other['name']).write_text(other[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    runpy.run_path(str(tmp_path / snippet['name']), run_name='__main__')
    sys.modules.pop('matmul', None)
    assert capsys.readouterr().out == (snippet['output'] or '')


def test_every_snippet_has_a_name_and_is_run():
    text = PAGE.read_text()
    assert len(SNIPPETS) == text.count('```python')
    assert sum(snippet['output'] is not None for snippet in SNIPPETS) == text.count('```text')
