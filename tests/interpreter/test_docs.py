"""Every Python snippet of the interpreter's page runs and prints what the page says."""

import re
import runpy
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / 'docs' / 'interpreter.md'
SNIPPET = re.compile(r'```python\n(# (?P<name>\w+\.py)\n.*?)```\n(?:\n```text\n(?P<output>.*?)```)?', re.DOTALL)
SNIPPETS = list(SNIPPET.finditer(PAGE.read_text()))


@pytest.mark.parametrize('snippet', SNIPPETS, ids=lambda snippet: snippet['name'])
def test_snippet_prints_what_the_page_says(snippet, tmp_path, capsys):
    script = tmp_path / snippet['name']
    script.write_text(snippet[1])
    runpy.run_path(str(script), run_name='__main__')
    assert capsys.readouterr().out.replace(f'{tmp_path}/', '') == (snippet['output'] or '')


def test_every_snippet_has_a_name_and_is_run():
    text = PAGE.read_text()
    assert len(SNIPPETS) == text.count('```python')
    assert sum(snippet['output'] is not None for snippet in SNIPPETS) == text.count('```text')
    assert len({snippet['name'] for snippet in SNIPPETS}) == len(SNIPPETS)
